"""Simulators in the form of Isaac Lab and mjlab, as envs of a collector and of a trainer."""

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.data import Bounded
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import SimulatorEnv
from torchrl_perf.trainers import PPOConfig, PPOTrainer

STEPS = 5  # of an episode


class Counting:
    """``count`` worlds that observe their number, their step and their episode; even worlds terminate, odd ones time
    out, and all start over inside the step."""

    device = torch.device("cpu")

    def __init__(self, count=4, *, finals=True, groups=True, four=False, low=-np.inf):
        self.num_envs, self.finals, self.groups, self.four = count, finals, groups, four
        self.single_action_space = gymnasium.spaces.Box(low, -low, (2,))
        self.step_count, self.episode = torch.zeros(count), torch.zeros(count)
        self.actions = []
        self.resets = 0

    def observed(self):
        seen = torch.stack([torch.arange(self.num_envs).float(), self.step_count, self.episode], -1)
        return {"policy": seen, "critic": torch.cat([seen, seen], -1)} if self.groups else seen

    def reset(self):
        self.resets += 1
        self.step_count = torch.zeros(self.num_envs)
        self.episode = self.episode + 1
        return self.observed(), {}

    def step(self, action):
        self.actions.append(action.clone())
        self.step_count = self.step_count + 1
        ended = self.step_count >= STEPS
        even = torch.arange(self.num_envs) % 2 == 0
        extras = {"final_observation": self.observed()} if self.finals else {}
        reward = self.step_count.clone()
        self.step_count = torch.where(ended, 0.0, self.step_count)
        self.episode = self.episode + ended
        if self.four:
            return self.observed(), reward, ended.long(), {**extras, "time_outs": ended & ~even}
        return self.observed(), reward, ended & even, ended & ~even, extras


@pytest.mark.parametrize("groups", [True, False])
def test_specs(groups):
    env = SimulatorEnv(Counting(groups=groups))
    check_env_specs(env)
    assert env.action_spec.shape == (4, 2)
    keys = {"observation", "critic"} if groups else {"observation"}
    assert set(env.observation_spec.keys()) == {*keys, "is_init"}


@pytest.mark.parametrize("four", [True, False])
@pytest.mark.parametrize("finals", [True, False])
def test_a_batch_has_final_observations_and_flags_where_episodes_end(finals, four):
    simulator = Counting(finals=finals, four=four)
    env = SimulatorEnv(simulator)
    batch = DeviceCollector(env, None, frames_per_batch=4 * 12, mode="eager").collect()
    assert simulator.resets == 1
    assert env.has_final_observations == finals
    following = batch["next"]
    for world in range(4):
        for t in range(12):
            step, episode = t % STEPS, t // STEPS + 1
            ends = step == STEPS - 1
            assert batch["observation"][world, t].tolist() == [world, step, episode]
            shown = step if ends and not finals else step + 1
            assert following["observation"][world, t].tolist() == [world, shown, episode]
            assert following["critic"][world, t].tolist() == 2 * [world, shown, episode]
            assert following["reward"][world, t] == step + 1
            assert following["terminated"][world, t] == (ends and world % 2 == 0)
            assert following["truncated"][world, t] == (ends and world % 2 == 1)
            assert following["done"][world, t] == ends
            assert batch["is_init"][world, t] == (step == 0)
    torch.testing.assert_close(torch.stack(simulator.actions, 1), batch["action"])


def test_a_masked_reset_changes_nothing():
    env = SimulatorEnv(Counting())
    root = env.reset()
    for _ in range(STEPS):
        root = env.step_and_maybe_reset(root.set("action", torch.zeros(4, 2)))[1]
    again = env.reset(root.clone().set("_reset", torch.tensor([[True], [False], [False], [True]])))
    assert torch.equal(again["observation"], root["observation"])
    assert env.simulator.resets == 1
    env.reset()
    assert env.simulator.resets == 2


def test_a_masked_reset_of_rows_that_go_on_is_refused():
    env = SimulatorEnv(Counting())
    root = env.reset()
    env.step_and_maybe_reset(root.set("action", torch.zeros(4, 2)))
    with pytest.raises(ValueError, match=r"_reset: expected rows that the simulator has ended itself"):
        env.reset(root.set("_reset", torch.tensor([[True], [False], [False], [False]])))
    limited = TransformedEnv(SimulatorEnv(Counting()), StepCounter(max_steps=3))  # earlier than the simulator's own
    with pytest.raises(ValueError, match=r"Remedy: a time limit of the simulator in place of a transform's"):
        limited.rollout(5, break_when_any_done=False)


def test_final_observations_may_be_left_out_of_steps_in_which_nothing_ends():
    class Sparing(Counting):
        def step(self, action):
            *parts, extras = super().step(action)
            return *parts, extras if (parts[2] | parts[3]).any() else {"log": {"reward": 1.0}}

    env = SimulatorEnv(Sparing(num := 3))
    batch = DeviceCollector(env, None, frames_per_batch=num * (STEPS + 1), mode="eager").collect()
    assert env.has_final_observations
    assert batch["next", "observation"][:, STEPS - 1, 1].tolist() == [STEPS] * num


@pytest.mark.parametrize("way", ["seed", "reset", "neither"])
def test_a_seed_reaches_the_simulator(way):
    class Drawing(Counting):
        def observed(self):
            return super().observed()["policy"] + torch.rand(self.num_envs, 1, generator=self.generator)

        def __init__(self):
            self.generator = None if way == "neither" else torch.Generator()
            super().__init__()
            if way == "seed":
                self.seed = self.generator.manual_seed
            elif way == "reset":
                self.reset = self.seeded_reset

        def seeded_reset(self, seed=None, options=None):
            if seed is not None:
                self.generator.manual_seed(seed)
            return Counting.reset(self)

    seen = []
    for seed in (3, 3, 4):
        env = SimulatorEnv(Drawing())
        env.set_seed(seed)
        seen.append(env.reset()["observation"][0, 0])
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize("reward", [torch.int64, torch.float64])
def test_flags_and_rewards_of_other_dtypes_are_taken(dtype, reward):
    class Other(Counting):
        def step(self, action):
            seen, paid, terminated, late, extras = super().step(action)
            return seen, paid.to(reward), terminated.to(dtype), late.to(dtype), extras

    batch = DeviceCollector(SimulatorEnv(Other(1)), None, frames_per_batch=STEPS + 1, mode="eager").collect()
    assert batch["next", "reward"].dtype == torch.float32
    assert batch["next", "reward"].flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 1.0]
    assert batch["next", "terminated"].flatten().tolist() == [False] * 4 + [True, False]


def test_a_trainer_learns_from_it_and_the_critics_group_is_left_alone():
    env = SimulatorEnv(Counting(), action_bound=1.0)
    config = PPOConfig.without_task(
        env="Counting", num_envs=4, num_steps=10, total_steps=40, minibatches=2, device="cpu"
    )
    trainer = PPOTrainer(config, env=env)
    before = [parameter.clone() for parameter in trainer.policy.parameters()]
    trainer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.policy.parameters(), strict=True))
    trainer.close()


def test_no_graph_holds_a_simulator_unless_it_is_asked_for(monkeypatch):
    env = SimulatorEnv(Counting())
    collector = DeviceCollector(env, None, frames_per_batch=40)
    assert collector.mode == "eager"
    assert SimulatorEnv(Counting(), in_graphs=True).in_graphs
    monkeypatch.setattr("torchrl_perf.collectors.validation.resolve_mode", lambda mode, device: mode)
    with pytest.raises(ValueError, match=r"expected 'auto' or 'eager' for SimulatorEnv .* Remedy: in_graphs=True"):
        DeviceCollector(env, None, frames_per_batch=40, mode="graph")


def test_a_collector_that_goes_on_begins_new_episodes():
    collector = DeviceCollector(SimulatorEnv(Counting()), None, frames_per_batch=4 * 3, mode="eager")
    collector.collect()
    state = collector.state_dict()
    other = DeviceCollector(SimulatorEnv(Counting()), None, frames_per_batch=4 * 3, mode="eager")
    other.load_state_dict(state)
    batch = other.collect()
    assert batch["is_init"][:, 0].all()
    assert (batch["observation"][:, 0, 1] == 0).all()


@pytest.mark.parametrize(
    ("simulator", "error", "words"),
    [
        (object(), TypeError, "without num_envs, step, reset"),
        ("three", TypeError, "received 3 parts"),
        ("groups", TypeError, "expected a tensor or a dict with 'policy', received dict"),
        ("parts", TypeError, r"received none in \['observation'\]"),
        ("actions", ValueError, "action_size: expected an action_space or num_actions of Counting"),
        ("discrete", TypeError, "action_space: expected a box of floats, received Discrete"),
        ("flat", ValueError, r"observations of 'observation': expected a tensor \[N, ...\] .* received \[4\] on cpu"),
        ("elsewhere", ValueError, "received \\[4, 3\\] on meta"),
        ("rewards", ValueError, r"reward: expected one number for each of 4 worlds, received \[4, 2\]"),
        ("numbers", ValueError, r"terminated: expected a tensor \[N\] .* received bool"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_another_form_is_refused_with_a_remedy(simulator, error, words):
    if isinstance(simulator, str):
        kind, simulator = simulator, Counting()
        seen = {"groups": {"critic": torch.zeros(4, 1)}, "parts": {"policy": {"joints": torch.zeros(4, 1)}}}
        seen |= {"flat": torch.zeros(4), "elsewhere": torch.zeros(4, 3, device="meta")}
        if kind in seen:
            simulator.observed = lambda: seen[kind]
        if kind == "three":
            simulator.step = lambda action: (torch.zeros(4, 1), torch.zeros(4), torch.zeros(4))
        if kind == "actions":
            simulator.single_action_space = None
        if kind == "discrete":
            simulator.single_action_space, simulator.num_actions = gymnasium.spaces.Discrete(3), 1
        if kind == "rewards":
            simulator.step = lambda action: (simulator.observed(), torch.zeros(4, 2), *[torch.zeros(4)] * 2, {})
        if kind == "numbers":
            simulator.step = lambda action: (simulator.observed(), torch.zeros(4), False, False, {})
    with pytest.raises(error, match=words) as caught:
        env = SimulatorEnv(simulator)
        env.step(env.reset().set("action", torch.zeros(4, 2)))
    assert "Remedy: " in str(caught.value)


def test_bounds_are_those_of_the_action_space_or_given():
    assert not isinstance(SimulatorEnv(Counting()).action_spec, Bounded)
    assert torch.equal(SimulatorEnv(Counting(low=-2.0)).action_spec.space.high, torch.full((4, 2), 2.0))
    assert torch.equal(SimulatorEnv(Counting(), action_bound=0.5).action_spec.space.low, torch.full((4, 2), -0.5))


def test_actions_beyond_the_bounds_move_to_the_nearest():
    simulator = Counting(low=-2.0)
    env = SimulatorEnv(simulator)
    env.step(env.reset().set("action", torch.tensor([3.0, -0.5]).expand(4, 2)))
    torch.testing.assert_close(simulator.actions[-1], torch.tensor([2.0, -0.5]).expand(4, 2))
    free = Counting()
    env = SimulatorEnv(free)
    env.step(env.reset().set("action", torch.tensor([3.0, -0.5]).expand(4, 2)))
    torch.testing.assert_close(free.actions[-1], torch.tensor([3.0, -0.5]).expand(4, 2))
