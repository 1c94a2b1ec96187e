"""GuardedAdam in every precision: the float32 or float64 step, rounded once, and skips that keep all."""

import pytest
import torch
from torch import nn

from torchrl_perf.runtime import Acceleration, compiled, no_host_sync
from torchrl_perf.trainers import GuardedAdam

NARROW = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, torch.float64, *NARROW]
MIXED = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
SHAPES = ((3, 5), (5,), (), (2, 3, 4))


def make_params(dtypes, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * len(SHAPES)
    return [nn.Parameter(value.to(device, dtype)) for value, dtype in zip(values, dtypes, strict=True)]


def gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale for p in params]
    return [value.to(param) for value, param in zip(made, params, strict=True)]


def reference(params, all_gradients, lr, *, eps=1e-5, max_norm=0.5, betas=(0.9, 0.999), decay=0.0, decoupled=False):
    """Adam in float64 from the rounded parameters and gradients."""
    values = [param.detach().double().clone() for param in params]
    means, squares = ([torch.zeros_like(value) for value in values] for _ in range(2))
    for step, grads in enumerate(all_gradients, 1):
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
        for value, grad, mean, square in zip(values, grads, means, squares, strict=True):
            scaled = grad.double() / (norm / max_norm).clamp_min(1.0)
            if decoupled:
                value.sub_(lr * decay * value)
            else:
                scaled = scaled + decay * value
            mean.lerp_(scaled, 1 - betas[0])
            square.lerp_(scaled.square(), 1 - betas[1])
            root = (square / (1 - betas[1] ** step)).sqrt() + eps
            value.sub_(lr * mean / (1 - betas[0] ** step) / root)
    return values


def assert_rounded_once(params, expected, steps):
    for param, wide in zip(params, expected, strict=True):
        # half a unit in the last place of the dtype, and what float32 (or float64) arithmetic adds in all steps
        unit = torch.finfo(param.dtype).eps * wide.abs()
        working = torch.float64 if param.dtype == torch.float64 else torch.float32
        tolerance = 0.51 * unit + steps * 4 * torch.finfo(working).eps * wide.abs().clamp_min(0.1)
        if param.dtype == torch.float16:
            tolerance = tolerance + 2**-25  # subnormal
        difference = (param.detach().double() - wide).abs()
        assert (difference <= tolerance).all(), (param.dtype, difference.max(), tolerance.min())


@pytest.mark.parametrize("kind", ["fused", "for-loop"])
@pytest.mark.parametrize("lr", [1e-1, 1e-4])
@pytest.mark.parametrize("dtypes", [*DTYPES, MIXED], ids=str)
def test_guarded_adam_is_the_wide_step_rounded_once(dtypes, lr, kind, device):
    params = make_params(dtypes, device)
    optimizer = GuardedAdam(params, lr=lr, max_grad_norm=0.5, acceleration=Acceleration(optimizer=kind))
    given = [gradients(params, seed, scale) for seed, scale in enumerate([1.0, 0.01, 3.0] * 10)]
    expected = reference(params, given, lr)
    for grads in given:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    assert_rounded_once(params, expected, len(given))
    assert [param.dtype for param in params] == ([dtypes] * 4 if isinstance(dtypes, torch.dtype) else list(dtypes))
    for state in optimizer.state.values():
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} <= {torch.float32, torch.float64}


@pytest.mark.parametrize("kind", ["fused", "for-loop"])
@pytest.mark.parametrize("lr", [1e-1, 1e-4])
@pytest.mark.parametrize("dtypes", [*DTYPES, MIXED], ids=str)
def test_a_step_of_given_gradients_is_the_wide_step_rounded_once(dtypes, lr, kind, device):
    params = make_params(dtypes, device)
    options = {"betas": (0.8, 0.99), "weight_decay": 0.01, "eps": 1e-6}
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = GuardedAdam(groups, lr, max_grad_norm=0.5, acceleration=Acceleration(optimizer=kind), **options)
    given = [gradients(params, seed, scale) for seed, scale in enumerate([1.0, 0.01, 3.0] * 10)]
    expected = reference(params, given, lr, eps=1e-6, betas=(0.8, 0.99), decay=0.01)
    for grads in given:
        optimizer.apply_gradients([grad.clone() for grad in grads], torch.ones((), device=device))
    assert_rounded_once(params, expected, len(given))


@pytest.mark.parametrize("kind", ["fused", "for-loop"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_decay_and_betas(dtype, decoupled, kind):
    params = make_params(dtype)
    optimizer = GuardedAdam(
        params, 1e-2, (0.7, 0.9), 1e-6, 0.1, decoupled_weight_decay=decoupled, acceleration=Acceleration(optimizer=kind)
    )
    given = [gradients(params, seed) for seed in range(10)]
    expected = reference(
        params, given, 1e-2, eps=1e-6, betas=(0.7, 0.9), decay=0.1, decoupled=decoupled, max_norm=float("inf")
    )
    for grads in given:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    assert_rounded_once(params, expected, len(given))


@pytest.mark.parametrize("dtype", NARROW)
def test_steps_below_the_resolution_add_up(dtype):
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = GuardedAdam([param], lr=1e-4)
    other = nn.Parameter(torch.ones(4, dtype=dtype))
    group = GuardedAdam([other], lr=1e-4)
    for _ in range(1000):
        param.grad = torch.ones_like(param)
        optimizer.step()
        group.apply_gradients([torch.ones_like(other)], torch.ones(()))
    for value in (param, other):
        torch.testing.assert_close(value.detach().float(), torch.full((4,), 0.9), rtol=0.005, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_written_to_a_narrow_parameter_counts(dtype):
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = GuardedAdam([param], lr=1e-4)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.no_grad():
        param.fill_(5.0)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), 5.0, dtype=dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_the_norm_of_large_gradients_does_not_overflow(dtype):
    params = make_params(dtype)
    optimizer = GuardedAdam(params, lr=1e-2, max_grad_norm=1.0)
    for param in params:
        param.grad = torch.full_like(param, 6e4)
    expected = 6e4 * sum(param.numel() for param in params) ** 0.5
    assert optimizer.grad_norm().item() == pytest.approx(expected, rel=0.01)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert all(not torch.equal(param, old) for param, old in zip(params, before, strict=True))


def everything(optimizer):
    states = [value for param in optimizer.params for value in optimizer.state[param].values()]
    return [value.detach().clone() for value in (*optimizer.params, *states)]


@pytest.mark.parametrize("kind", ["fused", "for-loop"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtypes", [*DTYPES, MIXED], ids=str)
def test_a_skipped_step_keeps_every_bit(dtypes, bad, kind, device):
    params = make_params(dtypes, device)
    optimizer = GuardedAdam(params, lr=1e-2, max_grad_norm=0.5, acceleration=Acceleration(optimizer=kind))
    for seed in range(2):
        for param, grad in zip(params, gradients(params, seed), strict=True):
            param.grad = grad
        optimizer.step()
    before = everything(optimizer)
    params[1].grad[2] = bad
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(everything(optimizer), before, strict=True))


@pytest.mark.parametrize("kind", ["fused", "for-loop"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("late", [(0,), (1,), (0, 2), (3,)])
def test_a_first_gradient_in_a_skipped_step_disturbs_no_other(late, dtype, kind):
    params = make_params(dtype)
    optimizer = GuardedAdam(params, lr=1e-2, max_grad_norm=0.5, acceleration=Acceleration(optimizer=kind))
    for seed in range(3):
        for number, (param, grad) in enumerate(zip(params, gradients(params, seed), strict=True)):
            param.grad = None if number in late else grad
        optimizer.step()
    kept = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in enumerate(params) if n not in late}
    values = [param.detach().clone() for param in params]
    for param, grad in zip(params, gradients(params, 9), strict=True):
        param.grad = grad
    params[late[0]].grad.fill_(torch.nan)
    optimizer.step()
    for number, (param, value) in enumerate(zip(params, values, strict=True)):
        assert torch.equal(param, value)
        if number in late:
            assert all(not optimizer.state[param][name].any() for name in ("step", "exp_avg", "exp_avg_sq"))
        else:
            assert all(torch.equal(optimizer.state[param][name], old) for name, old in kept[number].items())


@pytest.mark.parametrize("dtypes", [*DTYPES, MIXED], ids=str)
def test_no_host_waits(dtypes, device):
    params = make_params(dtypes, device)
    optimizer = GuardedAdam(params, lr=1e-2, max_grad_norm=0.5)
    for param, grad in zip(params, gradients(params, 0), strict=True):
        param.grad = grad
    loss = torch.ones((), device=device)
    optimizer.step()
    with no_host_sync():
        optimizer.step()
        optimizer.apply_gradients([param.grad.clone() for param in params], loss)


@pytest.mark.parametrize("way", ["step", "apply_gradients"])
@pytest.mark.parametrize("dtypes", [torch.bfloat16, MIXED], ids=str)
def test_the_state_goes_on_bit_for_bit(dtypes, way):
    def make():
        params = make_params(dtypes)
        return params, GuardedAdam(params, lr=1e-4)

    def take(params, optimizer, seed):
        if way == "apply_gradients":
            optimizer.apply_gradients(gradients(params, seed), torch.ones(()))
            return
        for param, grad in zip(params, gradients(params, seed), strict=True):
            param.grad = grad
        optimizer.step()

    params, optimizer = make()
    other_params, other = make()
    for seed in range(30):
        take(params, optimizer, seed)
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(other_params, params, strict=True):
        one.data.copy_(two)
    for seed in range(30, 60):
        take(params, optimizer, seed)
        take(other_params, other, seed)
    assert all(torch.equal(one, two) for one, two in zip(params, other_params, strict=True))


@pytest.mark.parametrize("compile_", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_follow_in_every_precision(dtype, compile_):
    params = make_params(dtype)
    if compile_ and dtype == torch.float64:
        # PyTorch's compiler takes a float64 scalar on a CPU for a number, and loses what is written to it
        params = [param for param in params if param.ndim]
    targets = [torch.zeros_like(param) for param in params]
    adam = GuardedAdam(params, lr=1e-2)
    step = compiled(adam.apply_gradients, backend="aot_eager") if compile_ else adam.apply_gradients
    step(gradients(params, 0), torch.ones(()), targets, 0.25)
    step(gradients(params, 1), torch.ones(()), targets, torch.tensor(1.0))
    for target, param in zip(targets, params, strict=True):
        torch.testing.assert_close(target, param.detach(), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_dtypes_that_cannot_be_learnt_in_are_refused():
    with pytest.raises(ValueError, match=r"params: expected one of torch.float32.*received torch.complex64.*Remedy"):
        GuardedAdam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=1e-2)
