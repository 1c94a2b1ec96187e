"""Policies of the systems from their checkpoints, and their evaluation during a run."""

import csv
import math

import colony_runs
import dynamics_runs
import fire_runs
import marine_runs
import pytest
import torch
import trading_runs

from torchrl_perf.trainers import load_policy, save_policy, train
from torchrl_perf.trainers.blueprints import blueprint_of
from torchrl_perf.trainers.policies import GreedyPolicy

MAKERS = {
    **{f"marine-{agent}": lambda agent=agent, **o: marine_runs.make(agent, **o) for agent in marine_runs.AGENTS},
    "durotaxis": colony_runs.make,
    "durotaxis, each node": lambda **options: colony_runs.make(actions="per_node", **options),
    "fuel-breaks": fire_runs.make,
    "options-market": trading_runs.make,
    "options-market, sides": lambda **options: trading_runs.make(
        **{"options": "sides", "semantics": "target", **options}
    ),
    "active-dynamics": dynamics_runs.make,
    "active-dynamics, random inputs": lambda **options: dynamics_runs.make(inputs="random", **options),
    "active-dynamics, embedding": lambda **options: dynamics_runs.make(inputs="embedding", **options),
}
systems = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@systems
def test_equals_the_trainers_policy_in_any_env_of_its_kind(make, tmp_path):
    trainer = make()
    for _ in range(3):
        trainer.step()
        trainer.iterations_done += 1
    path = trainer.save(tmp_path / "checkpoint.pt")
    policy, alone = load_policy(path), load_policy(save_policy(path, tmp_path / "policy.pt"))
    config = trainer.config
    for root in (trainer.env.reset(), blueprint_of(config).env(config.for_rows(5), torch.device("cpu")).reset()):
        acted = []
        for each in (policy, alone, GreedyPolicy(trainer.policy)):
            torch.manual_seed(0)  # a planner draws its candidates
            acted.append(each(root.clone()))
        for other in acted[1:]:
            assert all(torch.equal(acted[0].get(key), other.get(key)) for key in trainer.env.action_keys)
    trainer.close()


@systems
def test_evaluation_during_a_run(make, tmp_path):
    trainer = make(run_dir=str(tmp_path), eval_interval=3, eval_episodes=4, log_interval=3, logger="csv")
    result = train(trainer, progress=False)
    trainer.close()
    with (result.run_dir / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert math.isfinite(float(rows[0][trainer.config.evaluated_by]))
    assert math.isfinite(result.evaluated)
    assert trainer.train_state.notes["best"]["metric"] == trainer.config.evaluated_by
    assert (result.run_dir / "checkpoints" / "best.pt").is_file()
