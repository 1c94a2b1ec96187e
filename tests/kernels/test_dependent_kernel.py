"""Launches that overlap: the same numbers as launches that do not."""

import pytest
import torch

from tests.kernels.interpreted import tries_kernels


@tries_kernels
def test_kernels_that_take_part_are_launched_early_where_that_works(monkeypatch):
    from torchrl_perf.kernels import launch

    class Kernel:
        def __init__(self, *names):
            self.arg_names, self.calls = names, []

        def __getitem__(self, grid):
            return lambda *args, **options: self.calls.append(options)

    x = torch.empty(4)
    takes_part, others = Kernel("x", "A", "EARLY"), Kernel("x", "A")
    for early in (False, True):
        monkeypatch.setattr(launch, "overlaps", lambda device, early=early: early)
        for kernel in (takes_part, others):
            launch.launch(kernel, (1,), (x,), {"A": 3}, num_warps=4)
    assert takes_part.calls == [
        {"A": 3, "EARLY": False, "num_warps": 4},
        {"A": 3, "EARLY": True, "num_warps": 4, "launch_pdl": True},
    ]
    assert others.calls == [{"A": 3, "num_warps": 4}] * 2


def test_a_cpu_overlaps_nothing():
    from torchrl_perf.kernels import launch

    assert not launch.overlaps(None)


@pytest.mark.gpu
def test_updates_in_a_graph_are_the_same(monkeypatch):
    """Perceptron both ways, norms and Adam, each of which writes what the next one reads, many times over."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("from sm_90 on")
    from torchrl_perf.functional.adam import AdamSettings
    from torchrl_perf.kernels import flat_adam, launch, mlp, processors

    device = torch.device("cuda", torch.cuda.current_device())
    shapes = ((64, 4), (64,), (64, 64), (64,), (2, 64), (2,))
    numbers = [torch.full((), value, device=device) for value in (1e-3, 1.0, 0.0)]

    def run(is_early):
        monkeypatch.setattr(launch, "overlaps", lambda device: is_early)
        torch.manual_seed(0)
        params = [0.3 * torch.randn(shape, device=device) for shape in shapes]
        moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        x, steps, room = torch.randn(4096, 4, device=device), torch.zeros(6, device=device), flat_adam.workspace(params)

        def update():
            y = mlp.forward(x, params, "tanh", "tf32", processors(device))
            flat = mlp.backward(y / 4096, x, params, "tanh", "tf32", processors(device))
            grads = [
                part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in params]), params, strict=True)
            ]
            norms = flat_adam.norms([grad.clone() for grad in grads], *room)
            steps.add_(1)
            scale = norms.square().sum().sqrt().clamp_min(1.0)
            whole = [grad.clone() for grad in grads]
            flat_adam.adam_((params, whole, *moments), steps, (numbers[0], scale, numbers[2]),
                            AdamSettings((0.9, 0.999), 1e-8, 0.0, True))  # fmt: skip

        update()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                update()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        return params

    for together, apart in zip(run(True), run(False), strict=True):
        assert torch.equal(together, apart)
