"""Studies of vessels: worlds of the curriculum, levels of risk, and their picture."""

import json
from dataclasses import replace

import pytest
from marine_runs import make

from torchrl_perf.bench import curves_marine
from torchrl_perf.bench.curves import main
from torchrl_perf.bench.curves_studies import PREPARED, STUDIES
from torchrl_perf.registry import MARINE_AGENTS
from torchrl_perf.systems.marine.risk import LEVELS
from torchrl_perf.systems.marine.trainer import make_marine_env


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(curves_marine, "SCENARIOS", 2)
    worlds = {name: {**world, "max_episode_steps": 8} for name, world in curves_marine.WORLDS.items()}
    monkeypatch.setattr(curves_marine, "WORLDS", worlds)
    monkeypatch.setattr(curves_marine, "AT_RISK", {**curves_marine.AT_RISK, "max_episode_steps": 60})


def test_the_curriculum_ends_in_the_last_world_for_all_agents():
    study = STUDIES["marine-curriculum"]
    assert list(study.runs) == list(MARINE_AGENTS)
    last = curves_marine.WORLDS["6 vessels, obstacles, vortices"]
    for name, run in study.runs.items():
        stages = run.config(0).stages()
        assert [stages[key][0] for key in ("robots", "obstacles", "cores", "distance")] == [3, 0, 0, 30], name
        assert [stages[key][-1] for key in ("robots", "obstacles", "cores", "distance")] == [6, 4, 4, 40], name
        assert {key: stages[key][-1] for key in ("robots", "obstacles", "cores")} == {
            key: last[key] for key in ("robots", "obstacles", "cores")
        }
    # a world of the last stage has room for all of it
    config = replace(run.config(0, device="cpu"), num_envs=8, stage_frames="0, 1, 2, 3, 4, 5")
    env = make_marine_env(config, "cpu")
    env.base_env.frames.fill_(5)
    env.reset()
    seen = env.base_env.snapshot()
    assert seen["active"].all()
    assert (seen["goal"] - seen["position"]).norm(dim=-1).min() >= 40 - 1e-3


@pytest.mark.parametrize("agent", ["iqn", "sac"])
def test_figures_of_each_world(agent):
    trainer = make(agent)
    found = curves_marine.navigated(trainer, agent)
    assert set(found) == {"trained", "scripted"}
    for figures in found.values():
        assert figures["vessels"] == 12
        assert {"success", "collision", "timeout", "mean_time", "mean_energy", "3 vessels: success"} <= set(figures)
    assert curves_marine.navigated(trainer, agent)["scripted"]["collision"] == found["scripted"]["collision"]


def test_a_run_of_the_curriculum_is_stored_and_drawn(tmp_path, monkeypatch):
    study = STUDIES["marine-curriculum"]
    small = {"num_envs": 4, "learning_starts": 16, "updates_per_iteration": 1, "minibatch_size": 16, "log_interval": 1}
    small["max_episode_steps"] = 8
    runs = {"ac-iqn": study.runs["ac-iqn"]._replace(changes={**curves_marine.CURRICULUM, **small})}
    monkeypatch.setitem(STUDIES, "few", replace(study, runs=runs))
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "few"]
    assert main([*options, "--seeds", "4", "--total-steps", "160"]) == 0
    row = json.loads((tmp_path / "few_ac-iqn_4.json").read_text())["rows"][0]
    assert row["evaluation"]["scripted"]["vessels"] == 12
    assert (tmp_path / "curve_few.png").stat().st_size > 10_000
    assert "marine-curriculum" in PREPARED


def test_risk_of_a_run_is_stored_and_drawn(tmp_path):
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "marine-risk"]
    assert main([*options, "--seeds", "4", "--total-steps", "2560"]) == 0
    row = json.loads((tmp_path / "marine-risk_iqn_4.json").read_text())["rows"][0]
    levels = {f"worst {level:g}" for level in LEVELS if level < 1}
    assert set(row["evaluation"]) == {"trained", "scripted"} | levels
    assert row["evaluation"]["trained"]["vessels"] == 6
    assert (tmp_path / "curve_marine-risk.png").stat().st_size > 20_000
