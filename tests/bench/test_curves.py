"""Learning curves: what a run leaves, what is drawn of several seeds, and what is refused."""

import itertools
import json
import math
from dataclasses import replace

import pytest

from torchrl_perf.bench import curves
from torchrl_perf.bench.curves import main, stored, summary, thinned
from torchrl_perf.bench.curves_dynamics import BOUNDS
from torchrl_perf.bench.curves_seeds import over_seeds, read_over_seeds, table_of, write_over_seeds
from torchrl_perf.bench.curves_studies import PREPARED, STUDIES, WITH_EXTRAS, Run, Study
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
    said = capsys.readouterr().out
    assert said.count("trained") == 3  # a line of each seed, and one of both
    assert "settings were chosen on: not recorded" in said
    assert json.loads((tmp_path / "over_seeds" / "marine-empty.json").read_text())["shown"] == {"dqn": [0, 1]}
    assert (tmp_path / "curve_marine-empty.png").stat().st_size > 10_000
    assert [line["of"] for line in summary(stored("marine-empty", tmp_path))] == ["trained", "scripted", "trained"]


def test_an_env_of_gymnasium_is_trained_by_its_preset_and_evaluated(tmp_path, monkeypatch, capsys):
    study = Study(
        "CartPole", {"ppo": Run("ppo", "CartPole-v1")}, {"episode/mean_return": "return"}, by_episodes, "none"
    )
    monkeypatch.setitem(STUDIES, "pole", study)
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "pole"]
    assert main([*options, "--seeds", "3", "--total-steps", "4096"]) == 0
    row = json.loads((tmp_path / "pole_ppo_3.json").read_text())["rows"][0]
    config = study.runs["ppo"].config(3)
    assert (config.num_envs, row["steps"]) == (8, 4096)
    assert row["evaluation"]["trained"]["episodes"] == 50
    assert 9 < row["evaluation"]["trained"]["mean_return"] < 500
    assert (tmp_path / "curve_pole.png").exists()


@pytest.mark.parametrize("task", ["cartpole", "acrobot", "pendulum"])
def test_a_task_of_the_package_is_judged_in_gymnasiums_env(task, tmp_path):
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", task, "--runs", "ppo"]
    steps = 98_304 if task == "acrobot" else 32_768  # so that episodes have ended
    assert main([*options, "--seeds", "4", "--total-steps", str(steps)]) == 0
    found = json.loads((tmp_path / f"{task}_ppo_4.json").read_text())["rows"][0]["evaluation"]["trained"]
    least, most = {"cartpole": (8, 500), "acrobot": (-500, -60), "pendulum": (-1800, -100)}[task]
    assert found["episodes"] == 50
    assert least <= found["mean_return"] <= most


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
    assert set(STUDIES) - {*WITH_EXTRAS, *PREPARED} <= committed <= set(STUDIES)
    for name in committed:
        rows = stored(name, curves.FOLDER)
        # what is made by name alone takes long: some of its runs may be missing, but none has fewer seeds
        # a study of many fields has whole fields: all runs of one, or none, but for those at equal effort
        own = {row["run"] for row in rows}
        if STUDIES[name].together:
            fields = {run.partition("-")[0] for run in own}
            whole = {run for run in STUDIES[name].runs if run.partition("-")[0] in fields}
            assert {run for run in whole if run.partition("-")[2] not in BOUNDS} <= own <= whole
        for run in own if name in (*WITH_EXTRAS, *PREPARED) or STUDIES[name].together else STUDIES[name].runs:
            seeds = [row["seed"] for row in rows if row["run"] == run]
            assert seeds in ([0, 1, 2], list(STUDIES[name].seeds)), (name, run)
        assert (curves.PICTURES / f"curve_{name}.png").is_file()


@pytest.mark.parametrize("name", sorted({path.name.split("_")[0] for path in curves.FOLDER.glob("*.json")}))
def test_committed_figures_over_seeds_are_those_of_the_committed_runs(name, tmp_path):
    study, rows = STUDIES[name], stored(name, curves.FOLDER)
    write_over_seeds(name, study.title, study.chosen_on, rows, tmp_path)
    assert read_over_seeds(name, tmp_path) == read_over_seeds(name, curves.FOLDER)


def test_each_study_says_on_which_seeds_it_was_chosen_and_shows_three_others():
    for study in STUDIES.values():
        words = study.chosen_on.replace(" to ", " ").split()
        assert words
        assert len(study.seeds) == len(set(study.seeds)) >= 3
        assert not set(study.seeds) & {int(word) for word in words if word.isdigit()}


def test_a_run_with_all_seeds_of_its_study_shows_those_alone(tmp_path):
    study = STUDIES["durotaxis"]

    def seeds():
        return [row["seed"] for row in stored("durotaxis", tmp_path)]

    def write(*numbers):
        for seed in numbers:
            (tmp_path / f"durotaxis_ppo_{seed}.json").write_text(json.dumps({"rows": [{"run": "ppo", "seed": seed}]}))

    write(0, 1, 2, *study.seeds[:2])
    assert seeds() == sorted([0, 1, 2, *study.seeds[:2]])
    write(study.seeds[2])
    assert seeds() == sorted(study.seeds)


def test_figures_over_seeds_have_the_interquartile_mean_and_its_interval():
    def row(run, seed, value, other=None):
        return {"run": run, "seed": seed, "evaluation": {"trained": {"share": value, "other": other}}}

    lines = over_seeds(
        [row("a", 5, 0.0), row("a", 6, 12.0, 1.0), row("a", 9, 3.0), row("b", 5, 4.0), row("c", 5, None)]
    )
    assert [(line["run"], line["figure"]) for line in lines] == [("a", "share"), ("a", "other"), ("b", "share")]
    # a quarter of three values is cut off at either end: 0 and 12 count a twelfth each, 3 a third
    expected = {"run": "a", "of": "trained", "figure": "share", "seeds": [5, 6, 9], "values": [0.0, 12.0, 3.0]}
    assert lines[0] == expected | {"middle": pytest.approx(4.0), "low": 0.0, "high": 12.0}
    assert (lines[1]["seeds"], lines[1]["values"]) == ([6], [1.0])
    assert (lines[2]["middle"], math.isnan(lines[2]["low"]), math.isnan(lines[2]["high"])) == (4.0, True, True)
    table = table_of(lines)
    assert table[0] == {"run": "a", "of": "trained", "seeds": 3, "share": "4 [0, 12]", "other": "1"}
    assert table[1] == {"run": "b", "of": "trained", "seeds": 1, "share": "4"}


def test_an_interval_is_near_that_of_all_samples_of_four_seeds():
    rows = [{"run": "a", "seed": seed, "evaluation": {"trained": {"x": 2.0**seed}}} for seed in range(4)]
    (line,) = over_seeds(rows)
    means = sorted(sum(sorted(chosen)[1:3]) / 2 for chosen in itertools.product((1.0, 2.0, 4.0, 8.0), repeat=4))
    assert line["middle"] == 3.0
    assert means[int(0.02 * 256)] <= line["low"] <= means[int(0.03 * 256)]
    assert means[int(0.97 * 256)] <= line["high"] <= means[int(0.98 * 256)]


def test_what_needs_no_training_is_a_line_across():
    study = replace(STUDIES["marine"], beside=("scripted", "other"))
    rows = [{"evaluation": {"trained": {}, "scripted": {"success": share, "mean_time": 3.0}}} for share in (0.5, 0.7)]
    assert curves._across(study, rows, "navigation/success") == pytest.approx({"scripted": 0.6})
    assert curves._across(study, rows, "navigation/collision") == {}
    rows[1]["evaluation"]["scripted"]["success"] = None  # not finite: JSON has no NaN
    assert curves._across(study, rows, "navigation/success") == {}
