"""Networks whose hidden layers run in 16 bits: near full float32, float32 at the end, unchanged otherwise."""

import copy

import pytest
import torch
from torch import nn

from torchrl_perf.modules import CategoricalMLP, DuelingMLP, EnsembleMLP, EnsembleQ, FusedMLP, NoisyLinear
from torchrl_perf.modules.mixed import MixedSequential


def networks(precision):
    torch.manual_seed(0)
    trunk = [nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3), nn.Tanh()]
    return {
        "fused": FusedMLP(6, 3, hidden_size=32, precision=precision),
        "dueling": DuelingMLP(6, 3, hidden_size=32, precision=precision),
        "ensemble": EnsembleMLP(2, 6, 3, hidden_sizes=(32, 32), precision=precision),
        "q": EnsembleQ(2, 6, hidden_sizes=(32,), precision=precision),
        "sequential": MixedSequential(*trunk, precision=precision),
    }


NAMES = list(networks("tf32"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_values_and_gradients_are_near_and_rounded(name, precision, tolerance):
    net, exact = networks(precision)[name], networks("ieee")[name]
    x = torch.randn(64, 6)
    outputs = []
    for module in (net, exact):
        out = module(x)
        out.square().mean().backward()
        outputs.append((out.detach(), torch.cat([param.grad.flatten() for param in module.parameters()])))
    for rounded, wanted in zip(*outputs, strict=True):
        assert rounded.dtype == torch.float32
        assert not torch.equal(rounded, wanted)
        assert float((rounded - wanted).abs().max() / wanted.abs().max()) < tolerance * 2


@pytest.mark.parametrize("name", NAMES)
def test_tf32_and_ieee_are_one_on_a_cpu(name):
    x = torch.randn(5, 6)
    torch.testing.assert_close(networks("tf32")[name](x), networks("ieee")[name](x), rtol=0, atol=0)


def test_large_values_keep_the_digits_of_float32():
    net = MixedSequential(nn.Linear(1, 1), nn.Linear(1, 1), precision="bf16")
    with torch.no_grad():
        net[0].weight.fill_(1.0), net[0].bias.zero_()
        net[1].weight.fill_(1.0), net[1].bias.fill_(1000.0)
        # 1001 would be 1000 in bfloat16
        assert float(net(torch.ones(1, 1))) == 1001.0


def test_the_last_layer_is_float32_within_an_outer_autocast():
    net = MixedSequential(nn.Linear(2, 4), nn.Linear(4, 1), precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        assert net(torch.ones(3, 2)).dtype == torch.float32


@pytest.mark.parametrize("noise", ["shared", "per_row"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_noisy_layers_count_as_linear_ones(noise, precision):
    net = MixedSequential(
        NoisyLinear(6, 32, noise=noise), nn.ReLU(), NoisyLinear(32, 1, noise=noise), precision=precision
    )
    exact = nn.Sequential(*net)
    x, dtypes = torch.randn(64, 6), []
    net[1].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    outputs = []
    for module in (net, exact):
        torch.manual_seed(1)
        outputs.append(module(x))
    assert dtypes[-1] == torch.float32  # without a precision
    assert outputs[0].dtype == torch.float32
    assert not torch.equal(*outputs)
    torch.testing.assert_close(*outputs, rtol=5e-2, atol=5e-2)
    with torch.no_grad():
        net[2].weight_mu.zero_(), net[2].weight_sigma.zero_(), net[2].bias_sigma.zero_(), net[2].bias_mu.fill_(1001.0)
    assert (net(x) == 1001.0).all()  # in bfloat16 that is 1000


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_of_rainbows_network_has_an_effect(precision):
    nets = []
    for name in (precision, "ieee"):
        torch.manual_seed(0)
        nets.append(CategoricalMLP(6, 3, noisy="shared", dueling=True, precision=name))
    x, outputs = torch.randn(64, 6), []
    for net in nets:
        torch.manual_seed(1)
        outputs.append(net.logits(x))
    assert not torch.equal(*outputs)
    torch.testing.assert_close(*outputs, rtol=5e-2, atol=5e-2)


def test_names_and_copies():
    net = MixedSequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), precision="bf16")
    assert list(net.state_dict()) == list(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).state_dict())
    x = torch.randn(3, 2)
    torch.testing.assert_close(copy.deepcopy(net)(x), net(x), rtol=0, atol=0)


@pytest.mark.parametrize("make", [lambda p: EnsembleMLP(2, 3, 1, precision=p), lambda p: MixedSequential(precision=p)])
def test_an_unknown_precision_is_refused(make):
    with pytest.raises(ValueError, match=r"precision: expected one of .* received 'fp8'"):
        make("fp8")


@pytest.mark.parametrize("name", ["ensemble", "sequential", "fused"])
def test_compiles_as_one_graph(name, fresh_dynamo):
    net = networks("bf16")[name]
    x = torch.randn(8, 6)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x), rtol=2e-2, atol=2e-2)
