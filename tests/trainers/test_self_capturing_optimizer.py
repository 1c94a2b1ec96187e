"""GuardedAdam's step as a graph of its own: the numbers of the eager one, in any eager loop."""

import copy

import pytest
import torch
from recording_device import recording_device
from torch import nn

from torchrl_perf.trainers import GuardedAdam

device = recording_device


def nets(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    return net, copy.deepcopy(net)


def step(net, optimizer, update, *, scale=1.0, freeze=False):
    torch.manual_seed(update)
    loss = net(torch.randn(16, 3)).square().mean() * scale if optimizer.params[0].device.type == "cpu" else None
    if loss is None:
        loss = net(torch.randn(16, 3).cuda()).square().mean() * scale
    loss.backward()
    if freeze:
        net[0].weight.grad = None
    optimizer.step()
    optimizer.zero_grad(set_to_none=update % 3 > 0)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}], ids=["adam", "adamw"])
def test_it_equals_the_eager_step(options, device):
    """With schedules, a gradient that is not finite, one that is missing, and a reloaded state."""
    found = []
    for net, capture in zip(nets(device), (False, True), strict=True):
        optimizer = GuardedAdam(net.parameters(), lr=0.1, max_grad_norm=0.5, capture=capture, **options)
        stored, norms = None, []
        for update in range(24):
            step(
                net,
                optimizer,
                update,
                scale=float("nan") if update in (1, 9) else 1.0,
                freeze=update in (5, 12, 13, 14),
            )
            norms.append(optimizer.grad_norms.clone())
            if update == 10:
                optimizer.param_groups[0]["lr"] = 0.05
            if update == 15:
                stored = copy.deepcopy(optimizer.state_dict())
            if update == 19:
                optimizer.load_state_dict(stored)
        assert optimizer._replays.recorded is capture
        found.append([*net.parameters(), *norms])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_given_arguments_closures_and_copies_are_not_recorded(device):
    net, _ = nets(device)
    optimizer = GuardedAdam(net.parameters(), lr=0.1)
    for update in range(5):
        step(net, optimizer, update)
    assert optimizer._replays.recorded
    other = copy.deepcopy(optimizer)
    assert not other._replays.recorded
    x = torch.randn(4, 3, device=device)

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    before = net[0].weight.clone()
    assert optimizer.step(closure).ndim == 0
    assert not torch.equal(before, net[0].weight)
    optimizer.step(skip=torch.ones((), device=device), grad_scale=torch.ones((), device=device))


def test_a_new_group_counts_from_its_first_step(device):
    found = []
    for net, capture in zip(nets(device), (False, True), strict=True):
        optimizer = GuardedAdam(net[0].parameters(), lr=0.1, capture=capture)
        for update in range(12):
            if update == 6:
                optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
            step(net, optimizer, update)
        found.append(list(net.parameters()))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-6, atol=1e-7)
