"""Perceptrons of one shape as functions: the reference against modules, and what the kernels are made for."""

import pytest
import torch

from torchrl_perf.functional.chain import ACTIVATIONS
from torchrl_perf.functional.members import Members, members
from torchrl_perf.modules.ensemble import EnsembleMLP
from torchrl_perf.modules.member_networks import members_of_ensemble, members_of_layers
from torchrl_perf.modules.mixed import MixedSequential


def groups_of(net):
    norms = [list(net.gains), list(net.shifts)] if net.layer_norm else []
    return [list(net.weights), list(net.biases), *norms]


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_is_the_module(activation, layer_norm):
    net = EnsembleMLP(3, 5, 2, hidden_sizes=(9, 7), activation=activation, layer_norm=layer_norm).double()
    x = torch.randn(3, 11, 5, dtype=torch.float64)
    found = members(x, groups_of(net), activation, 1e-5 if layer_norm else 0.0)
    torch.testing.assert_close(found, net(x, per_member=True))


def test_parameters_are_in_the_order_of_layers():
    net = EnsembleMLP(2, 5, 1, hidden_sizes=(8, 9), layer_norm=True)
    found = members_of_ensemble(net)
    assert found.widths == (5, 8, 9, 1) and found.size == 2
    expected = [
        part
        for n in range(3)
        for part in (net.weights[n], net.biases[n], *([net.gains[n], net.shifts[n]] if n < 2 else []))
    ]
    assert [id(param) for param in found.params] == [id(param) for param in expected]


def test_shapes_are_compared():
    def made(**options):
        return members_of_ensemble(EnsembleMLP(2, 5, 1, **{"hidden_sizes": (8,), **options}))

    assert made().is_like(made())
    for other in ({"hidden_sizes": (9,)}, {"activation": "elu"}, {"layer_norm": True}, {"precision": "bf16"}):
        assert not made().is_like(made(**other))


class Own(EnsembleMLP):
    pass


def test_other_ensembles_are_left_alone():
    assert members_of_ensemble(Own(2, 5, 1)) is None
    assert members_of_ensemble(EnsembleMLP(2, 5, 1, precision="ieee")) is None
    assert members_of_ensemble(EnsembleMLP(2, 5, 1).double()) is None
    assert members_of_ensemble(EnsembleMLP(2, 5, 1, hidden_sizes=())) is None
    assert members_of_ensemble(EnsembleMLP(2, 5, 1, hidden_sizes=(2000,))) is None
    hooked = EnsembleMLP(2, 5, 1)
    hooked.register_forward_hook(lambda *_: None)
    assert members_of_ensemble(hooked) is None


def test_layers():
    nn = torch.nn
    net = MixedSequential(nn.Linear(5, 8), nn.ELU(), nn.Linear(8, 9), nn.ELU(), nn.Linear(9, 4), nn.Tanh())
    found, rest = members_of_layers(net)
    assert found.widths == (5, 8, 9, 4) and found.size == 1 and rest == [net[5]]
    assert [id(param) for param in found.params] == [id(param) for param in net.parameters()]
    assert members_of_layers(nn.Sequential(*net)) is None  # not what a trainer makes
    assert members_of_layers(MixedSequential(nn.Tanh(), *net)) is None
    assert members_of_layers(MixedSequential(*net, nn.PReLU())) is None  # parameters behind it
    assert members_of_layers(MixedSequential(nn.Linear(5, 8), nn.ReLU6(), nn.Linear(8, 2))) is None
    net.fuses = False
    assert members_of_layers(net) is None


def test_members_of_one_layer_have_no_norms():
    weight, bias = torch.randn(2, 3, 1), torch.randn(2, 1, 1)
    found = Members([weight], [bias], activation="relu")
    assert found.params == [weight, bias] and found.widths == (3, 1)
