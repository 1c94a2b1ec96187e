"""GroupAdam against torch's Adam; guard, clipping, targets, state, and the compiled step."""

import pytest
import torch
from torch import nn

from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import GroupAdam

SHAPES = ((3, 2), (4,), ())
LOSS = torch.tensor(1.0)
KINDS = ("kernel", "formula")  # what runs eagerly, and what is compiled


def make(kind, groups, **options):
    adam = GroupAdam(groups, **options)
    adam._step = getattr(adam, f"_{kind}")
    return adam


def parameters(seed=0, device="cpu"):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape).to(device)) for shape in SHAPES]


def gradients(seed, params):
    torch.manual_seed(seed)
    return [torch.randn(param.shape).to(param.device) for param in params]


def run(adam, steps, tau=0.0, seed=0):
    for step in range(steps):
        adam.step(gradients(seed + step, adam.params), LOSS.to(adam.params[0].device), tau)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_adam_with_a_step_size_for_each_group(device, kind):
    params, reference = parameters(device=device), parameters(device=device)
    adam = make(kind, [(params[:2], 0.1), (params[2:], 0.01)])
    torchs = torch.optim.Adam([{"params": reference[:2], "lr": 0.1}, {"params": reference[2:], "lr": 0.01}])
    for step in range(4):
        grads = gradients(step, params)
        taken, norm = adam.step(grads, LOSS.to(device))
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
        adam.step(grads, LOSS)
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
    taken, _ = adam.step(grads, torch.tensor(1.0 if bad != "loss" else torch.nan))
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
    adam = make(kind, [(params, 0.1)], targets=targets)
    run(adam, 1, tau)
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
        adam = GroupAdam(groups, max_grad_norm=1.0, targets=targets, compile=compile_)
        run(adam, 3, 0.1)
        results.append([*params, *targets, *adam.exp_avg, *adam.exp_avg_sq, adam.steps])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_a_step_size_that_is_overwritten_is_honoured():
    params = parameters()
    before = [param.detach().clone() for param in params]
    adam = GroupAdam([(params[:2], 0.1), (params[2:], 0.1)])
    adam.learning_rates[0].zero_()
    run(adam, 1)
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[2], before[2])


def test_state_goes_on_bit_for_bit():
    params = parameters()
    adam = GroupAdam([(params, 0.1)])
    run(adam, 2)
    saved = [param.detach().clone() for param in params]
    state = torch.utils._pytree.tree_map(lambda leaf: leaf.clone(), adam.state_dict())
    run(adam, 2, seed=5)
    again = [nn.Parameter(value) for value in saved]
    resumed = GroupAdam([(again, 0.9)])
    resumed.load_state_dict(state)
    run(resumed, 2, seed=5)
    for one, two in zip(params, again, strict=True):
        assert torch.equal(one, two)


def test_state_of_other_parameters_is_refused():
    adam = GroupAdam([(parameters(), 0.1)])
    other = GroupAdam([(parameters()[:2], 0.1)])
    with pytest.raises(ValueError, match=r"expected exp_avg of shapes \[\[3, 2\], \[4\], \[\]\], received .*Remedy"):
        adam.load_state_dict(other.state_dict())


def test_no_host_read(device):
    params = parameters(device=device)
    targets = [torch.zeros_like(param, requires_grad=False) for param in params]
    adam = GroupAdam([(params, 0.1)], max_grad_norm=1.0, targets=targets)
    grads, loss, tau = gradients(0, params), LOSS.to(device), torch.tensor(0.1, device=device)
    with no_host_sync():
        adam.step(grads, loss)
        adam.step(grads, loss, tau)
