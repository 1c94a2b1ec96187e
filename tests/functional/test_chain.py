"""The reference of the perceptrons of any depth, and what their kernels take."""

import pytest
import torch
from torch import nn

from torchrl_perf.functional.chain import ACTIVATIONS, chain, runs_as_chain
from torchrl_perf.modules import FusedMLP
from torchrl_perf.modules import chains as module


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("shape", [(4,), (7, 4), (2, 3, 4), (0, 4)])
def test_equals_layers_of_torch(activation, layer_norm, shape):
    net = FusedMLP(4, 2, hidden_sizes=(5, 3), activation=activation, layer_norm=layer_norm)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    params = [tensor for layer in net for tensor in layer.parameters()]
    x = torch.randn(shape)
    assert torch.equal(chain(x, params, activation, 1e-5 if layer_norm else 0.0), net(x))


def test_a_linear_map():
    weight, bias = torch.randn(2, 3), torch.randn(2)
    x = torch.randn(5, 3)
    torch.testing.assert_close(chain(x, [weight, bias]), x @ weight.T + bias)


def test_kernels_are_not_for_a_cpu():
    assert not runs_as_chain(torch.ones(8, 4), [torch.ones(2, 4), torch.ones(2)])


class Stub:
    """A stand-in for the kernels, which notes what they are asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, x, params, activation, eps, precision):
        self.asked.append((activation, eps, precision))
        return chain(x, params, activation, eps)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hidden_sizes": (256, 256)}, ("tanh", 0.0, "tf32")),
        ({"hidden_sizes": (48, 32), "activation": "mish", "precision": "bf16"}, ("mish", 0.0, "bf16")),
        ({"hidden_sizes": (64, 64), "layer_norm": True}, ("tanh", 1e-5, "tf32")),
        ({"hidden_sizes": (256, 256), "precision": "ieee"}, None),
        ({"hidden_sizes": ()}, None),
    ],
)
def test_networks_that_run_as_a_chain(monkeypatch, options, expected):
    stub = Stub()
    monkeypatch.setattr(module, "fused_chain", stub)
    monkeypatch.setattr(module, "runs_as_chain", lambda x, params, eps: True)
    net = FusedMLP(4, 2, **options)
    x = torch.randn(2, 3, 4)
    on_cuda = torch.Tensor._make_subclass(OnCuda, x)
    torch.testing.assert_close(net(on_cuda).as_subclass(torch.Tensor), nn.Sequential.forward(net, x))
    assert stub.asked == ([] if expected is None else [expected])


class OnCuda(torch.Tensor):
    """A tensor that says that it is on CUDA."""

    @property
    def is_cuda(self):
        return True


@pytest.mark.gpu
def test_what_a_kernel_takes():
    x, params = torch.ones(8, 4, device="cuda"), [torch.ones(2, 4, device="cuda"), torch.ones(2, device="cuda")]
    assert runs_as_chain(x, params)
    assert not runs_as_chain(x.double(), params)
    assert not runs_as_chain(x, [params[0].t().contiguous().t(), params[1]])


@pytest.mark.gpu
@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_network_on_cuda_equals_its_layers(layer_norm):
    net = FusedMLP(5, 3, hidden_sizes=(200, 90), activation="elu", layer_norm=layer_norm, device="cuda")
    x = torch.randn(2, 50, 5, device="cuda", requires_grad=True)
    torch.testing.assert_close(net(x), nn.Sequential.forward(net, x), rtol=1e-2, atol=1e-2)
    (got,) = torch.autograd.grad(net(x).sum(), x)
    (wanted,) = torch.autograd.grad(nn.Sequential.forward(net, x).sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


def test_inside_of_a_transform_it_runs_layer_by_layer():
    net = FusedMLP(4, 2, hidden_sizes=(8,))
    x = torch.randn(3, 4)
    one = torch.func.vmap(net)(x)
    torch.testing.assert_close(one, net(x))
