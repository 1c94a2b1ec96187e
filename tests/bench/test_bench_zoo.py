"""How the zoo is made: what is planned, what an entry holds, what a failure, a limit of time and a signal leave."""

import csv
import dataclasses
import json

import pytest

from torchrl_perf.bench import zoo
from torchrl_perf.bench.zoo import main, make_entry, zoo_table
from torchrl_perf.bench.zoo_plan import PLAN, Planned
from torchrl_perf.registry import ALGORITHMS, SYSTEMS, entry_of
from torchrl_perf.trainers import load_policy
from torchrl_perf.trainers.run import run as running

TINY = {"num_envs": 4, "num_steps": 8, "total_steps": 32 * 230, "minibatches": 2, "hidden_size": 8}
SHORT = Planned("ppo", "CartPole", 1.0, TINY)


def changed(monkeypatch, **fields):
    """Runs end as they do, and say something else in these fields of the result."""
    train = running.train
    monkeypatch.setattr(running, "train", lambda *args, **more: dataclasses.replace(train(*args, **more), **fields))


def test_every_algorithm_and_each_of_the_five_systems_is_planned():
    algorithms = [planned.algorithm for planned in PLAN.values()]
    assert set(ALGORITHMS) <= set(algorithms)
    assert len([name for name in algorithms if name in SYSTEMS]) == 5
    assert len({name.partition("-")[0] for name in algorithms if name in SYSTEMS}) == 5
    assert len([name for name in algorithms if name == "ppo"]) >= 2
    assert len([name for name in algorithms if name == "dqn"]) >= 2


@pytest.mark.parametrize("name", PLAN)
def test_planned_settings_are_taken(name):
    planned = PLAN[name]
    config = entry_of(planned.algorithm).load("config")(env=planned.task, **planned.changes)
    assert {key: getattr(config, key) for key in planned.changes} == dict(planned.changes)
    assert planned.seconds > 0


def test_an_entry_is_trained_evaluated_and_thinned(tmp_path, capsys):
    entry = make_entry(SHORT, tmp_path / "out", "cpu")
    assert entry.name == "ppo-CartPole"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ppo-CartPole"]  # nothing else is left
    policy = load_policy(entry.path)
    assert policy.steps == entry.card["steps"] == TINY["total_steps"]
    assert policy.config.run_dir == "runs"
    found = entry.card["evaluation"]
    assert (found["episodes"], found["seed"], found["device"]) == (100, 20_000, "cpu")
    assert 8 < found["mean_return"] <= 500
    with (entry.path / "progress.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert 50 < len(rows) <= 100
    assert list(rows[0]) == ["step", "wall_time", "episode/mean_return", "episode/mean_length", "episode/count"]
    assert [int(row["step"]) for row in (rows[0], rows[-1])][1] == TINY["total_steps"]
    text = zoo_table(tmp_path / "out")
    line = next(line for line in text.splitlines() if line.startswith("| `ppo-CartPole` |"))
    assert f"| {TINY['total_steps']:,} | a CPU, " in line
    assert f"{found['mean_return']:.2f} ± {found['return_deviation']:.2f} (100) |" in line
    again = make_entry(SHORT, tmp_path / "out", "cpu")  # takes its place
    assert again.card["evaluation"] == found


def test_the_figure_of_a_system_whose_returns_say_nothing_is_kept(tmp_path, monkeypatch):
    changed(monkeypatch, evaluated=0.5)
    entry = make_entry(SHORT, tmp_path, "cpu")
    assert entry.card["measure"] == {"name": "eval/mean_return", "value": 0.5}
    assert "; `eval/mean_return` 0.500 |" in zoo_table(tmp_path)


class TestAll:
    @pytest.fixture
    def plan(self, monkeypatch):
        """Three entries, the second of which cannot be made; each takes no time but what its plan says."""
        made = [Planned("ppo", "CartPole", 10.0), Planned("dqn", "CartPole", 20.0), Planned("pqn", "CartPole", 5.0)]
        monkeypatch.setattr(zoo, "PLAN", {planned.name: planned for planned in made})
        asked = []

        def stub(planned, out, device):
            asked.append((planned.name, device))
            if planned.algorithm == "dqn":
                raise RuntimeError("no memory")
            folder = out / planned.name
            folder.mkdir(parents=True)
            evaluation = {"mean_return": 1.0, "return_deviation": 0.5, "episodes": 100}
            (folder / "entry.json").write_text(json.dumps({"seconds": 1.0, "evaluation": evaluation}))
            return zoo.zoo_entries(out)[planned.name]

        monkeypatch.setattr(zoo, "make_entry", stub)
        return asked

    def test_what_was_done_stays_when_another_fails(self, plan, tmp_path, capsys):
        assert main(["--out", str(tmp_path), "--device", "cpu"]) == 1
        assert plan == [("ppo-CartPole", "cpu"), ("dqn-CartPole", "cpu"), ("pqn-CartPole", "cpu")]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ppo-CartPole", "pqn-CartPole"]
        said = capsys.readouterr()
        assert "ppo-CartPole: 1.0 s, 0 KiB, 1.00 ± 0.50 of 100 episodes" in said.out
        assert "failed: --only dqn-CartPole" in said.out
        assert "dqn-CartPole: RuntimeError: no memory" in said.err

    def test_an_entry_that_would_not_end_in_time_is_left_out(self, plan, tmp_path, capsys):
        assert main(["--out", str(tmp_path), "--budget", "15"]) == 0
        assert [name for name, _ in plan] == ["ppo-CartPole", "pqn-CartPole"]
        assert "would not have ended in time: --only dqn-CartPole" in capsys.readouterr().out

    def test_a_slower_machine_shows_in_the_first_entries(self, plan, tmp_path, monkeypatch):
        monkeypatch.setattr(zoo.Stopwatch, "seconds", property(lambda watch: 100.0 if plan else 0.0))
        assert main(["--out", str(tmp_path), "--budget", "140"]) == 0
        assert [name for name, _ in plan] == ["ppo-CartPole"]  # 5 s of pqn would be 50

    def test_only_some(self, plan, tmp_path):
        assert main(["--out", str(tmp_path), "--only", "pqn-CartPole"]) == 0
        assert [name for name, _ in plan] == ["pqn-CartPole"]

    def test_an_unknown_name(self, plan, tmp_path, capsys):
        assert main(["--out", str(tmp_path), "--only", "ppo-cartpole-0"]) == 2
        assert "received ppo-cartpole-0. Remedy: ppo-CartPole." in capsys.readouterr().err
        assert not plan


def test_a_run_that_a_signal_stopped_is_no_entry(tmp_path, capsys, monkeypatch):
    changed(monkeypatch, exit_code=143)
    monkeypatch.setattr(zoo, "PLAN", {SHORT.name: SHORT._replace(changes={**TINY, "total_steps": 64})})
    assert main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "ppo-CartPole: expected a whole run, received a signal after 64 steps" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
