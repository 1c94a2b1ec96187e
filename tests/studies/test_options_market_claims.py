"""The patterns of options_market: the same results as the package's, known numbers, and faults that are noticed."""

import math
import random

import numpy as np
import pytest
import torch

from studies import claims
from studies.options_market import agents as market_agents
from studies.options_market import claims as market_claims
from studies.options_market import data as market_data
from studies.options_market import log as market_log
from studies.options_market import loops as market_loops
from studies.originals import dict_replay, market, options
from studies.originals.options_loop import LoopSettings, LoopTraining
from studies.sitting import (
    CONFIRMED,
    NOT_HERE,
    NOT_REPRODUCED,
    PARTLY,
    REFUSED,
    Sitting,
    as_tuple,
    difference,
)

CPU = torch.device("cpu")


def quick():
    return Sitting("options_market", CPU, quick=True)


class TestMarket:
    """One env in NumPy."""

    def test_steps_are_those_of_the_batched_env(self):
        one, other = market_agents.same_steps(CPU, count=6, steps=24)
        assert len(one) == len(other) == 3 * 24
        assert difference(as_tuple(one), as_tuple(other)) < 1e-3
        # what is compared has happened: positions were opened, and equities moved
        assert any(bool((columns[:, 555] > 0).any()) for columns in one[::3])
        assert one[2].ne(one[-1]).all()

    def test_a_wrong_cost_is_noticed(self, monkeypatch):
        monkeypatch.setattr(market, "COST", 0.01)
        one, other = market_agents.same_steps(CPU, count=3, steps=4)
        assert difference(as_tuple(one), as_tuple(other)) > 1e-3

    def test_a_purchase_and_its_sale_by_hand(self):
        loop = market.MarketLoop(0)
        quiet = market.Bar(0.0, 0.0)
        observation, reward, terminated, truncated = loop.step(1.0, quiet)
        # capped at .35 of the equity without a position
        assert loop.shares * loop.price == pytest.approx(0.35)
        assert loop.equity == pytest.approx(1 - 0.35 * market.COST)
        assert reward == pytest.approx(math.log(1 - 0.35 * market.COST))
        assert observation["position"][0] == 1.0
        assert (terminated, truncated) == (False, False)
        loop.step(-1.0, quiet)
        assert loop.shares > 0  # held for less than two steps
        _, reward, *_ = loop.step(-1.0, market.Bar(0.1, 0.0))
        assert loop.shares == 0.0
        assert loop.equity == pytest.approx(1 + loop.realised)
        assert loop.paid == pytest.approx(0.7 * market.COST)

    def test_more_than_fourteen_purchases_in_twenty_bars_are_refused(self):
        loop = market.MarketLoop(0)
        for _ in range(20):
            loop.step(0.01, market.Bar(0.0, 0.0))
        assert sum(loop.buys) == 15
        assert loop.notional(0.5) == 0.0

    def test_ruin_and_the_time_limit_end_an_episode(self):
        loop = market.MarketLoop(0)
        loop.cash = 0.4
        assert loop.step(0.0)[2]
        loop.begin()
        loop.steps = market.EPISODE - 1
        assert loop.step(0.0)[2:] == (False, True)

    def test_returns_switch_between_two_states(self):
        loop = market.MarketLoop(1)
        returns = np.array([loop.draw().log_return for _ in range(100_000)])
        want = math.sqrt(0.8 * 0.0008**2 + 0.2 * 0.003**2)
        assert returns.std() == pytest.approx(want, rel=0.1)
        kurtosis = ((returns - returns.mean()) ** 4).mean() / returns.var() ** 2
        assert 6 < kurtosis < 13


class TestOptions:
    """Rules in Python, and choices one by one."""

    @pytest.mark.parametrize(("option", "mean"), [(0, 7.50), (3, 15.67), (4, 7.07), (5, 9.06), (2, 52.0)], ids=str)
    def test_durations_by_time_alone(self, option, mean):
        # no position to speak of but one that is open, nothing extreme, no trend that fades
        now = _still(size=0.05)
        alive, total = 1.0, 0.0
        for age in range(1, 3000):
            total += alive
            alive *= 1 - options.end_probability(option, age, now)
        assert total == pytest.approx(mean, abs=0.02)

    def test_rules_by_hand(self):
        flat = _still(size=0.0)
        assert options.available(flat) == [True, False, False, True, False, True]
        assert options.available(_still(size=0.3)) == [False, False, True, True, False, True]
        fallen = _still(size=0.0)
        fallen["technical"][-1, 12] = 0.3
        assert options.available(fallen)[4]
        assert options.end_probability(0, 5, _still(size=0.2)) == 1.0
        assert options.end_probability(0, 4, _still(size=0.2)) == 0.0

    def test_a_choice_that_differs_is_refused(self, monkeypatch):
        monkeypatch.setattr(options, "_may_follow", lambda now: True)
        wrong = tuple(
            options.Rules(rules.name, rules.scale, rules.min_steps, lambda now: True, rules.ends)
            for rules in options.OPTIONS
        )
        monkeypatch.setattr(options, "OPTIONS", wrong)
        sitting = quick()
        market_claims.selection(sitting)
        bad = [row for row in sitting.rows if row.get("ok") is False]
        assert {row["variant"] for row in bad} == {market_claims.RESIDENT}
        assert {row["verdict"] for row in sitting.verdicts} == {REFUSED}

    def test_one_pass_chooses_among_the_same(self):
        torch.manual_seed(0)
        _, td = market_agents.market(12, CPU, steps=6)
        dicts = market_agents.dicts_of(td)
        selector = options.SerialSelector(lambda rows: rows[:, :6] * 0 + torch.arange(6.0), CPU)
        for found in (selector.select_all(dicts), tuple(zip(*map(selector.select_one, dicts), strict=True))):
            chosen, log_probs, allowed = found
            assert all(mask[option] for option, mask in zip(chosen, allowed, strict=True))
            assert list(allowed) == [options.available(now) for now in dicts]
            assert all(value <= 0 for value in log_probs)

    def test_actions_lie_in_the_options_range(self):
        actor = market_claims.make_actor("MLP", CPU)
        serial = market_agents.serial_actor(actor, CPU)
        rows = np.random.default_rng(0).standard_normal((6, 578), np.float32)
        actions = serial.predict_all(rows, range(6))
        assert (np.abs(actions[:, 0]) <= [0.8, 0.8, 1.0, 0.6, 1.0, 0.05]).all()
        one = np.array([serial.predict_one(row, index, greedy=True) for index, row in enumerate(rows)])
        np.testing.assert_allclose(serial.predict_all(rows, range(6), greedy=True), one, atol=1e-5)


def _still(size):
    """An observation of a bar in which nothing happens: an upward trend, RSI a half, no sentiment."""
    now = {
        "technical": np.zeros((24, 23), np.float32),
        "sentiment": np.full(3, 1 / 3, np.float32),
        "position": np.array([size > 0, 0, 0, 0, size], np.float32),
        "portfolio": np.zeros(8, np.float32),
        "regime": np.zeros(10, np.float32),
    }
    now["technical"][-1, 4], now["technical"][-1, 6], now["technical"][-1, 12] = 0.5, 1.6, 0.5
    now["regime"][0] = 0.5
    return now


class TestReplay:
    """Dicts of observations, a deque, and arrays in a ring."""

    def test_flattening_is_the_envs(self):
        _, td = market_agents.market(5, CPU, steps=3)
        dicts = market_agents.dicts_of(td)
        for form in (dict_replay.flatten_each, dict_replay.flatten_keys):
            assert form(dicts).shape == (5, 578)
            assert torch.from_numpy(form(dicts)).equal(td["observation"])

    def test_all_designs_hold_the_same_after_the_ring_has_turned(self):
        steps = market_data.episode(5)
        deque = dict_replay.DequeReplay(48)
        arrays = dict_replay.ArrayReplay(48, steps[0][0])
        for rows in steps:
            deque.add(rows)
            arrays.add(rows)
        assert len(deque) == len(arrays) == 48
        one, other = (replay.take(list(range(48)), CPU) for replay in (deque, arrays))
        assert one.keys() == other.keys()
        assert all(value.equal(other[key]) for key, value in one.items())
        assert one["observation"][0].equal(torch.from_numpy(steps[2][0]["observation"]))
        assert arrays.sample(7, CPU)["next_observation"].shape == (7, 578)

    def test_a_replay_that_loses_rows_is_refused(self, monkeypatch):
        monkeypatch.setattr(dict_replay.ArrayReplay, "add", lambda self, rows: setattr(self, "written", self.capacity))
        sitting = quick()
        market_data.replay(sitting)
        assert {row["variant"] for row in sitting.rows if row.get("ok") is False} == {market_data.ARRAYS}
        assert {row["verdict"] for row in sitting.verdicts} == {REFUSED}


class TestLoop:
    """The training loop."""

    @pytest.mark.parametrize("batched", [False, True])
    def test_options_and_their_returns(self, batched):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        numbers = LoopSettings(num_envs=3, batched=batched, batch_size=8, gamma=0.9)
        selector = options.SerialSelector(lambda rows: rows[:, :6] * 0, CPU)
        actor = market_agents.serial_actor(market_claims.make_actor("MLP", CPU), CPU)
        seen = []

        def update(batch, choices):
            seen.append((batch, choices))
            return {"loss": torch.ones(())}

        loop = LoopTraining(selector, actor, update, numbers, CPU)
        loop.fill(40)
        loop.iteration(2)
        assert len(seen) == 2 * numbers.updates == len(loop.records["loss"])
        assert len(loop.replay) == len(loop.rewards) == 42 * 3
        steps, chosen = loop.replay.take(range(126), CPU), loop.choices.take(range(len(loop.choices)), CPU)
        # every reward is in one option's return, those of options that still run aside
        rewards, age = steps["reward"].view(42, 3), steps["option_age"].view(42, 3)
        assert rewards.flatten().numpy() == pytest.approx(100 * np.array(loop.rewards), rel=1e-4, abs=1e-6)
        first = age[:, 0].tolist()
        length = next(i for i in range(1, 42) if first[i] == 1)
        want = sum(0.9**i * float(rewards[i, 0]) for i in range(length))
        at = [i for i in range(len(chosen["gamma"])) if chosen["observation"][i].equal(steps["observation"][0])]
        assert chosen["returns"][at[0]].item() == pytest.approx(want, rel=1e-3, abs=1e-5)
        assert chosen["gamma"][at[0]].item() == pytest.approx(0.9**length, rel=1e-5)
        assert chosen["next_observation"][at[0]].equal(steps["next_observation"][3 * (length - 1)])

    def test_the_update_is_the_trainers(self):
        sitting = quick()
        market_loops._same_update(sitting)
        (row,) = sitting.rows
        assert row["ok"]
        assert row["off_by"] < 0.2 * row["tolerance"]

    def test_an_update_with_another_rate_is_noticed(self, monkeypatch):
        plain = market_agents.PlainUpdate.__init__

        def slower(self, trainer):
            groups = trainer.algorithm.actor_groups()
            trainer.actor_groups = lambda: [{**group, "lr": 0.5 * group["lr"]} for group in groups]
            plain(self, trainer)

        monkeypatch.setattr(market_agents.PlainUpdate, "__init__", slower)
        sitting = quick()
        market_loops._same_update(sitting)
        assert not sitting.rows[0]["ok"]


def test_encoder_has_about_as_many_parameters_as_the_originals():
    encoder = market_agents.WindowEncoder(26)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == pytest.approx(3.24e6, rel=0.03)
    assert encoder(torch.randn(2, 578)).shape == (2, 282)


def test_more_gradient_steps_are_no_accumulation():
    sitting = quick()
    market_log.accumulation(sitting)
    whole, accumulated, stepped = sitting.rows
    assert (whole["rows_at_once"], accumulated["rows_at_once"], stepped["rows_at_once"]) == (256, 64, 256)
    assert accumulated["off_by"] < 1e-5 < stepped["off_by"]
    assert sitting.verdicts[0]["verdict"] == NOT_REPRODUCED


CLAIMS = {
    "inference": ("SAC inference 16x", "16x by a batch", "one pass scales"),
    "selection": ("option selection 10-16x (one pass", "(rules as tensors, 16 envs)", "(rules as tensors, 64 envs)"),
    "tensors": ("100x: from_numpy(np", "100x: from_numpy of one", "non_blocking", "preallocated action"),
    "flatten": ("vectorised flattening", "one cat"),
    "replay": ("3x: arrays", "3x: the package's"),
    "memory": ("-40%: arrays", "-40%: the package's", "-40%: each observation", "set_to_none"),
    "accumulation": ("gradient_steps: 4",),
    "logging": ("-80%: verbose", "-80%: batch metric", "-80%: added up"),
    "end-to-end": ("2.5-3x (the original's", "2.5-3x (the package", "steps/s", "steps/s"),
    "utilisation": ("20% -> 70-80%", "above 70%", "80 C"),
    "throughput": ("15-18 minutes", "of one run", "n_envs: 32", "4,096 envs", "30 s", "VRAM"),
    "diversity": ("10% of the steps",),
    "ablation": (
        *("TF32 8x: a matrix", "(bf16) 2x: a matrix", "TF32 8x: the update", "(bf16) 2x: the update"),
        *("torch.compile 15-30%", "fused optimizer 20%", "reduce-overhead", "+30%", "computes the same", "batch size"),
    ),
}
SLOW = ("end-to-end", "throughput")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CLAIMS]
)
def test_a_quick_sitting_judges_every_claim(name, capsys):
    available = claims.experiments("options_market")
    assert list(available) and set(available) == set(CLAIMS)
    sitting = quick()
    claims.run(sitting, {name: available[name]})
    assert not [row for row in sitting.rows if row.get("ok") is False]
    found = [row["claim"] for row in sitting.verdicts]
    assert len(found) == len(CLAIMS[name])
    assert all(part in claim for part, claim in zip(CLAIMS[name], found, strict=True)), found
    assert {row["verdict"] for row in sitting.verdicts} <= {CONFIRMED, PARTLY, NOT_REPRODUCED, NOT_HERE}
    assert all(row["experiment"] == name for row in sitting.rows + sitting.verdicts)
    assert all(0 < row["p10_us"] <= row["us"] <= row["p90_us"] for row in sitting.rows if "us" in row)
    capsys.readouterr()
