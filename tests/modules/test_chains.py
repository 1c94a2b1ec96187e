"""Perceptrons inside of an ``nn.Sequential``: which are found, and that only their execution differs."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torchrl.modules import MLP

from torchrl_perf.functional.chain import chain
from torchrl_perf.modules import EmpiricalNormalization
from torchrl_perf.modules import chains as module
from torchrl_perf.modules.chains import Chain, Found, chain_of, class_name, find, fuse_sequential, lacks_kernel
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.mlp import FusedMLP


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


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("number", range(4))
def test_layers_with_hooks_are_left_alone(kind, number):
    found = layers("linear", "norm", nn.Tanh(), "linear")
    handle = getattr(found[number], f"register_{kind}")(lambda *_: None)
    assert chain_of(found) is None
    handle.remove()
    assert chain_of(found) == Chain(0, 4, "tanh", 1e-5)


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_all_modules_are_called(kind):
    net = nn.Sequential(*layers("linear", "norm", nn.Tanh(), "linear"))
    assert find(net).chain == Chain(0, 4, "tanh", 1e-5)
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        assert find(net).chain is None
    finally:
        handle.remove()
    assert find(net).chain == Chain(0, 4, "tanh", 1e-5)


@pytest.mark.parametrize("number", range(4))
def test_a_layer_whose_own_forward_was_replaced_is_left_alone(number):
    found = layers("linear", "norm", nn.Tanh(), "linear")
    found[number].forward = torch.zeros_like
    assert chain_of(found) is None


def test_a_layer_whose_weight_is_no_parameter_is_left_alone():
    found = layers("linear", nn.Tanh(), "linear")
    del found[0].weight
    found[0].weight = torch.zeros(4, 4)
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


def as_mixed(net):
    return MixedSequential(*net)


def as_fused(net):
    assert fuse_sequential(net, "tf32")
    return net


def saved_and_loaded(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def as_shallow_copy(net):
    """A copy whose children are others, as torch's ``DataParallel`` makes it."""
    copied = copy.copy(net)
    copied.__dict__["_modules"] = {name: copy.deepcopy(layer) for name, layer in net.named_children()}
    return copied


COPIES = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), saved_and_loaded, as_shallow_copy]


@pytest.mark.parametrize("form", [as_mixed, as_fused])
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_computes_with_its_own_layers(stand_in, form, copied):
    net = form(nn.Sequential(*layers("linear", nn.SiLU(), "linear")))
    x = torch.randn(7, 4)
    net(x.as_subclass(OnCuda))
    twin = copied(net)
    with torch.no_grad():
        twin[2].bias.add_(1.0)
    torch.testing.assert_close(twin(x), net(x) + 1.0)
    torch.testing.assert_close(twin(x.as_subclass(OnCuda)).as_subclass(torch.Tensor), net(x) + 1.0)
    assert len(stand_in) == 2


@pytest.mark.parametrize("form", [as_mixed, as_fused])
def test_weights_that_were_taken_out_and_put_back_keep_their_places(stand_in, form):
    net = nn.Sequential(*layers("linear", "norm", nn.Tanh(), "linear"))
    for layer in net[1], net[3]:
        weight = torch.randn_like(layer.weight)
        del layer.weight
        layer.weight = nn.Parameter(weight)  # now behind the bias
        nn.init.normal_(layer.bias)
    net[3].register_buffer("calls", torch.zeros(1))
    net, x = form(net), torch.randn(5, 4)
    torch.testing.assert_close(net(x.as_subclass(OnCuda)).as_subclass(torch.Tensor), net(x))
    assert stand_in == ["tf32"]


@pytest.mark.parametrize("form", [as_mixed, as_fused])
@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 0, 4), (2, 3, 4), (1, 2, 3, 4)])
def test_rows_of_any_dims(stand_in, form, shape):
    net, x = form(nn.Sequential(*layers("linear", "norm", nn.Tanh(), "linear"))), torch.randn(shape)
    torch.testing.assert_close(net(x.as_subclass(OnCuda)).as_subclass(torch.Tensor), net(x))
    wide = torch.randn(*shape[:-1], 8)[..., ::2]
    torch.testing.assert_close(net(wide.as_subclass(OnCuda)).as_subclass(torch.Tensor), net(wide))
    assert len(stand_in) == 2


def test_what_was_cut_out_of_a_network_runs_layer_by_layer(stand_in):
    net, x = as_fused(nn.Sequential(*layers("linear", nn.Tanh(), "linear", nn.Tanh(), "linear"))), torch.randn(5, 4)
    part = net[:3]
    torch.testing.assert_close(part(x.as_subclass(OnCuda)).as_subclass(torch.Tensor), net[2](net[1](net[0](x))))
    assert stand_in == [] and repr(part).startswith("Sequential(")
    assert fuse_sequential(part, "bf16")
    part(x.as_subclass(OnCuda))
    assert stand_in == ["bf16"]


def test_a_network_whose_forward_was_replaced_keeps_it():
    net = nn.Sequential(*layers("linear", nn.Tanh(), "linear"))
    net.forward = torch.zeros_like
    assert not fuse_sequential(net, "tf32") and type(net) is nn.Sequential
    assert torch.equal(net(torch.ones(2, 4)), torch.zeros(2, 4))


class Summed(nn.Sequential):
    """A user's class, whose ``forward`` takes several inputs."""

    def forward(self, *inputs):
        return super().forward(sum(inputs)).sum(-1)

    def __getstate__(self):
        return {**self.__dict__, "was_copied": True}


class Saved(nn.Sequential):
    """One that is saved in its own way."""

    def __reduce__(self):
        return Saved, ()


def test_a_class_of_the_user_keeps_its_forward(stand_in):
    x = torch.randn(5, 4)
    for net, inputs in (
        (Summed(*layers("linear", nn.Tanh(), "linear")), (x, x)),
        (MLP(8, 3, num_cells=[6, 7], activation_class=nn.ELU), (x, x)),
        (MLP(4, (2, 3), num_cells=[6], activation_class=nn.SiLU), (x,)),
    ):
        kind, names, expected = type(net), list(net.state_dict()), net(*inputs)
        assert not lacks_kernel(net)
        assert fuse_sequential(net, "tf32") and fuse_sequential(net, "tf32")
        assert isinstance(net, kind) and class_name(net) == kind.__name__ and list(net.state_dict()) == names
        stream = io.BytesIO()
        torch.save(net, stream)
        stream.seek(0)
        copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(stream, weights_only=False)
        assert torch.equal(net(*inputs), expected)
        assert not stand_in
        for each in (net, *copies):
            assert type(each) is type(net) and each.chain_precision == "tf32"
            assert hasattr(each, "was_copied") is (each is not net and kind is Summed)
            found = each(*(one.as_subclass(OnCuda) for one in inputs)).as_subclass(torch.Tensor)
            torch.testing.assert_close(found, expected)
        assert len(stand_in) == 4
        assert not set(map(id, net.parameters())) & {id(p) for each in copies for p in each.parameters()}
        stand_in.clear()


def nested():
    blocks = [nn.Sequential(*layers("linear", nn.ELU())) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Sequential(*blocks), nn.Linear(4, 4))


def test_sequentials_in_one_another_are_one_chain(stand_in):
    net, x = nested(), torch.randn(5, 4)
    expected = net(x)
    assert not lacks_kernel(net) and fuse_sequential(net, "tf32")
    assert find(net, opens=True).chain == Chain(1, 6, "elu", 0.0)
    torch.testing.assert_close(net(x.as_subclass(OnCuda)).as_subclass(torch.Tensor), expected)
    assert stand_in == ["tf32"]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[1].append(nn.Linear(4, 4)),
        lambda net: net[1][0].register_forward_hook(lambda *_: None),
        lambda net: setattr(net[1][1], "forward", torch.tanh),
        lambda net: net[1].__setitem__(0, nn.Linear(4, 4)),
        lambda net: net[1][0][1].__dict__.update(alpha=0.5),
    ],
    ids=["layer added", "hook", "own forward", "block replaced", "constant"],
)
def test_a_change_inside_is_seen(stand_in, change):
    net, x = nested(), torch.randn(5, 4)
    assert fuse_sequential(net, "tf32")
    net(x.as_subclass(OnCuda))
    change(net)
    expected = net(x)
    torch.testing.assert_close(net(x.as_subclass(OnCuda)).as_subclass(torch.Tensor), expected)
    assert stand_in == ["tf32"]


def test_blocks_that_are_chains_themselves_stay_so():
    net = nn.Sequential(*(nn.Sequential(*layers("linear", kind(), "linear")) for kind in (nn.ELU, nn.Tanh)))
    assert not fuse_sequential(net, "tf32") and not lacks_kernel(net)
    assert all(fuse_sequential(block, "tf32") for block in net)


def test_what_is_no_perceptron_is_left_alone():
    for network in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), Saved(*layers("linear", nn.Tanh(), "linear"))):
        forward = network.forward
        assert not fuse_sequential(network, "tf32")
        assert network.forward == forward


class OwnModule(nn.Module):
    """A user's class that calls its layers itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize(
    ("network", "lacks"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.ELU(alpha=0.5), nn.Linear(3, 3)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(), True),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid()), False),
        (nn.Sequential(nn.Conv1d(3, 3, 1), nn.Linear(3, 3)), False),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()), nn.Linear(3, 3)), True),
        (Saved(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), True),
        (FusedMLP(3, 3, hidden_size=3), False),
        (MixedSequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), False),
        (MixedSequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3)), True),
        (MixedSequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)), True),
        (OwnModule(), True),
        (nn.TransformerEncoderLayer(4, 2, 8), False),
        (nn.Linear(3, 3), False),
    ],
)
def test_networks_without_a_kernel(network, lacks):
    assert lacks_kernel(network) is lacks


def replace(net):
    net[2] = nn.Linear(4, 4)


def append(net):
    net.append(nn.ELU())


def hook(net):
    net[3].register_forward_hook(lambda *_: None)


def backward_hook(net):
    net[3].register_full_backward_hook(lambda *_: None)


def own_forward(net):
    net[3].forward = torch.sigmoid


def parametrize(net):
    nn.utils.parametrize.register_parametrization(net[2], "weight", nn.Identity())


def constant(net):
    net[1].alpha = 0.5


def remove_bias(net):
    net[0].bias = None


@pytest.mark.parametrize(
    "change", [replace, append, hook, backward_hook, own_forward, parametrize, constant, remove_bias]
)
def test_a_chain_is_looked_for_again_where_the_layers_have_changed(change):
    net = nn.Sequential(*layers("linear", nn.ELU(), "linear", nn.ELU(), "linear"))
    before = find(net)
    assert find(net) is before and before.chain == Chain(0, 5, "elu", 0.0)
    change(net)
    after = find(net)
    assert after is not before and after.chain == chain_of(list(net)) and find(net) is after


def test_a_chain_has_the_parameters_of_now():
    net = nn.Sequential(*layers("linear", "norm", nn.ELU(), "linear"))
    found = find(net)
    net[0].weight = nn.Parameter(torch.zeros(4, 4))
    net.to(torch.float64)
    assert find(net) is found
    assert all(got is want for got, want in zip(found.params(), net.parameters(), strict=True))


def test_a_copy_of_a_network_has_a_chain_of_its_own():
    net = nn.Sequential(*layers("linear", nn.Tanh(), "linear"))
    found = find(net)
    copied = copy.deepcopy(net)
    assert isinstance(found, Found) and find(copied) is not found
    assert all(got is want for got, want in zip(find(copied).params(), copied.parameters(), strict=True))
    assert net.state_dict().keys() == copied.state_dict().keys()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "ieee"])
def test_a_network_of_the_user_on_cuda(precision):
    net = nn.Sequential(nn.Linear(5, 96), nn.ELU(), nn.Linear(96, 40), nn.ELU(), nn.Linear(40, 3)).cuda()
    x = torch.randn(50, 5, device="cuda")
    expected = net(x)
    fuse_sequential(net, precision)
    torch.testing.assert_close(net(x), expected, rtol=3e-2, atol=3e-2)
