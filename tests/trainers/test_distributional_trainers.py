"""QR-DQN, IQN, Rainbow: what they learn from, priorities, own networks, bad settings."""

import pytest
import torch
from config_runs import KINDS, SMALL, make
from states import run
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.modules import CategoricalMLP, EpsilonGreedy, FusedMLP, ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.objectives import DeviceC51Loss, QuantileDQNLoss

NAMES = ["qr-dqn", "iqn", "rainbow"]


@pytest.mark.parametrize(
    ("name", "network", "loss"),
    [
        ("qr-dqn", QuantileMLP, QuantileDQNLoss),
        ("iqn", ImplicitQuantileMLP, QuantileDQNLoss),
        ("rainbow", CategoricalMLP, DeviceC51Loss),
    ],
)
def test_parts(name, network, loss):
    trainer = make(name, {})
    assert type(trainer.q_network) is network
    assert type(trainer.loss) is loss
    assert trainer.loss.network is trainer.policy.network is trainer.q_network
    assert trainer.loss.target_network is trainer.target_network


@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_a_step_of_adam_on_the_loss(name):
    """And with the same numbers drawn, the loss's own gradient and priorities."""
    trainer = run(make(name, {"sampler": "prioritized", "max_grad_norm": 1e9}), 3)
    sample = trainer.buffer.sample()
    seen = []
    trainer.buffer.update_priority = lambda index, priority, generation=None: seen.append((index, priority))
    torch.manual_seed(5)
    trainer.update(sample.clone())
    ours = [param.grad.clone() for param in trainer.q_network.parameters()]
    trainer = run(make(name, {"sampler": "prioritized", "max_grad_norm": 1e9}), 3)
    torch.manual_seed(5)
    td = trainer.loss(sample.clone())
    theirs = torch.autograd.grad(td["loss"], list(trainer.q_network.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    ((index, priority),) = seen
    assert torch.equal(index, sample["index"])
    torch.manual_seed(5)
    batch = sample.clone()
    trainer.loss(batch)
    torch.testing.assert_close(priority, batch["td_error"].abs() + 1e-6)


def test_noise_of_rainbow_explores_and_its_scale_learns():
    trainer = run(make("rainbow", {}), 1)
    observation = CartPole(64).reset().select("observation")
    with torch.no_grad():
        with set_exploration_type(ExplorationType.RANDOM):
            values = [trainer.policy.action_values(observation) for _ in range(2)]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            means = [trainer.policy.action_values(observation) for _ in range(2)]
    assert not torch.equal(*values)
    assert torch.equal(*means)
    sigmas = {name: p.clone() for name, p in trainer.q_network.named_parameters() if name.endswith("sigma")}
    run(trainer, 2)
    after = dict(trainer.q_network.named_parameters())
    assert sigmas
    assert not [name for name, sigma in sigmas.items() if torch.equal(sigma, after[name])]


def test_without_its_parts_rainbow_is_c51():
    options = {"noisy": "none", "dueling": False, "double": False, "n_step": 1, "sampler": "random", "eps_start": 1.0}
    trainer = run(make("rainbow", options), 4)
    assert not [name for name, _ in trainer.q_network.named_parameters() if "sigma" in name]
    assert "priority_weight" not in trainer.buffer.sample().keys()


@pytest.mark.parametrize(
    ("env", "options", "needed"),
    [
        ("CartPole", {"v_max": 99.0}, "at most 1 to at least 100"),
        ("Acrobot", {}, "at most -100 to at least 0"),
        ("MountainCar", {"gamma": 0.9}, "at most -10 to at least -1"),
    ],
)
def test_atoms_that_cannot_represent_the_returns(env, options, needed):
    with pytest.raises(ValueError, match=rf"support: expected atoms from {needed}, .*received .*Remedy"):
        make("rainbow", {"env": env, **options})
    make("rainbow", {"env": env, **options, "v_min": -100.0, "v_max": 100.0})


def test_of_an_own_env_the_rewards_are_not_known():
    make("rainbow", {"v_max": 1.0}, env=CartPole(4))


@pytest.mark.parametrize("name", NAMES)
def test_an_own_network_and_its_keys(name):
    env = CartPole(4)
    kind = {"qr-dqn": QuantileMLP, "iqn": ImplicitQuantileMLP, "rainbow": CategoricalMLP}[name]
    policy = EpsilonGreedy(kind(4, 2, hidden_size=16), spec=env.action_spec)
    trainer = run(make(name, {}, env=env, policy=policy), 3)
    assert trainer.q_network is policy.network


@pytest.mark.parametrize("name", NAMES)
def test_pieces_that_do_not_fit_are_named(name):
    with pytest.raises(ValueError, match=r"action_spec: expected discrete actions .* SAC or PPO"):
        make(name, {}, env=Pendulum(4))
    env = CartPole(4)
    with pytest.raises(ValueError, match=r"network: expected one with .* received FusedMLP. Remedy"):
        make(name, {}, env=env, policy=EpsilonGreedy(FusedMLP(4, 2), spec=env.action_spec))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qr-dqn", {"num_quantiles": 0}, "num_quantiles: expected a positive integer, received 0"),
        ("qr-dqn", {"kappa": -1.0}, "kappa: expected a number of at least 0"),
        ("qr-dqn", {"risk": "cvar", "risk_eta": 0.0}, "risk_eta: expected the share of outcomes in"),
        ("qr-dqn", {"risk": "mean"}, "risk: expected one of"),
        ("qr-dqn", {"greedy": "per_quantile", "double": True}, "greedy: expected 'mean' with double"),
        ("iqn", {"num_taus": 0}, "num_taus: expected a positive integer"),
        ("iqn", {"num_target_taus": 0}, "num_target_taus: expected a positive integer"),
        ("iqn", {"num_action_taus": 0}, "num_action_taus: expected a positive integer"),
        ("iqn", {"num_cosines": 0}, "num_cosines: expected a positive integer"),
        ("rainbow", {"num_atoms": 0}, "num_atoms: expected a positive integer"),
        ("rainbow", {"v_min": 5.0, "v_max": 5.0}, "v_max: expected more than v_min = 5.0, received 5.0. Remedy"),
        ("rainbow", {"noisy": "all"}, "noisy: expected one of"),
    ],
)
def test_bad_settings_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        KINDS[name].without_task(**{**SMALL[name], **options})
