"""Adam as a function of tensors against torch's own optimisers, in the dtypes that the fused kernel does not serve."""

import math

import pytest
import torch

from torchrl_perf.functional.adam import (
    AdamSettings,
    adam_step_,
    adam_steps_,
    bias_corrections,
    exact_copy_,
    widest_dtype,
)

SHAPES = ((3, 2), (4,), ())


@pytest.fixture(params=["one by one", "together"])
def step(request):
    """A step of all parameters: called for each, or once."""

    def taken(state, grads, *, lr=0.1, scale=1.0, skip=0.0, **settings):
        params, means, squares, counts = state
        number = {"dtype": params[0].dtype, "device": params[0].device}
        counts.add_(1.0 - skip)
        given = AdamSettings(**settings)
        first, second = bias_corrections(counts.clamp_min(1.0).to(params[0].dtype), given.betas)
        options = {
            "lr": torch.tensor(lr, **number),
            "settings": given,
            "grad_scale": torch.tensor(scale, **number),
            "skip": torch.tensor(skip, **number),
        }
        if request.param == "together":
            adam_steps_(params, grads, means, squares, (first, second), **options)
            return
        for n, (param, grad) in enumerate(zip(params, grads, strict=True)):
            adam_step_(param, grad, means[n], squares[n], (first[n], second[n]), **options)

    return taken


def made(device, dtype=torch.float64):
    params = [torch.randn(shape).to(device, dtype) for shape in SHAPES]
    moments = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    return params, *moments, torch.zeros(len(params), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("decoupled", [False, True])
def test_it_is_torchs_adam(step, device, dtype, weight_decay, decoupled):
    given = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": weight_decay}
    state = made(device, dtype)
    reference = [param.clone().requires_grad_() for param in state[0]]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torchs = kind(reference, lr=0.1, **given)
    for _ in range(4):
        grads = [torch.randn_like(param) for param in state[0]]
        for param, grad in zip(reference, grads, strict=True):
            param.grad = grad.clone()
        torchs.step()
        step(state, [4.0 * grad for grad in grads], scale=4.0, decoupled=decoupled, **given)
    for ours, theirs in zip(state[0], reference, strict=True):
        torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("taken", [0, 2])
def test_a_step_that_is_skipped_changes_no_bit(step, device, taken):
    state = made(device)
    for _ in range(taken):
        step(state, [torch.randn_like(param) for param in state[0]])
    before = [[tensor.clone() for tensor in tensors] for tensors in state]
    step(state, [torch.full_like(param, torch.nan) for param in state[0]], skip=1.0)
    for old, new in zip(before, state, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(old, new, strict=True))


def test_each_parameter_has_its_own_count(step, device):
    state = made(device)
    state[3][1].fill_(7.0)
    before = [param.clone() for param in state[0]]
    step(state, [torch.ones_like(param) for param in state[0]], lr=1.0, eps=0.0)
    for param, old, count in zip(state[0], before, (1, 8, 1), strict=True):
        mean, square = 0.1 / (1 - 0.9**count), 0.001 / (1 - 0.999**count)
        torch.testing.assert_close(param, old - mean / math.sqrt(square))


def test_corrections_keep_their_digits(device):
    steps = torch.tensor([1.0, 2.0, 1e6], dtype=torch.float32, device=device)
    first, second = bias_corrections(steps, (0.9, 0.999))
    exact = steps.double()
    torch.testing.assert_close(first.double(), 1 - 0.9**exact, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(second.double(), (1 - 0.999**exact).sqrt(), rtol=1e-6, atol=0.0)
    assert bias_corrections(steps, (0.0, 0.999))[0].tolist() == [1.0, 1.0, 1.0]


def test_small_steps_add_up_and_another_value_counts(device):
    param = torch.tensor([1.0, 1.0, 2.0], dtype=torch.bfloat16, device=device)
    exact = torch.tensor([1.001, 1.5, 2.0], device=device)
    got = exact_copy_(exact, param)
    assert got is exact
    assert got.tolist() == [pytest.approx(1.001), 1.0, 2.0]


def test_moments_of_half_precision_are_float32():
    assert widest_dtype(torch.bfloat16) == widest_dtype(torch.float32) == torch.float32
    assert widest_dtype(torch.float64) == torch.float64
