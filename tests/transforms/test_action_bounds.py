"""Envs that do not clip get actions within their bounds, and what is learnt from is what was drawn."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, RewardSum, TransformedEnv

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import AgentStreams, Pendulum
from torchrl_perf.trainers import PPOConfig, PPOTrainer, evaluate_episodes
from torchrl_perf.transforms import ActionBounds

LOW, HIGH = torch.tensor([-2.0, 0.0]), torch.tensor([0.5, 1.0])
SMALL = {"num_envs": 4, "num_steps": 8, "total_steps": 32, "minibatches": 2, "device": "cpu"}


class Plain(EnvBase):
    """An env of TorchRL that takes actions as they come, and keeps what it got."""

    def __init__(self, rows: int = 4, agents: int = 0, nested: bool = False):
        super().__init__(device="cpu", batch_size=[rows])
        self.got: list[torch.Tensor] = []
        self.group = "agents" if agents else "inner" if nested else ""
        lead = (rows, agents) if agents else (rows,)
        self.lead = lead

        def placed(**specs):
            inner = Composite(specs, shape=lead)
            return Composite({self.group: inner}, shape=(rows,)) if self.group else Composite(specs, shape=(rows,))

        self.observation_spec = placed(observation=Unbounded((*lead, 3)))
        bounds = [bound.expand(*lead, 2).clone() for bound in (LOW, HIGH)]
        self.action_spec = placed(action=Bounded(*bounds, shape=(*lead, 2)))
        self.reward_spec = placed(reward=Unbounded((*lead, 1))) if agents else Unbounded((rows, 1))

    def _written(self, **entries):
        flags = {name: torch.zeros(*self.batch_size, 1, dtype=torch.bool) for name in ("done", "terminated")}
        out = TensorDict(flags, self.batch_size)
        for name, value in entries.items():
            out[(self.group, name) if (self.group and name != "reward") or self.group == "agents" else name] = value
        return out

    def _reset(self, tensordict=None):
        return self._written(observation=torch.randn(*self.lead, 3))

    def _step(self, tensordict):
        action = tensordict[(self.group, "action") if self.group else "action"]
        self.got.append(action.clone())
        return self._written(observation=torch.randn(*self.lead, 3), reward=action[..., :1])

    def _set_seed(self, seed):
        pass


def beyond(td, out_key):
    """A policy whose actions lie far outside on both sides."""
    size = td.shape[:-1]
    return 9.0 * torch.tensor([1.0, -1.0]).expand(*size, 2) + torch.randn(*size, 2)


def within(actions: list[torch.Tensor]) -> bool:
    return all(bool(((action >= LOW) & (action <= HIGH)).all()) for action in actions)


@pytest.mark.parametrize("nested", [False, True])
def test_each_entry_has_its_own_bounds_and_the_batch_what_was_drawn(nested):
    plain = Plain(nested=nested)
    key = ("inner", "action") if nested else "action"
    observed = ("inner", "observation") if nested else "observation"
    env = TransformedEnv(plain, ActionBounds(plain))
    policy = TensorDictModule(lambda obs: beyond(obs, key), in_keys=[observed], out_keys=[key])
    batch = DeviceCollector(env, policy, frames_per_batch=4 * 6).collect()
    got = torch.stack(plain.got, 1)[:, -6:]
    torch.testing.assert_close(got, torch.tensor([0.5, 0.0]).expand(4, 6, 2))
    drawn = batch[key]
    assert (drawn[..., 0] > 2).all()
    assert (drawn[..., 1] < -2).all()
    torch.testing.assert_close(batch["next", "reward"], got[..., :1])


def test_choices_and_unbounded_numbers_pass():
    class Discrete(Plain):
        def __init__(self):
            super().__init__()
            self.action_spec = Composite(kind=Categorical(3, shape=(4,)), push=Unbounded((4, 2)), shape=(4,))

    assert ActionBounds(Discrete()).keys == []


@pytest.mark.parametrize("kind", ["plain", "transformed", "class", "streams"])
def test_a_trainer_moves_the_actions_of_envs_that_do_not(kind):
    """Every way in which a trainer gets such an env, with a normal policy as wide as the bounds are."""
    plain = Plain(2, agents=2) if kind == "streams" else Plain()
    given = {
        "plain": lambda: plain,
        "transformed": lambda: TransformedEnv(plain, RewardSum()),
        "class": lambda: lambda: plain,
        "streams": lambda: AgentStreams(plain, group="agents"),
    }[kind]()
    trainer = PPOTrainer(PPOConfig.without_task(**SMALL, initial_scale=5.0), env=given)
    batch = trainer.collector.collect()
    assert not within(list(batch["action"].unbind(1)))
    assert within(plain.got)
    trainer.step()
    assert within(plain.got)


def test_an_evaluation_moves_them_too():
    plain = Plain()
    policy = TensorDictModule(lambda obs: beyond(obs, "action"), in_keys=["observation"], out_keys=["action"])
    evaluate_episodes(policy, plain, max_steps=5)
    assert plain.got
    assert within(plain.got)


def test_envs_of_the_package_are_left_as_they_are():
    env = Pendulum(4, device="cpu")
    assert PPOTrainer(PPOConfig.without_task(**SMALL), env=env).env is env
