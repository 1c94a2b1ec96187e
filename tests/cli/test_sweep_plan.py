"""What a sweep runs and shows: spaces, draws, commands, rows and the table; none of it needs Ray."""

import json
import math
import random

import pytest

from torchrl_perf import cli
from torchrl_perf.cli import sweep
from torchrl_perf.cli.sweep_plan import Run, Space, runs_of, space_of
from torchrl_perf.cli.sweep_table import CUT, row_of, rows_since, run_folder, table, write_rows
from torchrl_perf.cli.train import parse


def test_lists_and_ranges_are_read():
    assert space_of("epochs=4,8") == Space("epochs", values=("4", "8"))
    found = space_of("learning-rate = 1e-4..1e-2:log")
    assert (found.name, found.low, found.high, found.log, found.values) == ("learning_rate", 1e-4, 1e-2, True, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("=1,2", "received no name"),
        ("gamma", "received no values"),
        ("gamma=a..b", "no numbers"),
        ("gamma=0.9..0.8", "the first number is to be the smaller one"),
        ("gamma=0..1:log", "above 0 with log"),
        ("gamma=0..1:ln", "the first number"),
    ],
)
def test_other_texts_are_refused(text, words):
    with pytest.raises(ValueError, match="Remedy: --set") as error:
        space_of(text)
    assert words in str(error.value)


def test_draws_lie_in_their_range_and_are_even_on_its_scale():
    numbers = random.Random(1)
    logs = [math.log10(float(Space("x", low=1e-4, high=1e-2, log=True).draw(numbers))) for _ in range(2000)]
    assert -4 <= min(logs) < max(logs) <= -2
    assert sum(logs) / 2000 == pytest.approx(-3, abs=0.05)
    plain = [float(Space("x", low=2.0, high=4.0).draw(numbers)) for _ in range(2000)]
    assert 2 <= min(plain) < max(plain) <= 4
    assert sum(plain) / 2000 == pytest.approx(3, abs=0.05)


def test_every_combination_runs_with_every_seed_and_seeds_share_the_draws():
    spaces = [space_of("epochs=4,8"), space_of("learning_rate=1e-4..1e-2:log")]
    runs = runs_of("ppo", spaces, ["--env", "CartPole"], seeds=3, samples=2, folder="s")
    assert len(runs) == 2 * 2 * 3
    assert [run.seed for run in runs[:3]] == [0, 1, 2]
    assert len({run.settings["learning_rate"] for run in runs[:3]}) == 1
    assert len({run.settings["learning_rate"] for run in runs}) == 4
    assert runs == runs_of("ppo", spaces, ["--env", "CartPole"], seeds=3, samples=2, folder="s")
    assert len({run.place for run in runs}) == len(runs)
    assert len(runs_of("ppo", spaces[:1], [], seeds=1, samples=9, folder="s")) == 2, "lists are run once"
    assert Run(**{**runs[0].as_dict(), "given": tuple(runs[0].as_dict()["given"])}) == runs[0]
    assert json.loads(json.dumps(runs[0].as_dict())) == runs[0].as_dict()


def test_options_are_those_of_train():
    settings = {"learning_rate": "0.003", "normalize_observations": "true", "anneal_learning_rate": "False"}
    run = Run("ppo", {**settings, "hidden_sizes": "32 16"}, 4, ("--env", "CartPole"), "s")
    config = parse("ppo", run.options)[0].settings
    assert (config.learning_rate, config.normalize_observations, config.anneal_learning_rate) == (0.003, True, False)
    assert (config.hidden_sizes, config.seed, config.env, config.logger) == ((32, 16), 4, "CartPole", "csv")
    assert config.run_dir == str(run.place)


def begun(run, rows, state="finished"):
    """A folder as a run leaves it."""
    folder = run.place / "ppo-CartPole-0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "status.json").write_text(json.dumps({"state": state}))
    lines = ["step,wall_time,episode/mean_return", *(f"{step},1.0,{value}" for step, value in rows)]
    (folder / "progress.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_rows_are_read_and_a_half_written_one_is_not(tmp_path):
    run = Run("ppo", {}, 0, (), str(tmp_path))
    assert run_folder(run) is None
    assert rows_since(None, 0) == []
    folder = begun(run, [(100, 20.0), (200, ""), (300, 40.0)])
    with (folder / "progress.csv").open("a") as file:
        file.write("400,2.0,5")
    assert run_folder(run) == folder
    assert [row["step"] for row in rows_since(folder, 1)] == [200, 300]
    assert "episode/mean_return" not in rows_since(folder, 1)[0]
    found = row_of(run, "episode/mean_return")
    assert (found["env_steps"], found["last"], found["best"], found["state"]) == (300, 40.0, 40.0, "finished")
    assert row_of(run, "episode/mean_return", lowest=True)["best"] == 20.0


def test_a_run_that_was_cut_says_so(tmp_path):
    run, other = (Run("ppo", {}, seed, (), str(tmp_path)) for seed in (0, 1))
    begun(run, [(100, 20.0)], state="stopped")
    (run.place / CUT).write_text("{}")
    assert row_of(run, "episode/mean_return")["state"] == "cut"
    assert row_of(other, "episode/mean_return")["state"] == "not begun"


def test_the_table_has_settings_over_seeds_and_the_best_first(tmp_path):
    rows = [
        {"lr": lr, "seed": seed, "env_steps": steps, "last": last, "folder": "a,b"}
        for lr, seed, steps, last in (
            *(("1e-3", 0, 100, 10.0), ("1e-3", 1, 200, 20.0), ("1e-2", 0, 200, 40.0)),
            *(("1e-2", 1, 200, math.nan), ("1e-1", 0, 50, math.nan)),
        )
    ]
    lines = [line.split() for line in table(rows, ["lr"]).splitlines()]
    assert lines[1:] == [
        ["1e-2", "2", "200", "40", "40", "40"],
        ["1e-3", "2", "200", "15", "10", "20"],
        ["1e-1", "1", "50", "nan", "nan", "nan"],
    ]
    assert table(rows[:3], ["lr"], lowest=True).splitlines()[1].startswith("1e-3")
    write_rows(rows, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().splitlines()[1] == '1e-3,0,100,10,"a,b"'


def test_without_ray_it_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["sweep", "ppo", "--dir", str(tmp_path)]) == 1
    assert "pip install 'torchrl_perf[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--set", "gamma=0.9", "--set", "gamma=0.8"], "expected each name once, received gamma"),
        (["--seeds", "0"], "--seeds: expected at least 1"),
        (["--set", "gamma=7"], "gamma: expected a number in [0, 1]"),
    ],
)
def test_what_cannot_be_run_is_refused_before_ray_starts(monkeypatch, capsys, tmp_path, words, told):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: object())
    assert cli.main(["sweep", "ppo", *words, "--dir", str(tmp_path), "--", "--env", "CartPole"]) == 1
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_another_sweep_in_the_folder_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sweep, "_tuned", lambda *_: 0)
    words = ["sweep", "ppo", "--dir", str(tmp_path), "--set", "gamma=0.9,0.99"]
    assert cli.main([*words, "--", "--env", "CartPole"]) == 0
    assert "2 runs, episode/mean_return" in capsys.readouterr().out
    assert cli.main([*words, "--", "--env", "CartPole"]) == 0, "the same one goes on"
    assert cli.main([*words, "--", "--env", "Acrobot"]) == 1
    assert "expected no sweep there, or this one" in capsys.readouterr().err
