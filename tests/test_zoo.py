"""The zoo: its size and files, that each entry acts and plays as its card says, and names that it does not have."""

import csv
import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.bench.zoo_plan import PLAN
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers import load_policy
from torchrl_perf.trainers.export import random_rows
from torchrl_perf.trainers.policies import policy_of, read_run
from torchrl_perf.trainers.variants import evaluate_run, source_for
from torchrl_perf.zoo import FOLDER, MOST_BYTES, run_path, zoo_entries, zoo_name

ENTRIES = zoo_entries()
CHEAP = ("ppo-CartPole", "dqn-CartPole", "pqn-CartPole")
SHAPES = ((), (1,), (6,), (2, 3))
entries = pytest.mark.parametrize("name", ENTRIES)


def test_three_are_there_and_each_is_planned():
    assert set(CHEAP) <= set(ENTRIES) <= set(PLAN)


def test_all_together_are_small():
    total = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    assert total == sum(entry.size for entry in ENTRIES.values()), "a file of no entry"
    assert total <= MOST_BYTES


@entries
def test_an_entry_is_a_small_run_and_says_what_it_is(name):
    entry, run = ENTRIES[name], read_run(f"zoo:{name}")
    files = sorted(file.relative_to(entry.path).as_posix() for file in entry.path.rglob("*") if file.is_file())
    assert files == [f"checkpoints/{run.path.name}", "config.json", "entry.json", "progress.csv"]
    assert (run.config.algorithm, run.config.env) == (PLAN[name].algorithm, PLAN[name].task)
    assert run.config.run_dir == "runs"  # not where it was made
    card = entry.card
    stored = [card[key] for key in ("algorithm", "task", "steps", "seed")]
    assert stored == [run.config.algorithm, run.config.env, run.steps, run.config.seed]
    assert card["parameters"] == sum(each.numel() for each in policy_of(run).parameters()) > 0
    assert card["seconds"] > 0
    assert card["machine"]["date"]
    found = card["evaluation"]
    assert found["seed"] != card["seed"]
    assert found["episodes"] >= 100
    assert all(math.isfinite(found[key]) for key in ("mean_return", "return_deviation", "mean_length"))
    low, high = found["interval"]
    assert low <= found["mean_return"] <= high
    with (entry.path / "progress.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert 1 < len(rows) <= 100
    assert int(rows[-1]["step"]) == run.steps


@entries
def test_it_acts_for_any_number_of_rows(name):
    run = read_run(f"zoo:{name}")
    policy, specs = load_policy(f"zoo:{name}", device="cpu"), run.specs
    any_range = name.startswith("ppo-")
    for rows in (1, 5):
        source = source_for(run, rows, seed=0)
        check_actions(policy, source.env.reset(), any_range=any_range)
        source.env.close()
    if set(policy.in_keys) <= set(specs.observation_spec.keys(True, True)):
        inputs = dict(zip(policy.in_keys, random_rows(policy, policy.in_keys, 6), strict=True))
        whole = TensorDict(inputs, [6])
        for shape in SHAPES:
            check_actions(policy, whole[: math.prod(shape)].reshape(shape), any_range=any_range)


def check_actions(policy, rows, *, any_range):
    """Actions of a policy for rows of any shape are those of its env, and the same in each call.

    ``any_range``: a Gaussian's mean has none, and the envs clip it.
    """
    acted = []
    for _ in range(2):
        with seeded(0):  # a planner draws its candidates
            acted.append(policy(rows.clone()))
    for key in policy.specs.action_keys:
        spec, action = policy.specs.full_action_spec[key], acted[0].get(key)
        assert action.shape == (*rows.batch_size, *spec.shape[1:])
        assert torch.equal(action, acted[1].get(key))
        for each in action.reshape(-1, *spec.shape):
            assert spec.is_in(spec.project(each) if any_range else each)
            assert each.isfinite().all()


def difference(card, found):
    """How far the mean of episodes is from a card's, and how far it may be: four standard errors of the difference.

    The larger of both deviations counts, so that one bad episode among perfect ones is no other policy; a part in a
    thousand is for the rounding of other machines, where no episode differs.
    """
    wanted, count = card["evaluation"], len(found.returns)
    spread = max(wanted["return_deviation"], found.return_deviation)
    error = spread * math.sqrt(1 / wanted["episodes"] + 1 / count)
    return abs(found.mean_return - wanted["mean_return"]), 4 * error + 1e-3 * abs(wanted["mean_return"])


@pytest.mark.parametrize("name", CHEAP)
def test_it_plays_as_well_as_its_card_says(name):
    run = read_run(f"zoo:{name}")
    apart, allowed = difference(ENTRIES[name].card, evaluate_run(run, policy_of(run), 16, seed=77))
    assert apart <= allowed


@pytest.mark.slow
@entries
def test_its_evaluation_is_repeated(name):
    card, run = ENTRIES[name].card, read_run(f"zoo:{name}")
    wanted = card["evaluation"]
    found = evaluate_run(run, policy_of(run), 100, seed=wanted["seed"])
    assert len(found.returns) == wanted["episodes"]
    apart, allowed = difference(card, found)
    assert apart <= allowed


def test_another_policy_is_told_from_it():
    run = read_run("zoo:ppo-CartPole")
    policy = policy_of(run)
    for each in policy.parameters():
        each.zero_()
    apart, allowed = difference(ENTRIES["ppo-CartPole"].card, evaluate_run(run, policy, 16, seed=77))
    assert apart > allowed


class TestNames:
    def test_a_path_stays_what_it_is(self, tmp_path):
        assert run_path(str(tmp_path)) == run_path(tmp_path) == tmp_path
        assert zoo_name(tmp_path) is None

    def test_the_nearest_is_named(self):
        with pytest.raises(FileNotFoundError, match=r"zoo: expected one of .*received 'ppo-Cartpol'.*zoo:ppo-CartPole"):
            load_policy("zoo:ppo-Cartpol")

    def test_where_none_is_near_the_list_is(self):
        with pytest.raises(FileNotFoundError, match=r"received 'xyz'\. Remedy: torchrl-perf zoo, which lists them\."):
            load_policy("zoo:xyz")
