"""GuardedAdam with gradients that are given, against torch's Adam: guard, clipping, targets, state, compiled step."""

import copy

import pytest
import torch
from torch import nn

from torchrl_perf.runtime import Acceleration, compiled, no_host_sync
from torchrl_perf.trainers import GuardedAdam

SHAPES = ((3, 2), (4,), ())
LOSS = torch.tensor(1.0)
KINDS = ("fused", "for-loop")  # what runs eagerly, and the operations that are compiled


def make(kind, groups, **options):
    groups = [{"params": params, "lr": rate} for params, rate in groups]
    return GuardedAdam(groups, eps=1e-8, acceleration=Acceleration(optimizer=kind), **options)


def parameters(seed=0, device="cpu"):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape).to(device)) for shape in SHAPES]


def gradients(seed, params):
    torch.manual_seed(seed)
    return [torch.randn(param.shape).to(param.device) for param in params]


def run(adam, steps, tau=0.0, seed=0, targets=(), step=None):
    for number in range(steps):
        loss = LOSS.to(adam.params[0].device)
        (step or adam.apply_gradients)(gradients(seed + number, adam.params), loss, targets, tau)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_adam_with_a_step_size_for_each_group(device, kind):
    params, reference = parameters(device=device), parameters(device=device)
    adam = make(kind, [(params[:2], 0.1), (params[2:], 0.01)])
    torchs = torch.optim.Adam([{"params": reference[:2], "lr": 0.1}, {"params": reference[2:], "lr": 0.01}])
    for step in range(4):
        grads = gradients(step, params)
        taken, norm = adam.apply_gradients(grads, LOSS.to(device))
        for param, grad in zip(reference, grads, strict=True):
            param.grad = grad
        torchs.step()
        assert bool(taken)
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads))
    for one, two in zip(params, reference, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_divides_by_the_common_norm(kind):
    params, clipped = parameters(), parameters()
    adam = make(kind, [(params, 0.1)], max_grad_norm=0.5)
    torchs = torch.optim.Adam(clipped, lr=0.1)
    for step in range(3):
        grads = gradients(step, params)
        for param, grad in zip(clipped, grads, strict=True):
            param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(clipped, 0.5)
        torchs.step()
        adam.apply_gradients(grads, LOSS)
    for one, two in zip(params, clipped, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["nan", "inf", "loss"])
def test_a_bad_step_changes_nothing_and_the_next_goes_on(kind, bad):
    params, undisturbed = parameters(), parameters()
    adam, other = (make(kind, [(each, 0.1)]) for each in (params, undisturbed))
    run(adam, 1)
    run(other, 1)
    grads = gradients(7, params)
    if bad != "loss":
        grads[1][2] = float(bad)
    taken, _ = adam.apply_gradients(grads, torch.tensor(1.0 if bad != "loss" else torch.nan))
    assert not taken
    run(adam, 2, seed=3)
    run(other, 2, seed=3)
    for one, two in zip(params, undisturbed, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tau", [0.25, 1.0, torch.tensor(0.25), torch.tensor(0.0)])
def test_targets_follow_the_new_parameters(kind, tau):
    params = parameters()
    targets = [torch.zeros_like(param, requires_grad=False) for param in params]
    run(make(kind, [(params, 0.1)]), 1, tau, targets=targets)
    for param, target in zip(params, targets, strict=True):
        torch.testing.assert_close(target, float(tau) * param.detach())
    if float(tau) == 1.0:
        assert all(torch.equal(param, target) for param, target in zip(params, targets, strict=True))


def test_compiled_equals_eager_with_everything(variant):
    results = []
    for compile_ in (False, variant.name != "eager"):
        params = parameters(device=variant.device)
        targets = [torch.zeros_like(param, requires_grad=False) for param in params]
        groups = [(params[:2], 0.1), (params[2:], 0.01)]
        adam = make("fused", groups, max_grad_norm=1.0, weight_decay=0.1, decoupled_weight_decay=True)
        run(adam, 3, 0.1, targets=targets, step=compiled(adam.apply_gradients) if compile_ else None)
        results.append([*params, *targets, *(value for state in adam.state.values() for value in state.values())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_a_step_size_that_is_overwritten_is_honoured():
    params = parameters()
    before = [param.detach().clone() for param in params]
    adam = make("fused", [(params[:2], 0.1), (params[2:], 0.1)])
    adam.learning_rates[0].zero_()
    run(adam, 1)
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[2], before[2])


def test_state_goes_on_bit_for_bit():
    params = parameters()
    adam = make("fused", [(params, 0.1)])
    run(adam, 2)
    saved = [param.detach().clone() for param in params]
    state = copy.deepcopy(adam.state_dict())
    run(adam, 2, seed=5)
    again = [nn.Parameter(value) for value in saved]
    resumed = make("fused", [(again, 0.9)])
    resumed.load_state_dict(state)
    run(resumed, 2, seed=5)
    for one, two in zip(params, again, strict=True):
        assert torch.equal(one, two)


def lists_of(adam):
    """The state as the optimiser of off-policy runs stored it up to 0.1."""
    states = [adam.state[param] for param in adam.params]
    exact = [state["exact"] for state in states if "exact" in state]
    lists = {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}
    state = {"steps": states[0]["step"], **lists, "learning_rates": adam.learning_rates}
    return copy.deepcopy(state | ({"exact": exact} if exact else {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_old_state_goes_on_bit_for_bit(dtype):
    params = [nn.Parameter(param.detach().to(dtype)) for param in parameters()]
    adam = make("fused", [(params[:2], 0.1), (params[2:], 0.2)])
    run(adam, 2)
    saved, state = [param.detach().clone() for param in params], lists_of(adam)
    run(adam, 2, seed=5)
    again = [nn.Parameter(value) for value in saved]
    resumed = make("fused", [(again[:2], 0.9), (again[2:], 0.9)])
    resumed.load_state_dict(state)
    run(resumed, 2, seed=5)
    for one, two in zip(params, again, strict=True):
        assert torch.equal(one, two)
    assert resumed.param_groups[0]["eps"] == 1e-8


def test_an_old_state_of_other_parameters_is_refused():
    adam = make("fused", [(parameters(), 0.1)])
    other = make("fused", [(parameters()[:2], 0.1)])
    with pytest.raises(ValueError, match=r"state_dict: expected lists of .*'exp_avg': 3.*'exp_avg': 2.*Remedy"):
        adam.load_state_dict(lists_of(other))


def test_steps_of_both_ways_add_up():
    params, reference = parameters(), parameters()
    adam, other = make("fused", [(params, 0.1)]), make("fused", [(reference, 0.1)])
    run(other, 4)
    run(adam, 2)
    for seed in (2, 3):
        for param, grad in zip(params, gradients(seed, params), strict=True):
            param.grad = grad
        adam.step()
    for one, two in zip(params, reference, strict=True):
        assert torch.equal(one, two)


def test_a_state_that_was_emptied_begins_anew():
    params = parameters()
    adam = make("fused", [(params, 0.1)])
    run(adam, 2)
    fresh = [nn.Parameter(param.detach().clone()) for param in params]
    adam.state.clear()
    run(adam, 2)
    run(make("fused", [(fresh, 0.1)]), 2)
    for one, two in zip(params, fresh, strict=True):
        assert torch.equal(one, two)


def test_no_host_read(device):
    params = parameters(device=device)
    targets = [torch.zeros_like(param, requires_grad=False) for param in params]
    adam = make("fused", [(params, 0.1)], max_grad_norm=1.0)
    grads, loss, tau = gradients(0, params), LOSS.to(device), torch.tensor(0.1, device=device)
    with no_host_sync():
        adam.apply_gradients(grads, loss)
        adam.apply_gradients(grads, loss, targets, tau)
