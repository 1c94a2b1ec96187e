"""CategoricalMLP: hand values, rows, risk, one atom, state, faults."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import OneHot

from torchrl_perf.functional import Risk
from torchrl_perf.modules import CategoricalMLP, EpsilonGreedy
from torchrl_perf.modules.values.risk import RiskDistortion
from torchrl_perf.runtime import no_host_sync

OBS, ACTIONS = 4, 3


def with_logits(logits, **options):
    """A network that gives these logits ``[D, M]`` whatever it sees."""
    logits = torch.tensor(logits)
    network = CategoricalMLP(OBS, len(logits), num_atoms=logits.shape[1], v_min=-1.0, v_max=1.0, **options)
    last = network.head.layers[-1]
    nn.init.zeros_(last.weight)
    last.bias.data = logits.flatten()
    return network


def test_values_are_means_of_the_distribution():
    network = with_logits([[0.0, 0.0, 0.0], [0.0, 0.0, torch.tensor(2.0).log().item()], [50.0, 0.0, 0.0]])
    torch.testing.assert_close(network(torch.randn(2, OBS)), torch.tensor([[0.0, 0.25, -1.0]] * 2))


def test_risk_weighs_the_tail():
    network = with_logits([[0.0, 0.0, 0.0]], risk=Risk("cvar", 0.5))
    # a third of -1 and a sixth of 0, over a half
    torch.testing.assert_close(network(torch.zeros(1, OBS)), torch.tensor([[-2 / 3]]))
    network.risk = RiskDistortion(Risk("cvar", torch.tensor([0.5, 1.0])))
    torch.testing.assert_close(network(torch.zeros(2, OBS)), torch.tensor([[-2 / 3], [0.0]]))


@pytest.mark.parametrize("options", [{}, {"dueling": True}, {"trunk": nn.Linear(OBS, 7)}])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_any_batch_is_a_loop_over_rows(options, shape):
    network = CategoricalMLP(7 if "trunk" in options else OBS, ACTIONS, **options)
    x = torch.randn(*shape, OBS)
    log_probs = network.log_probs(x)
    assert log_probs.shape == (*shape, ACTIONS, 51)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(*shape, ACTIONS))
    loop = torch.stack([network(row) for row in x.reshape(-1, OBS)]).reshape(*shape, ACTIONS)
    torch.testing.assert_close(network(x), loop, rtol=1e-5, atol=1e-5)


def test_duelling_logits():
    network = CategoricalMLP(OBS, ACTIONS, num_atoms=5, dueling=True)
    x = torch.randn(3, OBS)
    streams = network.head.layers(x).unflatten(-1, (4, 5))
    torch.testing.assert_close(network.logits(x).mean(-2), streams[:, 0])
    expected = streams[:, 1:] - streams[:, 1:].mean(1, keepdim=True) + streams[:, :1]
    torch.testing.assert_close(network.logits(x), expected)


def test_one_atom_is_a_constant():
    network = CategoricalMLP(OBS, ACTIONS, num_atoms=1, v_min=2.0, v_max=2.0)
    assert network(torch.randn(2, OBS)).tolist() == [[2.0] * ACTIONS] * 2


def test_the_support_is_a_buffer():
    network = CategoricalMLP(OBS, ACTIONS, v_min=-20.0, v_max=60.0)
    assert network.state_dict()["support"].shape == (51,)
    assert network.support[0] == -20 and network.support[-1] == 60
    assert network.double().support.dtype == torch.float64


def test_acts_without_waits(device):
    network = CategoricalMLP(OBS, ACTIONS, device=device)
    policy = EpsilonGreedy(network, spec=OneHot(ACTIONS, device=device), mask_key="mask")
    mask = torch.tensor([True, False, False], device=device).expand(6, 3)
    td = TensorDict({"observation": torch.randn(6, OBS, device=device), "mask": mask}, [6], device=device)
    with no_host_sync():
        action = policy(td)["action"]
    assert (action[:, 0] == 1).all()


@pytest.mark.parametrize("options", [{"num_atoms": 0}, {"v_min": 1.0, "v_max": 1.0}, {"v_min": 2.0, "v_max": 1.0}])
def test_an_empty_support_is_refused(options):
    with pytest.raises(ValueError, match="support: expected num_atoms of at least 1 and v_min below v_max"):
        CategoricalMLP(OBS, ACTIONS, **options)
