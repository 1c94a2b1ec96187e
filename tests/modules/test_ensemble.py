"""EnsembleMLP: K members as K separate perceptrons."""

import pytest
import torch
from torch import nn

from torchrl_perf.modules import EnsembleMLP, EnsembleQ
from torchrl_perf.modules.ensemble import _compiled_layer, _layer

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "elu": nn.ELU, "silu": nn.SiLU}


def members(net):
    """The members as ordinary networks with the same weights."""
    out = []
    for k in range(net.num_members):
        layers = []
        for weight, bias in zip(net.weights, net.biases, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[2]).to(weight)
            with torch.no_grad():
                layer.weight.copy_(weight[k].T)
                layer.bias.copy_(bias[k, 0])
            layers += [layer, ACTIVATIONS[net.activation]()]
        out.append(nn.Sequential(*layers[:-1]))
    return out


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("num_members, hidden", [(1, ()), (2, (8,)), (5, (8, 6, 4))])
@pytest.mark.parametrize("batch", [(), (1,), (7,), (3, 4)])
def test_values_and_gradients_are_those_of_separate_networks(activation, num_members, hidden, batch):
    net = EnsembleMLP(num_members, 3, 2, hidden_sizes=hidden, activation=activation).double()
    x = torch.randn(*batch, 3, dtype=torch.float64, requires_grad=True)
    separate = members(net)
    expected = torch.stack([member(x) for member in separate])
    got = net(x)
    assert got.shape == (num_members, *batch, 2)
    torch.testing.assert_close(got, expected)
    factor = torch.randn_like(expected)
    grad_x, *grads = torch.autograd.grad((got * factor).sum(), [x, *net.parameters()])
    (expected * factor).sum().backward()
    torch.testing.assert_close(grad_x, x.grad)
    first = torch.stack([member[0].weight.grad.T for member in separate])
    torch.testing.assert_close(grads[0], first)


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_an_input_for_each_member(batch):
    net = EnsembleMLP(3, 5, 2, hidden_sizes=(4,)).double()
    x = torch.randn(3, *batch, 5, dtype=torch.float64)
    expected = torch.stack([member(row) for member, row in zip(members(net), x, strict=True)])
    torch.testing.assert_close(net(x, per_member=True), expected)


def test_rows_of_a_packed_buffer():
    """Inputs that are strided views, as a replay buffer returns them."""
    net = EnsembleMLP(2, 5, 1, hidden_sizes=(4,))
    packed = torch.randn(6, 13)
    view = packed[:, 3:8]
    torch.testing.assert_close(net(view), net(view.contiguous()))


def test_members_are_initialised_apart_and_as_linear_layers_are():
    net = EnsembleMLP(3, 400, 300, hidden_sizes=())
    weight, bias = net.weights[0], net.biases[0]
    assert not torch.equal(weight[0], weight[1])
    bound = 1 / 20
    for value in (weight, bias):
        assert value.abs().max() <= bound
        assert value.std(unbiased=False).item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"expected one of \['elu', 'gelu', .*\], received 'swish'"):
        EnsembleMLP(2, 3, 1, activation="swish")
    with pytest.raises(ValueError, match="expected at least 1, received 0"):
        EnsembleMLP(0, 3, 1)
    with pytest.raises(ValueError, match=r"expected \[K, \*, IN\] with K = 2, received \[3, 4\]"):
        EnsembleMLP(2, 4, 1)(torch.zeros(3, 4), per_member=True)


def test_q_values():
    net = EnsembleQ(2, 7, hidden_sizes=(8,))
    observation, action = torch.randn(6, 5), torch.randn(6, 2)
    value = net(observation, action)
    assert value.shape == (6, 2)
    torch.testing.assert_close(value, net.net(torch.cat([observation, action], -1)).squeeze(-1).T)


def test_compiled_equals_eager(variant):
    net = EnsembleMLP(2, 5, 1, hidden_sizes=(16, 16), device=variant.device)
    x = torch.randn(8, 5, device=variant.device)
    with torch.no_grad():
        torch.testing.assert_close(variant(net.forward)(x), net(x))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_layer_for_a_compiler_is_the_layer(outputs):
    x, weight, bias = torch.randn(2, 5, 4), torch.randn(2, 4, outputs), torch.randn(2, 1, outputs)
    torch.testing.assert_close(_compiled_layer(x, weight, bias), _layer(x, weight, bias))
