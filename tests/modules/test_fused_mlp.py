"""FusedMLP is an nn.Sequential in all but speed."""

import pytest
import torch
from torch import nn

from torchrl_perf.functional.mlp import mlp
from torchrl_perf.modules import FusedMLP, chains
from torchrl_perf.modules import mlp as module


def plain(net, inputs, outputs, hidden, activation):
    act = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    layers = nn.Linear(inputs, hidden), act(), nn.Linear(hidden, hidden), act(), nn.Linear(hidden, outputs)
    made = nn.Sequential(*layers)
    made.load_state_dict(net.state_dict())
    return made


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (9, 3), (2, 5, 3)])
def test_equals_a_sequential_with_the_same_state(activation, shape):
    module = FusedMLP(3, 2, hidden_size=32, activation=activation)
    net = plain(module, 3, 2, 32, activation)
    x = torch.randn(shape)
    assert torch.equal(module(x), net(x))
    module(x).square().sum().backward()
    net(x).square().sum().backward()
    for ours, torchs in zip(module.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours.grad, torchs.grad)


def test_orthogonal_initialisation():
    module = FusedMLP(64, 64, hidden_size=64, output_gain=0.01)
    eye = torch.eye(64)
    for layer, gain in ((module[0], 2.0), (module[2], 2.0), (module[4], 1e-4)):
        torch.testing.assert_close(layer.weight @ layer.weight.T, gain * eye, rtol=1e-4, atol=1e-5 * gain)
        assert (layer.bias == 0).all()


def test_gradient_of_the_input():
    module, x = FusedMLP(3, 2, hidden_size=32), torch.randn(5, 3, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(("name", "value"), [("activation", "swish"), ("precision", "fp8")])
def test_unknown_choices_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}: expected one of .*received '{value}'"):
        FusedMLP(3, 2, **{name: value})


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("shape", [(3,), (1, 3), (33, 3), (2, 5, 3)])
    def test_any_batch_shape(self, shape):
        module = FusedMLP(3, 2, precision="ieee", device="cuda")
        x = torch.randn(shape, device="cuda")
        torch.testing.assert_close(module(x), nn.Sequential.forward(module, x), rtol=1e-4, atol=1e-5)

    def test_no_rows(self):
        module = FusedMLP(3, 2, device="cuda")
        assert module(torch.empty(0, 3, device="cuda")).shape == (0, 2)

    def test_compiles_as_one_graph(self, fresh_dynamo):
        from torchrl_perf.runtime.compile import compiled

        module = FusedMLP(3, 2, precision="ieee", device="cuda")
        x = torch.randn(40, 3, device="cuda")
        torch.testing.assert_close(compiled(module.forward)(x), module(x))

    def test_gradient_of_the_input_runs_layer_by_layer(self):
        module, x = FusedMLP(3, 2, device="cuda"), torch.randn(5, 3, device="cuda", requires_grad=True)
        module(x).sum().backward()
        assert x.grad.abs().sum() > 0


class OnCuda(torch.Tensor):
    """A tensor that says that it is on CUDA."""

    @property
    def is_cuda(self):
        return True


def other_activation(net):
    net[1], net[3] = nn.ReLU(), nn.ReLU()


def one_other_activation(net):
    net[3] = nn.Sigmoid()


def one_layer_more(net):
    net.append(nn.Tanh())


def a_hook(net):
    net[2].register_forward_hook(lambda layer, inputs, output: 2 * output)


def a_forward(net):
    net[0].forward = lambda x: torch.zeros(*x.shape[:-1], 32)


def a_weight_of_its_own(net):
    nn.utils.parametrizations.weight_norm(net[2])


def replaced_weight(net):
    bias = net[4].bias
    del net[4].weight, net[4].bias
    net[4].bias, net[4].weight = bias, nn.Parameter(torch.randn(2, 32))


@pytest.mark.parametrize(
    ("change", "kernels"),
    [
        (lambda net: None, 1), (other_activation, 1), (one_other_activation, 0), (one_layer_more, 0), (a_hook, 0),
        (a_forward, 0), (a_weight_of_its_own, 0), (replaced_weight, 1),
    ],
)  # fmt: skip
def test_what_is_changed_later_counts(monkeypatch, change, kernels):
    calls = []

    def fused(x, params, activation, precision):
        calls.append(activation)
        return mlp(x.as_subclass(torch.Tensor), params, activation)

    monkeypatch.setattr(module, "fused_mlp", fused)
    monkeypatch.setattr(module, "fusable", lambda x, params: True)
    monkeypatch.setattr(chains, "runs_as_chain", lambda *args: False)
    net, x = FusedMLP(3, 2, hidden_size=32), torch.randn(7, 3)
    net(x.as_subclass(OnCuda))
    change(net)
    expected = x
    for layer in net:
        expected = layer(expected)
    torch.testing.assert_close(net(x.as_subclass(OnCuda)).as_subclass(torch.Tensor), expected)
    assert len(calls) == 1 + kernels
