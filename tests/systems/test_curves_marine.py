"""Studies of vessels: worlds of the curriculum, levels of risk, and their picture."""

import functools
import json
from dataclasses import replace

import pytest
from marine_runs import make

from torchrl_perf.bench import curves_marine
from torchrl_perf.bench.curves import main
from torchrl_perf.bench.curves_agents import make_vessel_ppo
from torchrl_perf.bench.curves_studies import PREPARED, STUDIES, Run
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
    assert list(study.runs) == [*MARINE_AGENTS, "ippo", "mappo"]
    last = curves_marine.WORLDS["6 vessels, obstacles, vortices"]
    for name, run in ((agent, study.runs[agent]) for agent in MARINE_AGENTS):
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


def test_the_long_curriculum_differs_in_its_steps_alone():
    short, long = (STUDIES[name].runs for name in ("marine-curriculum", "marine-curriculum-long"))
    assert {replace(long[agent].config(0), total_steps=1_000_000) == short[agent].config(0) for agent in long} == {True}
    assert {run.config(0).total_steps for run in long.values()} == {6_000_000}


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


WORLD = {"max_robots": 2, "max_obstacles": 1, "stage_frames": "0", "stage_robots": "2", "stage_obstacles": "1"}
WORLD |= {"stage_distance": "10", "max_episode_steps": 12}
SMALL = {"num_envs": 8, "num_steps": 16, "total_steps": 512, "minibatches": 2, "epochs": 2, "hidden_sizes": (16,)}


@pytest.mark.parametrize("shared", [False, True], ids=["ippo", "mappo"])
def test_ppo_of_vessels_counts_the_steps_of_worlds(shared, tmp_path, monkeypatch):
    study = STUDIES["marine-curriculum"]
    make = functools.partial(make_vessel_ppo, world=WORLD, shared=shared)
    run = Run("ppo", "MarineNavigation", {**SMALL, "log_interval": 1}, make=make, rows=2)
    monkeypatch.setitem(STUDIES, "few", replace(study, runs={"vessels": run}))
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "few"]
    assert main([*options, "--seeds", "4", "--total-steps", "256"]) == 0
    row = json.loads((tmp_path / "few_vessels_4.json").read_text())["rows"][0]
    assert row["steps"] == 256
    assert row["curves"]["navigation/success"]["step"] == [64.0, 128.0, 192.0, 256.0]
    assert row["evaluation"]["trained"]["vessels"] == 12


def test_a_shared_critic_tells_returns_by_what_other_vessels_see():
    config = Run("ppo", "MarineNavigation", SMALL).config(0, device="cpu", logger="none")
    values = {}
    for shared in (False, True):
        trainer = make_vessel_ppo(config, world=WORLD, shared=shared)
        root = trainer.env.reset()
        before = trainer.critic(root.clone())["state_value"]
        if shared:
            root["joint"][0, 38:] += 1.0  # of the other vessel, as the first sees it
        else:
            root["observation"][1] += 1.0
        values[shared] = (trainer.critic(root)["state_value"] - before)[0].abs().item()
    assert values[False] == 0.0
    assert values[True] > 1e-3
    with pytest.raises(ValueError, match="num_envs: expected a multiple of max_robots = 2, received 7"):
        make_vessel_ppo(replace(config, num_envs=7, num_steps=16), world=WORLD, shared=True)


def test_risk_of_a_run_is_stored_and_drawn(tmp_path):
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "marine-risk"]
    assert main([*options, "--seeds", "4", "--total-steps", "2560"]) == 0
    row = json.loads((tmp_path / "marine-risk_iqn_4.json").read_text())["rows"][0]
    levels = {f"worst {level:g}" for level in LEVELS if level < 1}
    assert set(row["evaluation"]) == {"trained", "scripted"} | levels
    assert row["evaluation"]["trained"]["vessels"] == 6
    assert (tmp_path / "curve_marine-risk.png").stat().st_size > 20_000
