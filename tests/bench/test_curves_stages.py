"""The study of a colony's stages: its runs end in one task, the figures of known rules, and its picture."""

import json
import math
from dataclasses import replace

import pytest

from torchrl_perf.bench import curves_stages
from torchrl_perf.bench.curves import FOLDER, PICTURES, main, stored
from torchrl_perf.bench.curves_studies import STUDIES
from torchrl_perf.envs.durotaxis import ColonyCurriculum
from torchrl_perf.systems.durotaxis.stages import curriculum_of, last_stage

STUDY = STUDIES["durotaxis-stages"]
SIZES = {"durotaxis-stages": curves_stages.SMALL, "durotaxis-stages-full": curves_stages.FULL}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(curves_stages, "COLONIES", 16)


@pytest.mark.parametrize("study", SIZES)
def test_all_runs_end_in_the_same_task_and_differ_before(study):
    few = SIZES[study].nodes[-1]
    configs = {name: run.config(0) for name, run in STUDIES[study].runs.items()}
    goals = {name: last_stage(config).goal or (curves_stages.FAR,) for name, config in configs.items()}
    nodes = {name: last_stage(config).critical_nodes for name, config in configs.items()}
    assert set(goals.values()) == {(curves_stages.FAR,)}
    assert set(nodes.values()) == {(few,)}
    stages = {name: curriculum_of(config) for name, config in configs.items()}
    assert stages["none"] == ColonyCurriculum(critical_nodes=(few,))
    assert stages["goals"].goal[0] < curves_stages.FAR
    assert stages["nodes"].critical_nodes[0] > few
    assert stages["both"].goal == stages["goals"].goal
    assert stages["both"].critical_nodes == stages["nodes"].critical_nodes
    assert stages["delete-only"].delete_only == (True, False)


def test_rules_of_known_outcome_and_a_policy_that_has_not_learnt(tmp_path):
    run = STUDY.runs["none"]
    trainer = run.trainer(replace(run.config(0, device="cpu"), num_envs=4, run_dir=str(tmp_path)))
    found = curves_stages.taught(trainer, "none")
    trainer.close()
    # half of the nodes deleted keeps six of them, whose longest steps of 12 to 14 come to 95 from 10 or less
    tasks = curves_stages.tasks_of(run.config(0))
    assert list(tasks.values()) == [(0.4, 40), (0.95, 40), (0.4, 20), (0.95, 20)]
    assert [found["half"][task] for task in tasks] == [1.0] * len(tasks)
    assert found["half"]["success"] == 1.0
    assert found["half"]["steps"] == pytest.approx(7, abs=1)
    assert found["half"]["deleted"] == pytest.approx(0.5)
    # 15 / (1 + (.5 / 1.5)^2) + .5 at a stiffness of 1.5
    assert found["half"]["stride"] == pytest.approx(14.0, abs=0.02)
    assert found["random"]["success"] == found["trained"]["success"] == 0.0
    # those that delete more live longer, and count more often
    assert 0.25 < found["random"]["deleted"] < 0.4
    assert curves_stages.taught(trainer, "none")["random"] == found["random"]


def test_when_the_whole_task_was_learnt():
    curve = {"step": [100.0, 200.0, 300.0], "value": [2.0, 8.0, 14.0]}
    assert curves_stages.learnt_after(curve) == pytest.approx(200 + 100 / 3)
    assert curves_stages.learnt_after({"step": [100.0], "value": [20.0]}) == pytest.approx(50)
    assert math.isnan(curves_stages.learnt_after({"step": [100.0], "value": [9.9]}))


def test_a_run_is_stored_and_the_picture_drawn(tmp_path, capsys):
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "durotaxis-stages"]
    assert main([*options, "--runs", "both", "--seeds", "5", "--total-steps", "2048"]) == 0
    row = json.loads((tmp_path / "durotaxis-stages_both_5.json").read_text())["rows"][0]
    assert row["steps"] == 2_048
    assert set(curves_stages.tasks_of(STUDY.runs["both"].config(5))) < set(row["evaluation"]["trained"])
    assert row["curves"]["eval/mean_return"]["step"] == [2_048.0]
    assert (tmp_path / "curve_durotaxis-stages.png").stat().st_size > 20_000
    assert "half" in capsys.readouterr().out


def test_the_table_in_the_documentation_is_that_of_the_committed_runs():
    table = curves_stages.stages_table(stored("durotaxis-stages", FOLDER))
    assert table.strip() in (PICTURES.parent / "systems.md").read_text()
