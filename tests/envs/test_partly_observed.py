"""Partly observed tasks: specs, the rules once more in plain Python, what is hidden, and bad input."""

import math

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import TransformedEnv, check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import (
    CartPole,
    NoisyStatelessCartPole,
    NoisyStatelessPendulum,
    Pendulum,
    RepeatFirst,
    RepeatPrevious,
    StatelessCartPole,
    StatelessPendulum,
    TMaze,
)
from torchrl_perf.registry import TASKS
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import HiddenEntries

ENVS = [
    StatelessCartPole,
    StatelessPendulum,
    NoisyStatelessCartPole,
    NoisyStatelessPendulum,
    TMaze,
    RepeatPrevious,
    RepeatFirst,
]


def played(env, steps, policy=None):
    """A batch ``[N, T]`` of random actions, or of a policy."""
    collector = DeviceCollector(env, policy, frames_per_batch=env.num_envs * steps, mode="eager")
    return collector.collect().clone().cpu()


@pytest.mark.parametrize("kind", ENVS)
class TestEach:
    def test_specs(self, kind, device):
        check_env_specs(kind(3, device=device))

    def test_a_name_of_the_command_line(self, kind):
        assert kind.__name__ in TASKS

    def test_host_is_never_asked(self, kind):
        env = kind(3, device="cpu")
        td = env.reset()
        actions = env.action_spec.rand()  # a box asks the host for its bounds
        with no_host_sync():
            for _ in range(4):
                td = env.step_and_maybe_reset(td.set("action", actions))[1]

    def test_a_seed_repeats_it(self, kind):
        one, two = (played(kind(3, device="cpu", seed=4), 40) for _ in range(2))
        assert torch.equal(one["observation"], two["observation"])

    def test_drawing(self, kind):
        env = kind(3, device="cpu")
        assert env.render(height=16, width=24).shape == (3, 16, 24, 3)


@pytest.mark.parametrize(
    ("hidden", "whole", "shown"),
    [(StatelessCartPole, CartPole, [0, 2]), (StatelessPendulum, Pendulum, [0, 1])],
)
def test_velocities_are_hidden_and_nothing_else_differs(hidden, whole, shown):
    one, two = (played(kind(3, device="cpu", seed=1), 60) for kind in (hidden, whole))
    for place in ("root", "next"):
        seen, all_of_it = (td if place == "root" else td["next"] for td in (one, two))
        assert torch.equal(seen["observation"], all_of_it["observation"][..., shown])
    for key in ("reward", "done", "terminated"):
        assert torch.equal(one["next", key], two["next", key])
    assert hidden.default_episode_steps == whole.default_episode_steps


@pytest.mark.parametrize(
    ("noisy", "exact", "size"),
    [(NoisyStatelessCartPole, StatelessCartPole, 4), (NoisyStatelessPendulum, StatelessPendulum, 2)],
)
class TestNoise:
    def test_is_normal_and_new_at_each_step(self, noisy, exact, size):
        env = noisy(4_000, device="cpu", sigma=0.02, seed=0)
        seen = []
        td = env.reset()
        for _ in range(3):
            seen.append(td["observation"] - exact.observe(env, env.state[:, :size]))
            td = env.step_and_maybe_reset(env.rand_action(td))[1]
        if size == 4:  # cos and sin lie at their bounds, where the noise is clipped
            for noise in seen:
                assert abs(float(noise.mean())) < 2e-3
                assert float(noise.std()) == pytest.approx(0.02, rel=0.03)
        assert abs(float(torch.corrcoef(torch.stack([n.flatten() for n in seen[:2]]))[0, 1])) < 0.05

    def test_observations_stay_within_bounds(self, noisy, exact, size):
        batch = played(noisy(50, device="cpu", sigma=3.0, seed=0), 20)
        low, high = (torch.tensor(b) for b in (exact.observation_low, exact.observation_high))
        assert ((batch["observation"] >= low) & (batch["observation"] <= high)).all()
        assert (batch["observation"] == high).any()

    def test_none_is_the_exact_task(self, noisy, exact, size):
        env = noisy(3, device="cpu", sigma=0.0)
        assert torch.equal(env.reset()["observation"], exact.observe(env, env.state[:, :size]))

    @pytest.mark.parametrize("sigma", [-0.1, math.nan, True, "big"])
    def test_bad_sigma(self, noisy, exact, size, sigma):
        with pytest.raises(ValueError, match=r"expected sigma of at least 0, received .*Remedy"):
            noisy(3, device="cpu", sigma=sigma)


class MazeTwin:
    """TMaze for one walker, by the text of its docstring."""

    def __init__(self, length, sign):
        self.length, self.sign, self.place = length, sign, 0

    def observe(self):
        if self.place == 0:
            return [0, 1, 1] if self.sign == "left" else [1, 1, 0]
        return [0, 1, 0] if self.place == self.length else [1, 0, 1]

    def step(self, action):
        if self.place == self.length and action in (2, 3):
            return (4.0 if ["left", "right"][action - 2] == self.sign else -0.1), True
        before = self.place
        self.place = max(0, min(self.length, self.place + {0: 1, 1: -1}.get(action, 0)))
        return (0.0 if self.place > before else -0.1), False


@pytest.mark.parametrize("length", [1, 2, 5])
def test_maze_against_its_twin(length):
    steps, num_envs = 120, 8
    # mostly forward, so that the junction is reached
    env = TMaze(num_envs, length=length, device="cpu", seed=3)

    def act(td):
        drawn = torch.randint(4, (num_envs,))
        return td.set("action", torch.where(torch.rand(num_envs) < 0.5, 0, drawn))

    batch = played(env, steps, act)
    turns = 0
    for row in batch.unbind(0):
        twin, elapsed = None, 0
        for t in range(steps):
            if twin is None:
                twin, elapsed = MazeTwin(length, "left" if row["observation"][t].tolist() == [0, 1, 1] else "right"), 0
            assert row["observation"][t].tolist() == twin.observe()
            reward, ended = twin.step(int(row["action"][t]))
            elapsed += 1
            assert float(row["next", "reward"][t]) == pytest.approx(reward)
            assert bool(row["next", "terminated"][t]) is ended
            assert row["next", "observation"][t].tolist() == twin.observe()
            assert bool(row["next", "truncated"][t]) is (elapsed >= 2 * (length + 1))
            turns += ended
            twin = None if bool(row["next", "done"][t]) else twin
    assert turns > 5


def test_maze_needs_its_sign():
    env = TMaze(2_000, length=4, device="cpu", seed=0)
    seen = {}

    def remember(td):
        first = td["is_init"].squeeze(-1)
        left = td["observation"][:, 2] > 0
        seen["left"] = torch.where(first | (env.state[:, 0] == 0), left, seen.get("left", left))
        at_end = env.state[:, 0] == 4
        return td.set("action", torch.where(at_end, torch.where(seen["left"], 2, 3), 0))

    def forget(td):
        return td.set("action", torch.where(env.state[:, 0] == 4, 2, 0))

    best, blind = (played(env, 5, policy)["next", "reward"].sum(1) for policy in (remember, forget))
    assert (best == TMaze.optimal_return).all()
    assert float(blind.mean()) == pytest.approx(TMaze.memoryless_return, abs=0.1)


def suits(batch, row, t):
    return int(batch["observation"][row, t].argmax())


@pytest.mark.parametrize(("k", "num_decks"), [(1, 1), (4, 1), (32, 2), (51, 1)])
def test_repeat_previous_against_its_twin(k, num_decks):
    cards = 52 * num_decks
    env = RepeatPrevious(6, k=k, num_decks=num_decks, device="cpu", seed=2)
    batch = played(env, cards - 1)
    assert batch["next", "truncated"][:, -1].all()
    assert not batch["next", "done"][:, :-1].any()
    assert not batch["next", "terminated"].any()
    for row in range(6):
        hand = [suits(batch, row, 0)]
        for t in range(cards - 1):
            assert suits(batch, row, t) == hand[-1]
            expected = 0.0
            if len(hand) >= k:
                expected = (1 if int(batch["action"][row, t]) == hand[-k] else -1) / (cards - k)
            assert float(batch["next", "reward"][row, t]) == pytest.approx(expected)
            hand.append(suits(batch["next"], row, t))
        # all cards of the deck, each once
        assert [hand.count(suit) for suit in range(4)] == [13 * num_decks] * 4


@pytest.mark.parametrize("num_decks", [1, 3])
def test_repeat_first_against_its_twin(num_decks):
    cards = 52 * num_decks
    batch = played(RepeatFirst(6, num_decks=num_decks, device="cpu", seed=2), cards - 1)
    for row in range(6):
        first, hand = suits(batch, row, 0), [suits(batch, row, 0)]
        for t in range(cards - 1):
            expected = (1 if int(batch["action"][row, t]) == first else -1) / (cards - 1)
            assert float(batch["next", "reward"][row, t]) == pytest.approx(expected)
            hand.append(suits(batch["next"], row, t))
        assert [hand.count(suit) for suit in range(4)] == [13 * num_decks] * 4
    assert batch["next", "truncated"][:, -1].all()


def test_right_answers_give_one_and_wrong_ones_take_one():
    for sign, shift in ((1.0, 0), (-1.0, 1)):
        env = RepeatFirst(5, device="cpu")
        batch = played(
            env, 51, lambda td, env=env, shift=shift: td.set("action", (env.state[:, -1].long() + shift) % 4)
        )
        torch.testing.assert_close(batch["next", "reward"].sum(1), torch.full((5, 1), sign))


def test_cards_are_dealt_evenly():
    env = RepeatFirst(20_000, device="cpu", seed=0)
    first = env.reset()["observation"]
    second = env.step(env.rand_action(env.reset()))["next", "observation"]
    torch.testing.assert_close(first.mean(0), torch.full((4,), 0.25), rtol=0, atol=0.02)
    torch.testing.assert_close(second.mean(0), torch.full((4,), 0.25), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TMaze(2, length=0), "length"),
        (lambda: RepeatPrevious(2, k=0), "k"),
        (lambda: RepeatPrevious(2, k=52), "expected k below the 52 cards, received 52"),
        (lambda: RepeatFirst(2, num_decks=0), "num_decks"),
        (lambda: RepeatFirst(2, max_episode_steps=52), "max_episode_steps of at most 51.*received 52"),
        (lambda: RepeatFirst(2, max_episode_steps=None), "max_episode_steps of at most 51.*received None"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=f"{message}.*Remedy"):
        make()


class TestHiddenEntries:
    def test_equals_the_stateless_task(self):
        env = TransformedEnv(CartPole(3, device="cpu", seed=1), HiddenEntries([1, -1]))
        check_env_specs(env)
        exact = StatelessCartPole(3, device="cpu", seed=1)
        found, expected = env.observation_spec["observation"].space, exact.observation_spec["observation"].space
        assert torch.equal(found.low, expected.low)
        assert torch.equal(found.high, expected.high)

        policy = TensorDictModule(lambda x: (x.sum(-1) > 0).long(), ["observation"], ["action"])
        env = TransformedEnv(CartPole(3, device="cpu"), HiddenEntries([1, 3]))
        batch = env.rollout(20, policy, break_when_any_done=False)
        assert batch["observation"].shape == batch["next", "observation"].shape == (3, 20, 2)
        state = batch["next", "observation"][:, -1]
        rows = ~batch["next", "done"][:, -1].squeeze(-1)
        assert torch.equal(state[rows], env.base_env.state[:, ::2][rows])

    def test_is_collected_without_a_host_wait(self):
        env = TransformedEnv(CartPole(3, device="cpu"), HiddenEntries([1, 3]))
        collector = DeviceCollector(env, None, frames_per_batch=30, mode="eager")
        collector.collect()
        with no_host_sync():
            assert collector.collect()["observation"].shape == (3, 10, 2)

    @pytest.mark.parametrize("entries", [[], [0.5], [True]])
    def test_bad_entries(self, entries):
        with pytest.raises(ValueError, match=r"entries: expected whole numbers, received .*Remedy"):
            HiddenEntries(entries)

    @pytest.mark.parametrize("entries", [[4], [0, -4], [0, 1, 2, 3], [-5]])
    def test_entries_that_do_not_fit(self, entries):
        with pytest.raises(
            ValueError, match=r"entries: expected different places in 'observation', which has 4 entries"
        ):
            TransformedEnv(CartPole(3, device="cpu"), HiddenEntries(entries)).observation_spec  # noqa: B018

    def test_a_key_that_is_not_there(self):
        with pytest.raises(ValueError, match=r"key: expected one of .*received 'pixels'.*Remedy"):
            TransformedEnv(CartPole(3, device="cpu"), HiddenEntries([0], "pixels")).observation_spec  # noqa: B018
