"""How many critics learn where a user gives one: ``num_critics`` of them, or a refusal."""

import dataclasses

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, ValueOperator

from torchrl_perf.modules import EnsembleQ
from torchrl_perf.trainers import DDPGConfig, DDPGTrainer, SACConfig, SACTrainer, TD3Config
from torchrl_perf.trainers.off_policy.twin_critics import critics_wanted

SMALL = {
    **{"num_envs": 4, "num_steps": 2, "total_steps": 64, "learning_starts": 8, "minibatch_size": 8, "capacity": 64},
    **{"updates_per_iteration": 2, "device": "cpu", "logger": "none", "hidden_size": 8},
}
TWINS = [(SACTrainer, SACConfig), (DDPGTrainer, TD3Config)]


def one(values=1):
    return ValueOperator(MLP(in_features=4, out_features=values, num_cells=[8]), in_keys=["observation", "action"])


def ensemble(members):
    return TensorDictModule(EnsembleQ(members, 4, hidden_sizes=(8,)), ["observation", "action"], ["state_action_value"])


def values_of(trainer):
    return trainer.loss.critic(trainer.env.rand_action(trainer.env.reset())).get("state_action_value")


@pytest.mark.parametrize(("trainer", "config"), TWINS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_twins_are_made_of_one_value(trainer, config, number):
    made = trainer(config(**SMALL, num_critics=number), critic=one())
    for _ in range(2):
        made.step()
    values = values_of(made)
    assert values.shape == (4, number)
    # drawn anew each: their values differ
    assert all(not torch.equal(values[:, 0], values[:, k]) for k in range(1, number))
    made.load_state_dict(made.state_dict())


@pytest.mark.parametrize(("trainer", "config"), TWINS)
@pytest.mark.parametrize("critic", [one, ensemble])
def test_several_values_are_the_critics_or_refused(trainer, config, critic):
    assert values_of(trainer(config(**SMALL, num_critics=3), critic=critic(3))).shape == (4, 3)
    with pytest.raises(ValueError, match=r"num_critics: expected 3, .* received 2\. Remedy: num_critics=3"):
        trainer(config(**SMALL), critic=critic(3))


def test_ddpg_takes_one_critic_as_it_is():
    assert values_of(DDPGTrainer(DDPGConfig(**SMALL), critic=one())).shape == (4, 1)


def test_a_look_at_a_critic_leaves_it_and_the_generators_alone():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    critic = TensorDictModule(
        lambda o, a: net(torch.cat([o, a], -1)), ["observation", "action"], ["state_action_value"]
    )
    critic.net = net
    env = SACTrainer(SACConfig(**SMALL)).env
    before, state = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    assert critics_wanted(critic, env, 2) == 2
    assert critics_wanted(critic, None, 2) == 2  # nothing is known of what it reads: the loss looks at its values
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("way", ["load", "load_state_dict"])
def test_a_fixed_temperature_is_that_of_the_settings(tmp_path, way):
    config = SACConfig(**SMALL, learn_temperature=False, initial_temperature=0.3)
    trainer = SACTrainer(config)
    other = SACTrainer(dataclasses.replace(config, initial_temperature=0.7))
    other.load(trainer.save(tmp_path / "state.pt")) if way == "load" else other.load_state_dict(trainer.state_dict())
    assert float(other.loss.log_alpha.exp()) == pytest.approx(0.7)
    assert "initial_temperature" not in config.fixed_on_resume
    learnt = dataclasses.replace(config, learn_temperature=True)
    assert {"initial_temperature", "learn_temperature"} <= set(learnt.fixed_on_resume)
