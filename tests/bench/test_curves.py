"""Learning curves: what a run leaves, what is drawn of several seeds, and what is refused."""

import json
from dataclasses import replace

import pytest

from torchrl_perf.bench import curves
from torchrl_perf.bench.curves import main, stored, summary, thinned
from torchrl_perf.bench.curves_studies import STUDIES, WITH_EXTRAS, Run, Study
from torchrl_perf.bench.curves_studies import episodes_without_exploration as by_episodes
from torchrl_perf.trainers.run import run as running


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (100, 100), (101, 51), (1000, 100)])
def test_curves_are_thinned_to_their_last_point(count, kept):
    values = thinned([float(index) for index in range(count)])
    assert len(values) == kept
    assert values[-1] == count - 1
    assert values == sorted(values)


@pytest.mark.parametrize("name", STUDIES)
def test_the_settings_of_each_run_are_those_of_its_preset_but_for_the_changes(name):
    for run in STUDIES[name].runs.values():
        config = run.config(7, device="cpu")
        assert (config.seed, config.algorithm) == (7, run.algorithm)
        assert {key: getattr(config, key) for key in run.changes} == dict(run.changes)


def test_runs_are_stored_and_drawn_together(tmp_path, capsys):
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "marine-empty"]
    assert main([*options, "--runs", "dqn", "--seeds", "0", "--total-steps", "6400"]) == 0
    row = json.loads((tmp_path / "marine-empty_dqn_0.json").read_text())["rows"][0]
    assert (row["run"], row["seed"], row["steps"]) == ("dqn", 0, 6_400)
    assert row["evaluation"]["scripted"]["mean_return"] == pytest.approx(45.1, abs=0.5)
    assert row["evaluation"]["trained"]["vessels"] == 500
    other = {**row, "seed": 1, "curves": {key: dict(one) for key, one in row["curves"].items()}}
    (tmp_path / "marine-empty_dqn_1.json").write_text(json.dumps({"rows": [other]}))
    capsys.readouterr()
    assert main([*options, "--draw"]) == 0
    assert capsys.readouterr().out.count("trained") == 2
    assert (tmp_path / "curve_marine-empty.png").stat().st_size > 10_000
    assert [line["of"] for line in summary(stored("marine-empty", tmp_path))] == ["trained", "scripted", "trained"]


def test_an_env_of_gymnasium_is_trained_by_its_preset_and_evaluated(tmp_path, monkeypatch, capsys):
    study = Study("CartPole", {"ppo": Run("ppo", "CartPole-v1")}, {"episode/mean_return": "return"}, by_episodes)
    monkeypatch.setitem(STUDIES, "pole", study)
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "pole"]
    assert main([*options, "--seeds", "3", "--total-steps", "4096"]) == 0
    row = json.loads((tmp_path / "pole_ppo_3.json").read_text())["rows"][0]
    config = study.runs["ppo"].config(3)
    assert (config.num_envs, row["steps"]) == (8, 4096)
    assert row["evaluation"]["trained"]["episodes"] == 50
    assert 9 < row["evaluation"]["trained"]["mean_return"] < 500
    assert (tmp_path / "curve_pole.png").exists()


@pytest.mark.slow
def test_ranks_learn_a_run_of_a_study(tmp_path, monkeypatch):
    study = STUDIES["ranks"]
    changes = {**study.runs["two"].changes, "epochs": 1}
    runs = {"two": Run("ppo", "CartPole", changes, ranks=2)}
    monkeypatch.setitem(STUDIES, "few", replace(study, runs=runs))
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "few"]
    assert main([*options, "--seeds", "4", "--total-steps", "7680"]) == 0
    row = json.loads((tmp_path / "few_two_4.json").read_text())["rows"][0]
    assert (row["seed"], row["steps"]) == (4, 7_680)
    assert row["curves"]["episode/mean_return"]["step"][-1] == 7_680
    assert row["evaluation"]["trained"]["episodes"] == 50


def test_a_run_that_a_signal_stopped_is_not_stored(tmp_path, capsys, monkeypatch):
    train = running.train
    monkeypatch.setattr(running, "train", lambda *args, **options: replace(train(*args, **options), exit_code=143))
    options = ["--study", "marine-empty", "--runs", "dqn", "--seeds", "0", "--total-steps", "6400", "--device", "cpu"]
    assert main([*options, "--out", str(tmp_path), "--pictures", str(tmp_path)]) == 1
    assert "dqn, seed 0: expected a whole run, received a signal after 6400 steps" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--study", "chess"], "expected names among marine"),
        (["--study", "marine", "--runs", "ppo"], "expected names among iqn"),
        (["--draw", "--study", "marine"], "train without --draw"),
    ],
)
def test_unknown_names_and_empty_folders_are_refused(arguments, words, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path), "--pictures", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_committed_curves_have_three_seeds_of_each_run():
    committed = {path.name.split("_")[0] for path in curves.FOLDER.glob("*.json")}
    assert set(STUDIES) - set(WITH_EXTRAS) <= committed <= set(STUDIES)
    for name in committed:
        rows = stored(name, curves.FOLDER)
        # an env of Gymnasium's takes hours on a CPU: some of its runs may be missing, but none has fewer seeds
        for run in {row["run"] for row in rows} if name in WITH_EXTRAS else STUDIES[name].runs:
            assert [row["seed"] for row in rows if row["run"] == run] == [0, 1, 2], (name, run)
        assert (curves.PICTURES / f"curve_{name}.png").is_file()
