"""Perceptrons inside of an ``nn.Sequential``: which are found, and that only their execution differs."""

import copy

import pytest
import torch
from torch import nn

from torchrl_perf.functional.chain import chain
from torchrl_perf.modules import EmpiricalNormalization
from torchrl_perf.modules import chains as module
from torchrl_perf.modules.chains import Chain, chain_of, fuse_sequential, lacks_kernel


def layers(*kinds):
    made = {"linear": lambda: nn.Linear(4, 4), "norm": lambda: nn.LayerNorm(4), "drop": nn.Dropout}
    return [made[kind]() if isinstance(kind, str) else kind for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("linear", nn.Tanh(), "linear"), Chain(0, 3, "tanh", 0.0)),
        (("linear", nn.ELU(), "linear", nn.ELU()), Chain(0, 3, "elu", 0.0)),
        (("drop", "linear", "norm", nn.Mish(), "linear"), Chain(1, 5, "mish", 1e-5)),
        (("linear", nn.SiLU(), "linear", nn.SiLU(), "linear", nn.ReLU(), "linear"), Chain(0, 5, "silu", 0.0)),
        (("linear", "norm", nn.ReLU(), "linear", nn.ReLU(), "linear"), Chain(0, 4, "relu", 1e-5)),
        (("linear", "linear", nn.GELU(), "linear"), Chain(1, 4, "gelu", 0.0)),
        ((), None),
        (("linear",), None),
        (("linear", nn.Tanh()), None),
        (("linear", nn.Softplus(), "linear"), None),
        (("linear", nn.ELU(alpha=0.5), "linear"), None),
        (("linear", nn.LeakyReLU(0.2), "linear"), None),
        (("linear", nn.GELU("tanh"), "linear"), None),
        ((nn.Linear(4, 4, bias=False), nn.Tanh(), "linear"), None),
        (("linear", nn.LayerNorm((2, 2)), nn.Tanh(), "linear"), None),
        (("linear", nn.LayerNorm(4, elementwise_affine=False), nn.Tanh(), "linear"), None),
    ],
)
def test_what_is_found(kinds, expected):
    assert chain_of(layers(*kinds)) == expected


def test_layers_with_hooks_are_left_alone():
    found = layers("linear", nn.Tanh(), "linear")
    found[2].register_forward_hook(lambda *_: None)
    assert chain_of(found) is None


class OnCuda(torch.Tensor):
    """A tensor that says that it is on CUDA."""

    @property
    def is_cuda(self):
        return True


@pytest.fixture
def stand_in(monkeypatch):
    calls = []

    def fused(x, params, activation, eps, precision):
        calls.append(precision)
        return chain(x, params, activation, eps)

    monkeypatch.setattr(module, "fused_chain", fused)
    monkeypatch.setattr(module, "runs_as_chain", lambda x, params, eps: True)
    return calls


@pytest.mark.parametrize("is_normalized", [False, True])
def test_a_network_of_the_user_keeps_values_and_state(stand_in, is_normalized):
    first = [EmpiricalNormalization(4)] if is_normalized else []
    net = nn.Sequential(*first, *layers("linear", "norm", nn.SiLU(), "linear", nn.SiLU(), "linear"), nn.Flatten(0))
    names, x = list(net.state_dict()), torch.randn(2, 3, 4)
    expected = net(x)
    assert fuse_sequential(net, "tf32") and fuse_sequential(net, "tf32")
    assert list(net.state_dict()) == names
    assert torch.equal(net(x), expected)
    assert stand_in == []  # on a CPU
    twin = copy.deepcopy(net)
    on_cuda = x.as_subclass(OnCuda)
    for each in (net, twin):
        torch.testing.assert_close(each(on_cuda).as_subclass(torch.Tensor), expected)
    assert stand_in == ["tf32", "tf32"]
    with torch.no_grad():
        twin[-2].bias.add_(1.0)
    torch.testing.assert_close(net(on_cuda).as_subclass(torch.Tensor), expected)
    torch.testing.assert_close(twin(on_cuda).as_subclass(torch.Tensor), expected + 1.0)
    net.fuses = False
    assert torch.equal(net(on_cuda).as_subclass(torch.Tensor), expected)
    assert len(stand_in) == 4


def test_what_is_no_perceptron_is_left_alone():
    class Own(nn.Sequential):
        pass

    for network in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), Own(*layers("linear", nn.Tanh(), "linear"))):
        forward = network.forward
        assert not fuse_sequential(network, "tf32")
        assert network.forward == forward


@pytest.mark.parametrize(
    ("network", "lacks"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.ELU(alpha=0.5), nn.Linear(3, 3)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(), True),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid()), False),
        (nn.Sequential(nn.Conv1d(3, 3, 1), nn.Linear(3, 3)), False),
        (nn.Linear(3, 3), False),
    ],
)
def test_networks_without_a_kernel(network, lacks):
    assert lacks_kernel(network) is lacks


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "ieee"])
def test_a_network_of_the_user_on_cuda(precision):
    net = nn.Sequential(nn.Linear(5, 96), nn.ELU(), nn.Linear(96, 40), nn.ELU(), nn.Linear(40, 3)).cuda()
    x = torch.randn(50, 5, device="cuda")
    expected = net(x)
    fuse_sequential(net, precision)
    torch.testing.assert_close(net(x), expected, rtol=3e-2, atol=3e-2)
