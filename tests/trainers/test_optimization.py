"""GuardedAdam against torch's Adam with clip_grad_norm_, and steps that are skipped."""

import pytest
import torch
from torch import nn

from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import GuardedAdam


def make_net(device="cpu", dtype=torch.float32):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(device, dtype)


def set_gradients(net, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter)


def guarded_step(optimizer, skip=0.0):
    norm = optimizer.grad_norm()
    scale = (norm / optimizer.max_grad_norm).clamp_min(1.0)
    optimizer.step(scale, torch.full((), skip, device=norm.device))


def snapshot(optimizer):
    state = [value for parameter in optimizer.params for value in optimizer.adam.state[parameter].values()]
    return [tensor.detach().clone() for tensor in (*optimizer.params, *state)]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_equals_adam_with_clipped_gradients(scale, device):
    ours, theirs = make_net(device), make_net(device)
    optimizer = GuardedAdam(ours.parameters(), learning_rate=1e-2, max_grad_norm=0.5)
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=1e-5)
    for seed in range(20):
        set_gradients(ours, seed, scale)
        set_gradients(theirs, seed, scale)
        torch.testing.assert_close(
            optimizer.grad_norm(), torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
        )
        guarded_step(optimizer)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adam.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # clip_grad_norm_ divides by norm + 1e-6
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_step_without_arguments_clips_and_skips_by_itself(device):
    alone, told = make_net(device), make_net(device)
    optimizer, explicit = (
        GuardedAdam(net.parameters(), learning_rate=1e-2, max_grad_norm=0.5) for net in (alone, told)
    )
    for seed in range(5):
        set_gradients(alone, seed, 10.0)
        set_gradients(told, seed, 10.0)
        optimizer.step()
        guarded_step(explicit)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(optimizer), snapshot(explicit), strict=True))
    before = snapshot(optimizer)
    set_gradients(alone, 9)
    next(alone.parameters()).grad[0, 0] = torch.nan
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(snapshot(optimizer), before, strict=True))


@pytest.mark.parametrize("first", [True, False], ids=["before any step", "after steps"])
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
def test_a_skipped_step_changes_no_bit(first, bad, device):
    net = make_net(device)
    optimizer = GuardedAdam(net.parameters(), learning_rate=1e-2, max_grad_norm=0.5)
    if not first:
        for seed in range(3):
            set_gradients(net, seed)
            guarded_step(optimizer)
    before = snapshot(optimizer) if not first else [p.detach().clone() for p in net.parameters()]
    set_gradients(net, 9)
    if bad is not None:
        net[0].weight.grad[1, 1] = bad
    guarded_step(optimizer, skip=1.0)
    after = snapshot(optimizer)
    for one, other in zip(after, before, strict=False):
        assert torch.equal(one, other)
    assert all(tensor.isfinite().all() for tensor in after)
    # and the next good step is the one that would have been taken
    other_net = make_net(device)
    other = GuardedAdam(other_net.parameters(), learning_rate=1e-2, max_grad_norm=0.5)
    for seed in [*([] if first else range(3)), 5]:
        set_gradients(other_net, seed)
        guarded_step(other)
    set_gradients(net, 5)
    guarded_step(optimizer)
    for one, two in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_learning_rate_is_a_tensor_that_counts(device):
    net = make_net(device)
    optimizer = GuardedAdam(net.parameters(), learning_rate=1e-2, max_grad_norm=1e9)
    before = net[0].weight.detach().clone()
    optimizer.learning_rate.fill_(0.125)
    set_gradients(net, 0)
    guarded_step(optimizer)
    # Adam's first step moves every weight by the learning rate
    moved = (net[0].weight - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.125), rtol=1e-2, atol=0)


def test_no_host_read():
    net = make_net()
    optimizer = GuardedAdam(net.parameters(), learning_rate=1e-2, max_grad_norm=0.5)
    set_gradients(net, 0)
    with no_host_sync():
        guarded_step(optimizer)
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("used", [True, False], ids=["into one in use", "into a new one"])
def test_resume_is_bitwise(used, tmp_path, device):
    net, other_net = make_net(device), make_net(device)
    optimizer, other = (GuardedAdam(n.parameters(), learning_rate=1e-2, max_grad_norm=0.5) for n in (net, other_net))
    for seed in range(3):
        set_gradients(net, seed)
        guarded_step(optimizer)
    optimizer.learning_rate.fill_(3e-3)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    if used:
        set_gradients(other_net, 77)
        guarded_step(other)
    address = other.learning_rate.data_ptr()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other_net.load_state_dict(state["net"])
    other.load_state_dict(state["optimizer"])
    assert other.learning_rate.data_ptr() == address
    assert other.adam.param_groups[0]["lr"] is other.learning_rate
    for seed in (3, 4):
        for each, each_net in ((optimizer, net), (other, other_net)):
            set_gradients(each_net, seed)
            guarded_step(each)
    for one, two in zip(snapshot(optimizer), snapshot(other), strict=True):
        assert torch.equal(one, two)
    assert optimizer.learning_rate == other.learning_rate


def test_state_saved_before_the_first_step_begins_anew(device):
    net = make_net(device)
    optimizer = GuardedAdam(net.parameters(), learning_rate=1e-2, max_grad_norm=0.5)
    # as PyTorch's optimisers and those of 0.1 have it: nothing for a parameter that has not learnt
    state = {**optimizer.state_dict(), "state": {}}
    weights = {key: value.clone() for key, value in net.state_dict().items()}
    results = []
    for _ in range(2):
        set_gradients(net, 0)
        guarded_step(optimizer)
        results.append([p.detach().clone() for p in net.parameters()])
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
