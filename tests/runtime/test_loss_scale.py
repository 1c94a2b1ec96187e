"""LossScale against torch.amp.GradScaler and by hand."""

import pytest
import torch

from torchrl_perf.runtime import LossScale, no_host_sync

INF = float("inf")


def feed(scale, norms):
    seen = []
    for norm in norms:
        scale.check(torch.tensor(norm, device=scale.scale.device))
        scale.update()
        seen.append((float(scale.scale), bool(scale.overflow)))
    return seen


def test_halves_on_overflow_and_doubles_after_the_interval(device):
    scale = LossScale(device, initial=8.0, interval=2)
    assert feed(scale, [1.0, INF, float("nan"), 1.0, 1.0, 1.0, 1.0]) == [
        (8.0, False),
        (4.0, True),
        (2.0, True),
        (2.0, False),
        (4.0, False),
        (4.0, False),
        (8.0, False),
    ]


def test_equals_grad_scaler():
    generator = torch.Generator().manual_seed(0)
    finite = torch.rand(200, generator=generator) > 0.1
    ours = LossScale("cpu", initial=2.0**10, interval=5)
    scale, tracker = torch.tensor(2.0**10), torch.zeros((), dtype=torch.int32)
    for good in finite:
        ours.check(torch.where(good, 1.0, INF))
        ours.update()
        torch._amp_update_scale_(scale, tracker, (~good).float(), 2.0, 0.5, 5)
        assert float(ours.scale) == max(float(scale), 1.0)
        scale.clamp_(min=1.0)


def test_at_scale_one_the_gradients_are_bad_themselves():
    scale = LossScale("cpu", initial=2.0)
    assert feed(scale, [INF, INF, INF]) == [(1.0, True), (1.0, False), (1.0, False)]


def test_the_norm_comes_back_without_the_scale():
    scale = LossScale("cpu", initial=4.0)
    assert float(scale.check(torch.tensor(6.0))) == 1.5
    assert float(scale.scaled(torch.tensor(1.5, dtype=torch.float16))) == 6.0
    assert scale.scaled(torch.tensor(1.0, dtype=torch.float16)).dtype == torch.float32


def test_no_host_waits_and_state_in_place(device):
    scale = LossScale(device, initial=4.0, interval=1)
    address = scale.scale.data_ptr()
    norm = torch.ones((), device=device)
    with no_host_sync():
        scale.check(norm)
        scale.update()
    other = LossScale(device)
    other.load_state_dict(scale.state_dict())
    assert float(other.scale) == 8.0
    assert scale.scale.data_ptr() == address


@pytest.mark.gpu
def test_adapts_inside_of_a_graph():
    from torchrl_perf.runtime import capture

    scale = LossScale("cuda", initial=8.0, interval=100)
    norm = torch.ones((), device="cuda")

    def step():
        scale.check(norm)
        scale.update()

    run = capture(step)
    for _ in range(4):
        run()
    norm.fill_(INF)
    run()
    run()
    assert float(scale.scale) == 2.0
