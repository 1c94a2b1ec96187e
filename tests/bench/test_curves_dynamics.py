"""Samples until a field is known: what a run leaves, files of all seeds of a run, and the picture of several fields."""

import json

import pytest

from torchrl_perf.bench.curves import main, stored
from torchrl_perf.bench.curves_dynamics import BOUNDS, RULES, STATED, draw_fields
from torchrl_perf.bench.curves_studies import STUDIES
from torchrl_perf.bench.readme_dynamics import effort_table, samples_table


def run(tmp_path, *arguments):
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "active-dynamics"]
    return main([*options, *arguments])


def test_all_seeds_of_a_run_are_in_one_file(tmp_path, capsys):
    seeds = ("--seeds", "6", "5", "--total-steps", "160", "--runs", "duffing-random")
    assert run(tmp_path, *seeds) == 0
    path = tmp_path / "active-dynamics_duffing-random.json"
    first = json.loads(path.read_text())["rows"]
    assert [row["seed"] for row in first] == [5, 6]
    assert first[0]["curves"]["error"]["step"] == [80.0, 160.0]
    figures = first[0]["evaluation"]["trained"]
    assert figures["error"] == first[0]["curves"]["error"]["value"][-1] > STATED["duffing"]
    assert (figures["samples"], figures["reached"]) == (160.0, 0.0)
    # uniform inputs of .5 at most
    assert figures["effort"] == pytest.approx(0.25 / 3, rel=0.2)
    # a seed that is run again takes the place of its row
    assert run(tmp_path, "--seeds", "5", "--total-steps", "80", "--runs", "duffing-random") == 0
    again = json.loads(path.read_text())["rows"]
    assert [(row["seed"], row["steps"]) for row in again] == [(5, 80), (6, 160)]
    assert len(stored("active-dynamics", tmp_path)) == 2
    assert (tmp_path / "over_seeds" / "active-dynamics.json").is_file()
    assert (tmp_path / "curve_active-dynamics.png").stat().st_size > 10_000
    assert "chosen on: seeds 100 and 101" in capsys.readouterr().out


def test_a_panel_for_each_field_that_has_runs(tmp_path):
    def row(name, seed, values):
        return {"run": name, "seed": seed, "curves": {"error": {"step": [1.0, 2.0], "value": values}}}

    rows = [row(f"duffing-{rule}", seed, [0.9, 0.1 + 0.1 * seed]) for rule in ("random", "rnd") for seed in (0, 1)]
    one, four = tmp_path / "one.png", tmp_path / "four.png"
    draw_fields("One", rows, one)
    others = [row(f"{field}-random", 0, [1.0, 0.5]) for field in ("snowman", "van_der_pol", "limit_cycle")]
    draw_fields("Four", [*rows, *others], four)
    assert one.stat().st_size < four.stat().st_size


def test_rules_differ_in_what_inputs_are_for_and_random_ones_have_twice_the_samples():
    runs = STUDIES["active-dynamics"].runs
    assert list(runs) == [f"{field}-{rule}" for field in STATED for rule in RULES]
    planned = runs["duffing-embedding"].config(0)
    for rule in RULES:
        config = runs[f"duffing-{rule}"].config(0)
        assert config.total_steps == planned.total_steps * (2 if config.inputs == "random" else 1)
        assert (config.start, config.updates) == (planned.start, 10)
        assert config.action_max == pytest.approx(BOUNDS.get(rule, 1.0) * planned.action_max)


def test_rules_at_equal_effort_stand_beside_each_other(tmp_path):
    def keep_all(rules):
        for rule in rules:
            figures = {"samples": 100.0, "reached": 1.0, "effort": 0.2, "error": 0.0}
            rows = [{"run": f"duffing-{rule}", "seed": seed, "evaluation": {"trained": figures}} for seed in range(3)]
            (tmp_path / f"active-dynamics_duffing-{rule}.json").write_text(json.dumps({"rows": rows}))

    keep_all(RULES.keys() - {"strong_held"})
    assert "duffing" not in effort_table(tmp_path)
    keep_all(["strong_held"])
    assert "duffing" in effort_table(tmp_path)
    assert "0.20, 0.20, 0.20" in effort_table(tmp_path)
    assert "strong" not in samples_table(tmp_path)
