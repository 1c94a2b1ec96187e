"""Quantile networks: shapes, equality with a loop over rows, means, risk, levels that are fresh and uniform."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.functional import Risk
from torchrl_perf.modules import EpsilonGreedy, ImplicitQuantileCritic, ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.modules.values.quantile import CosineEmbedding
from torchrl_perf.modules.values.risk import RiskDistortion
from torchrl_perf.runtime import no_host_sync

OBS, ACTIONS = 4, 3
NETWORKS = [QuantileMLP, ImplicitQuantileMLP]
OPTIONS = [{}, {"dueling": True}, {"activation": "tanh", "hidden_size": 8}, {"trunk": nn.Linear(OBS, OBS)}]


@pytest.mark.parametrize("network_class", NETWORKS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
def test_any_batch_is_a_loop_over_rows(network_class, options, shape):
    network = (
        network_class(OBS, ACTIONS, taus="midpoints", **options)
        if network_class is ImplicitQuantileMLP
        else (network_class(OBS, ACTIONS, **options))
    )
    x = torch.randn(*shape, OBS)
    quantiles, taus = network.sample(x, num_taus=6)
    assert quantiles.shape == (*shape, ACTIONS, len(taus))
    values = network(x)
    torch.testing.assert_close(values, network.means(x), rtol=0, atol=0)
    rows = x.reshape(-1, OBS)
    loop = torch.stack([network.sample(row, num_taus=6)[0] for row in rows]).reshape(quantiles.shape)
    torch.testing.assert_close(quantiles, loop, rtol=1e-5, atol=1e-5)
    loop = torch.stack([network(row) for row in rows]).reshape(values.shape)
    torch.testing.assert_close(values, loop, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network_class", NETWORKS)
def test_duelling_advantages_have_mean_zero(network_class):
    network = network_class(OBS, ACTIONS, dueling=True)
    x = torch.randn(5, OBS)
    torch.manual_seed(0)
    quantiles, _ = network.sample(x, num_taus=4)
    last = network.head.layers[-1] if network_class is QuantileMLP else network.implicit.last
    with torch.no_grad():  # no advantages left: all actions are the value
        block = quantiles.shape[-1] if network_class is QuantileMLP else 1
        last.weight[block:] = 0
        last.bias[block:] = 0
    torch.manual_seed(0)
    value, _ = network.sample(x, num_taus=4)
    torch.testing.assert_close(quantiles.mean(-2, keepdim=True).expand_as(value), value, rtol=1e-4, atol=1e-5)


def test_cosine_embedding_by_hand():
    embedding = CosineEmbedding(2, num_cosines=3)
    embedding.layer.weight.data = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 0.0]])
    embedding.layer.bias.data = torch.tensor([0.5, 0.0])
    tau = 0.25
    first = 1 + 2 * math.cos(math.pi * tau) + 3 * math.cos(2 * math.pi * tau) + 0.5
    torch.testing.assert_close(embedding(torch.tensor([tau])), torch.tensor([[first, 0.0]]))


def test_implicit_quantiles_by_hand():
    network = ImplicitQuantileMLP(OBS, ACTIONS, hidden_size=8)
    x, tau = torch.randn(OBS), torch.tensor([0.3, 0.9])
    psi = network.psi.layers[0](x).relu()
    implicit = network.implicit
    for k in range(2):
        phi = implicit.embedding.layer(torch.cos(math.pi * torch.arange(64) * tau[k])).relu()
        expected = implicit.last(implicit.hidden(psi * phi).relu())
        torch.testing.assert_close(network.quantiles(x, taus=tau)[:, k], expected)


def test_the_mean_before_the_last_layer_is_the_mean_of_quantiles():
    network = ImplicitQuantileMLP(OBS, ACTIONS, dueling=True)
    x = torch.randn(7, OBS)
    for taus in (torch.rand(32), torch.rand(7, 32)):
        expected = network.quantiles(x, taus=taus).mean(-1)
        torch.testing.assert_close(network.action_values(x, taus=taus), expected, rtol=1e-4, atol=1e-5)


def test_levels_are_fresh_uniform_and_of_each_row():
    network = ImplicitQuantileMLP(OBS, ACTIONS)
    _, first = network.sample(torch.randn(500, OBS), num_taus=8)
    _, second = network.sample(torch.randn(500, OBS), num_taus=8)
    assert not (first == second).any()
    assert first.unique().numel() > 3900
    counts = torch.histc(first, 20, 0, 1)
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = .001
    assert ImplicitQuantileMLP(OBS, ACTIONS, taus="midpoints").sample(torch.randn(5, OBS), num_taus=4)[1].tolist() == [
        0.125,
        0.375,
        0.625,
        0.875,
    ]


def known_means(x, taus):
    """Of quantile functions that are known: action 0 is N(0, 1), action 1 is -.5 for sure."""
    values = torch.stack([torch.special.ndtri(taus).mean(-1), taus.mean(-1) * 0 - 0.5], -1)
    return values.expand(*x.shape[:-1], 2)


def test_cvar_lowers_the_mean_and_changes_the_choice(monkeypatch):
    x = torch.zeros(1, OBS)
    for eta, choice in ((1.0, 0), (0.25, 1)):
        network = ImplicitQuantileMLP(OBS, 2, num_action_taus=2000, taus="midpoints", risk=Risk("cvar", eta))
        monkeypatch.setattr(network, "means", known_means)
        values = network.action_values(x)
        assert values.argmax(-1).item() == choice
        assert values[0, 0].item() == pytest.approx({1.0: 0.0, 0.25: -1.271}[eta], abs=5e-3)


@pytest.mark.parametrize("network_class", NETWORKS)
def test_risk_of_each_row(network_class):
    eta = torch.tensor([0.1, 0.5, 1.0])
    options = {"taus": "midpoints"} if network_class is ImplicitQuantileMLP else {}
    network = network_class(OBS, ACTIONS, risk=Risk("cvar", eta), **options)
    x = torch.randn(3, OBS)
    got = network(x)
    for row in range(3):
        network.risk = RiskDistortion(Risk("cvar", eta[row].item()))
        torch.testing.assert_close(got[row], network(x[row]), rtol=1e-4, atol=1e-5)


def test_fixed_levels_with_risk_are_the_mean_of_the_worst():
    network = QuantileMLP(OBS, ACTIONS, num_quantiles=8, risk=Risk("cvar", 0.25))
    x = torch.randn(5, OBS)
    worst = network.quantiles(x).sort(-1).values[..., :2].mean(-1)
    torch.testing.assert_close(network(x), worst)
    assert (network(x) <= network.means(x)).all()
    network.risk.eta.fill_(1.0)
    torch.testing.assert_close(network(x), network.means(x))


@pytest.mark.parametrize("network_class", NETWORKS)
def test_every_parameter_learns(network_class):
    network = network_class(OBS, ACTIONS, dueling=True)
    network.sample(torch.randn(64, OBS), num_taus=4)[0][:, 0].square().sum().backward()
    assert all((param.grad != 0).any() for param in network.parameters())


@pytest.mark.parametrize("network_class", NETWORKS)
def test_acts_without_waits_in_any_batch(network_class, device):
    network = network_class(OBS, ACTIONS, device=device)
    policy = EpsilonGreedy(network, spec=Categorical(ACTIONS, device=device), eps_start=0.5)
    for shape in ((6,), (2, 3)):
        td = TensorDict({"observation": torch.randn(*shape, OBS, device=device)}, shape, device=device)
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            with set_exploration_type(kind), no_host_sync():
                action = policy(td)["action"]
            assert action.shape == shape and action.dtype == torch.int64


def test_acting_compiled(variant, device):
    network = ImplicitQuantileMLP(OBS, ACTIONS, dueling=True, risk=Risk("cvar", 0.5), device=device)
    x, taus = torch.randn(9, OBS, device=device), torch.rand(32, device=device)
    with torch.no_grad():
        expected = network.action_values(x, taus=taus)
        run = variant(lambda x, taus: network.action_values(x, taus=taus))
        for _ in range(4):  # the last one is a replay
            got = run(x, taus)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_levels_are_fresh_on_each_replay():
    from torchrl_perf.runtime import capture

    network = ImplicitQuantileMLP(OBS, ACTIONS, device="cuda")
    x = torch.randn(9, OBS, device="cuda")
    step = capture(lambda: network.sample(x, num_taus=4)[1])
    draws = [step().clone() for _ in range(6)]
    assert all(not torch.equal(draws[-1], draw) for draw in draws[:-1])


def test_half_precision_outputs_are_float32():
    for network_class in NETWORKS:
        network = network_class(OBS, ACTIONS, precision="bf16")
        x = torch.randn(5, OBS)
        assert network.sample(x, num_taus=4)[0].dtype == network(x).dtype == torch.float32


class TestCritic:
    """ImplicitQuantileCritic."""

    @pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
    def test_shapes_and_rows(self, shape):
        critic = ImplicitQuantileCritic(OBS, 2, hidden_size=8)
        x, action = torch.randn(*shape, OBS), torch.randn(*shape, 2)
        quantiles, taus = critic.sample(x, action, num_taus=5)
        assert quantiles.shape == taus.shape == (*shape, 5)
        assert critic(x, action).shape == (*shape, 1)
        shared = torch.rand(5)
        loop = [
            critic.quantiles(one, two, taus=shared)
            for one, two in zip(x.reshape(-1, OBS), action.reshape(-1, 2), strict=True)
        ]
        torch.testing.assert_close(critic.quantiles(x, action, taus=shared), torch.stack(loop).reshape(*shape, 5))

    def test_the_value_is_the_mean_of_quantiles_and_depends_on_the_action(self):
        critic = ImplicitQuantileCritic(OBS, 2, taus="midpoints")
        x, action = torch.randn(6, OBS), torch.randn(6, 2, requires_grad=True)
        mean = critic(x, action, num_taus=16)
        torch.testing.assert_close(mean.squeeze(-1), critic.sample(x, action, num_taus=16)[0].mean(-1))
        (grad,) = torch.autograd.grad(mean.sum(), action)
        assert (grad != 0).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantileMLP(OBS, ACTIONS, num_quantiles=0), "sizes: expected at least 1 each"),
        (lambda: QuantileMLP(OBS, 0), "sizes: expected at least 1 each"),
        (lambda: QuantileMLP(OBS, ACTIONS, risk=Risk("cvar", 2.0)), "eta: expected"),
        (lambda: QuantileMLP(OBS, ACTIONS, activation="swish"), "activation: expected one of"),
        (lambda: QuantileMLP(OBS, ACTIONS, noisy="row"), "noisy: expected one of"),
        (lambda: QuantileMLP(OBS, ACTIONS, precision="fp8"), "precision: expected one of"),
        (lambda: QuantileMLP(OBS, ACTIONS, hidden_size=0), "hidden_size: expected at least 1"),
        (lambda: ImplicitQuantileMLP(OBS, ACTIONS, taus="fixed"), "taus: expected 'random' or 'midpoints'"),
        (lambda: ImplicitQuantileMLP(OBS, ACTIONS, num_action_taus=0), "num_action_taus 0"),
        (lambda: ImplicitQuantileMLP(OBS, ACTIONS, num_cosines=0), "sizes: expected at least 1"),
        (lambda: ImplicitQuantileCritic(OBS, 2, dueling=True), "dueling: expected False"),
        (lambda: ImplicitQuantileCritic(OBS, 0), "sizes: expected at least 1"),
    ],
)
def test_faults(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match=r"received \['duelling'\]"):
        QuantileMLP(OBS, ACTIONS, duelling=True)
