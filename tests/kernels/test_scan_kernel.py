"""The scan kernels against float64 loops on CUDA: shapes, layouts, dtypes, exactness, graphs; and what needs no GPU."""

import random
import subprocess
import sys

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional import generalized_advantage_estimate, linear_recurrence, reverse_linear_recurrence
from torchrl_perf.functional.memory.linear import lru_sequence, min_gru_sequence
from torchrl_perf.kernels import has_scan_kernels

SHAPES = (
    (1, 1), (1, 2), (3, 1), (1, 2048), (1, 5000), (7, 33), (16, 2048), (17, 4100), (129, 100), (300, 700), (513, 257),
    (1000, 1000), (2048, 128), (2049, 65), (4096, 128), (8191, 31), (8192, 128), (33000, 20), (40000, 127),
)  # fmt: skip
LAYOUTS = {"time-major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "env-major": torch.Tensor.contiguous}


def signals(n, t, layout, dtype=torch.float32):
    shape = (n, t, 1)
    floats = [torch.randn(shape, device="cuda").to(dtype) for _ in range(3)]
    done = torch.rand(shape, device="cuda") < 0.03
    terminated = done & (torch.rand(shape, device="cuda") < 0.5)
    return [LAYOUTS[layout](x) for x in (*floats, done, terminated)]


def gae_loop(gamma, lmbda, value, next_value, reward, done, terminated):
    value, next_value, reward = value.double(), next_value.double(), reward.double()
    delta = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    advantage, carry = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        carry = delta[:, t] + torch.where(done[:, t], 0.0, gamma * lmbda * carry)
        advantage[:, t] = carry
    return advantage, advantage + value


def test_package_import_loads_no_triton():
    # an import of it would fail; that it is not loaded does not tell, since tensordict loads it where it is
    code = "import sys; sys.modules['triton'] = None; import torchrl_perf.kernels, torchrl_perf.functional"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cpu_tensors_and_float64_have_no_kernel():
    assert not has_scan_kernels(torch.zeros(2))
    assert not has_scan_kernels(torch.zeros(2, dtype=torch.float64))


@tries_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_gae_of_random_shapes(monkeypatch, seed, layout):
    """Any steps and envs, tiles and strides, and episodes of any length; interpreted where there is no GPU."""
    from torchrl_perf.kernels import scan

    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, t, share = draw.randint(1, 20), draw.randint(1, 90), draw.choice([0.0, 0.03, 0.5, 1.0])
    tile = draw.choice([1, 2, 4]), draw.choice([8, 16, 32]), draw.choice([1, 4])
    monkeypatch.setattr(scan, "launch_shape", lambda *_, **__: tile)
    done = torch.rand(n, t, 1, generator=generator) < share
    flags = [done, done & (torch.rand(n, t, 1, generator=generator) < 0.5)]
    floats = [torch.randn(n, t, 1, generator=generator) for _ in range(3)]
    tensors = [LAYOUTS[layout](each.to(kernel_device())) for each in (*floats, *flags)]
    gamma = 0.99 if draw.random() < 0.5 else torch.tensor(0.99, device=kernel_device())
    ours = scan.launch_gae(gamma, 0.95, *(each.squeeze(-1).t() for each in tensors))
    for result, want in zip(ours, gae_loop(0.99, 0.95, *tensors), strict=True):
        torch.testing.assert_close(result.t().unsqueeze(-1).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
class TestGAEKernel:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("n", "t"), SHAPES)
    def test_equals_loop(self, n, t, layout):
        tensors = signals(n, t, layout)
        expected = gae_loop(0.99, 0.95, *tensors)
        ours = generalized_advantage_estimate(0.99, 0.95, *tensors)
        for result, want in zip(ours, expected, strict=True):
            torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=2e-4)
        assert n == 1 or t == 1 or ours[0].stride()[:2] == tensors[2].stride()[:2]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("n", "t"), [(5, 300), (600, 130), (9000, 40)])
    def test_half_precision_is_computed_in_float32(self, n, t, layout, dtype):
        tensors = signals(n, t, layout, dtype)
        expected = gae_loop(0.99, 0.95, *tensors)
        ours = generalized_advantage_estimate(0.99, 0.95, *tensors)
        assert ours[0].dtype == torch.float32
        for result, want in zip(ours, expected, strict=True):
            torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=2e-4)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("n", [1, 200, 600, 3000, 9000, 40000])
    def test_long_and_undiscounted_is_exact(self, n, layout):
        t = 4096 if n <= 3000 else 1024
        zero = LAYOUTS[layout](torch.zeros(n, t, 1, device="cuda"))
        never = torch.zeros_like(zero, dtype=torch.bool)
        advantage, _ = generalized_advantage_estimate(1.0, 1.0, zero, zero, zero + 1, never, never)
        assert torch.equal(advantage, torch.arange(t, 0.0, -1.0, device="cuda").view(1, -1, 1).expand(n, -1, 1))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("n", "t"), [(3, 900), (200, 130), (600, 300), (3000, 70), (9000, 40)])
    def test_bad_numbers_stay_in_their_episode(self, n, t, layout):
        value, next_value, reward, done, terminated = signals(n, t, layout)
        next_value = torch.where(terminated, float("nan"), next_value)
        reward = torch.where(torch.rand_like(reward) < 0.01, float("nan"), reward)
        reward = LAYOUTS[layout](reward)
        # A product of such decays underflows within a few steps; the NaN travels as in a loop all the same.
        for lmbda in (0.95, 1e-8):
            ours, _ = generalized_advantage_estimate(0.99, lmbda, value, next_value, reward, done, terminated)
            want, _ = gae_loop(0.99, lmbda, value, next_value, reward, done, terminated)
            torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=2e-4, equal_nan=True)

    def test_numbers_in_device_memory(self):
        tensors = signals(50, 60, "time-major")
        want, _ = generalized_advantage_estimate(0.99, 0.95, *tensors)
        for dtype in (torch.float32, torch.float64):
            gamma, lmbda = (torch.tensor(x, dtype=dtype, device="cuda") for x in (0.99, 0.95))
            for numbers in ((gamma, lmbda), (gamma, 0.95), (0.99, lmbda)):
                ours, _ = generalized_advantage_estimate(*numbers, *tensors)
                torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)

    def test_mixed_layouts_and_packed_columns(self):
        packed = torch.randn(60, 500, 8, device="cuda").transpose(0, 1)
        value, reward = packed[..., 1:2], packed[..., 6:7]
        next_value, done = packed[..., 2:3].contiguous(), packed[..., 7:] > 1.5
        ours, _ = generalized_advantage_estimate(0.99, 0.95, value, next_value, reward, done)
        want, _ = gae_loop(0.99, 0.95, value, next_value, reward, done, done)
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=2e-4)

    def test_one_launch_and_no_host_wait(self):
        tensors = signals(512, 64, "time-major")
        generalized_advantage_estimate(0.99, 0.95, *tensors)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
                generalized_advantage_estimate(0.99, 0.95, *tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) == 1, [event.name for event in kernels]

    def test_captured_into_a_graph(self):
        tensors = signals(16, 2048, "time-major")
        generalized_advantage_estimate(0.99, 0.95, *tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = generalized_advantage_estimate(0.99, 0.95, *tensors)
        tensors[2].mul_(2)
        graph.replay()
        want, _ = generalized_advantage_estimate(0.99, 0.95, *tensors)
        assert torch.equal(captured, want)

    @pytest.mark.parametrize("backend", ["eager", "inductor"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.usefixtures("fresh_dynamo")
    def test_compiles_without_a_break(self, layout, backend):
        tensors = signals(33, 50, layout)
        compiled = torch.compile(generalized_advantage_estimate, fullgraph=True, backend=backend)
        want = generalized_advantage_estimate(0.99, 0.95, *tensors)
        for ours, result in zip(compiled(0.99, 0.95, *tensors), want, strict=True):
            assert torch.equal(ours, result)


@pytest.mark.gpu
class TestRecurrenceKernel:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize(("n", "t"), SHAPES)
    def test_equals_loop(self, n, t, reverse, layout):
        decay = LAYOUTS[layout](torch.rand(n, t, 1, device="cuda") * 1.9 - 0.95)
        decay = torch.where(torch.rand_like(decay) < 0.05, 0.0, decay)
        value, initial = LAYOUTS[layout](torch.randn(n, t, 1, device="cuda")), torch.randn(n, 1, device="cuda")
        value[n // 2, t // 2] = float("nan")
        carry = torch.zeros_like(initial).double() if reverse else initial.double()
        want = torch.empty_like(value, dtype=torch.float64)
        for i in reversed(range(t)) if reverse else range(t):
            carry = value[:, i] + torch.where(decay[:, i] == 0, 0.0, decay[:, i] * carry)
            want[:, i] = carry
        ours = reverse_linear_recurrence(decay, value) if reverse else linear_recurrence(decay, value, initial)
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-4, equal_nan=True)
        assert n == 1 or t == 1 or ours.stride()[:2] == value.stride()[:2]


CELLS = [(3, 40, 16), (16, 2048, 128), (200, 128, 64), (700, 9, 33), (1, 5, 300), (2, 1, 20)]
"""Envs, steps and numbers of a state."""


@tries_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("n", "t", "h"), CELLS)
def test_sequences_of_cells_are_scanned_where_they_lie(n, t, h, reverse, layout):
    from torchrl_perf.kernels.scan import launch_recurrence

    if kernel_device() == "cpu" and n * t * h > 20_000:
        n, t, h = min(n, 4), min(t, 70), min(h, 33)
    decay = LAYOUTS[layout](torch.rand(n, t, h, device=kernel_device()) * 1.9 - 0.95)
    decay = torch.where(torch.rand_like(decay) < 0.05, 0.0, decay)
    value = LAYOUTS[layout](torch.randn(n, t, h, device=kernel_device()))
    initial = None if reverse else torch.randn(n, h, device=kernel_device())
    carry = torch.zeros_like(value[:, 0]).double() if reverse else initial.double()
    want = torch.empty_like(value, dtype=torch.float64)
    for i in reversed(range(t)) if reverse else range(t):
        carry = value[:, i] + decay[:, i] * carry
        want[:, i] = carry
    found = launch_recurrence(decay, value, initial, reverse)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-4)
    assert found.stride() == value.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["min_gru", "lru"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_compiled_linear_cell_is_the_eager_one(cell, turned):
    """A compiler believes in the layout that an operator promises, and may give it inputs of another one."""
    n, t, h = 16, 2048, 64
    x = torch.randn(t, n, 2 * h, device="cuda").transpose(0, 1) if turned else torch.randn(n, t, 2 * h, device="cuda")
    begins = torch.rand(n, t, device="cuda") < 0.01

    def loss(x):
        if cell == "min_gru":
            out = min_gru_sequence(x * 2, x.new_zeros(n, h), begins)
        else:
            decay, angle = torch.linspace(0.9, 0.999, h, device="cuda"), torch.linspace(0.01, 0.3, h, device="cuda")
            out = lru_sequence(*(x * 2).chunk(2, -1), x.new_zeros(n, 2 * h), begins, decay, angle)
        return out.square().mean() * 1e3

    x.requires_grad_()
    found, expected = (torch.autograd.grad(fn(x), x)[0] for fn in (torch.compile(loss), loss))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
