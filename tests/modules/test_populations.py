"""Populations of critics: K networks in one pass learn what K networks apart learn."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from torchrl_perf.modules import ComponentValues, EnsembleMLP, EnsembleQ
from torchrl_perf.runtime import no_host_sync

K, IN, H = 3, 5, 8


def member(net, k):
    """Member k as an ordinary network."""
    layers = []
    for weight, bias in zip(net.weights, net.biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[2], dtype=weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(weight[k].T)
            layer.bias.copy_(bias[k, 0])
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def same(net, members):
    for k, each in enumerate(members):
        for number, layer in enumerate(each[::2]):
            torch.testing.assert_close(net.weights[number][k].T, layer.weight)
            torch.testing.assert_close(net.biases[number][k, 0], layer.bias)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("per_member", [False, True])
def test_training_is_that_of_separate_networks(optimizer, per_member):
    """All parameters after five steps, each member with separate targets."""
    net = EnsembleMLP(K, IN, 2, hidden_sizes=(H, H)).double()
    apart = [member(net, k) for k in range(K)]
    steps = [optimizer(net.parameters(), lr=1e-2), *(optimizer(each.parameters(), lr=1e-2) for each in apart)]
    for _ in range(5):
        x = torch.randn(K, 6, IN, dtype=torch.float64) if per_member else torch.randn(6, IN, dtype=torch.float64)
        target = torch.randn(K, 6, 2, dtype=torch.float64)
        for each in steps:
            each.zero_grad()
        (net(x, per_member=per_member) - target).square().mean((1, 2)).sum().backward()
        for k, each in enumerate(apart):
            (each(x[k] if per_member else x) - target[k]).square().mean().backward()
        for each in steps:
            each.step()
    same(net, apart)


def test_equals_vmap_over_stacked_networks():
    net = EnsembleMLP(K, IN, 1, hidden_sizes=(H,)).double()
    apart = [member(net, k) for k in range(K)]
    params, buffers = stack_module_state(apart)
    x = torch.randn(7, IN, dtype=torch.float64)
    stacked = torch.vmap(lambda p, b: functional_call(apart[0], (p, b), (x,)))(params, buffers)
    torch.testing.assert_close(net(x), stacked)


def test_a_member_does_not_feel_the_others():
    net = EnsembleQ(K, IN, hidden_sizes=(H,))
    net(torch.randn(6, IN))[..., 1].sum().backward()
    for param in net.parameters():
        assert (param.grad[1] != 0).any()
        assert (param.grad[[0, 2]] == 0).all()


def test_the_least_of_the_critics_has_a_gradient_of_one_member_for_each_row():
    net = EnsembleQ(K, IN, hidden_sizes=(H,))
    x, action = torch.randn(6, 3), torch.randn(6, 2, requires_grad=True)
    values = net(x, action)
    values.amin(-1).sum().backward()
    for row in range(6):
        k = int(values[row].argmin())
        one = action[row].detach().clone().requires_grad_()
        net(x[row], one)[k].backward()
        torch.testing.assert_close(action.grad[row], one.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_component_values_are_a_head_for_each_component(shared, shape):
    net = ComponentValues(IN, ("a", "b", "c"), hidden_size=H, shared=shared).double()
    x = torch.randn(*shape, IN, dtype=torch.float64)
    values = net(x)
    assert values.shape == (*shape, 3)
    rows = torch.stack([net(row) for row in x.reshape(-1, IN)]).view(*shape, 3)
    torch.testing.assert_close(values, rows)
    values[..., 0].sum().backward()
    if not shared:
        assert all((param.grad[1:] == 0).all() for param in net.parameters())


def test_component_values_refuse_names_that_repeat():
    with pytest.raises(
        ValueError, match=r"names: expected a name for each component, each once, received \('a', 'a'\)"
    ):
        ComponentValues(IN, ("a", "a"))
    with pytest.raises(ValueError, match="names: expected a name for each component"):
        ComponentValues(IN, ())


def test_no_host_wait(device):
    net = EnsembleQ(K, IN, hidden_sizes=(H,), device=device)
    with no_host_sync(device):
        net(torch.ones(4, IN, device=device)).mean().backward()
