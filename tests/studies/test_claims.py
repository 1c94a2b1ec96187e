"""``torchrl-perf bench claims``: outputs first, then times, verdicts, rows that are kept, the page."""

import json
import math
import time

import numpy as np
import pytest
import torch

from studies import claims, page
from studies.counts import counts
from studies.sitting import (
    CONFIRMED,
    NOT_HERE,
    NOT_REPRODUCED,
    PARTLY,
    REFUSED,
    Sitting,
    Variant,
    busy_share,
    covered,
    difference,
    in_turns,
    judge,
    ratio,
    times_text,
)
from torchrl_perf.bench import claims as claims_command
from torchrl_perf.cli import main

CPU = torch.device("cpu")


def quick(system="durotaxis"):
    return Sitting(system, CPU, quick=True)


class TestSitting:
    """Comparison, timing and verdicts."""

    def test_equal_outputs_are_timed_and_the_first_is_what_the_ratio_is_to(self):
        sitting = quick()
        rows = sitting.compare(
            "e", "c", [Variant("before", lambda: torch.ones(2)), Variant("after", lambda: torch.ones(2))]
        )
        assert list(rows) == ["before", "after"]
        assert rows["before"]["ratio"] == 1.0
        assert all(row["ok"] and row["p10_us"] <= row["us"] <= row["p90_us"] for row in rows.values())
        assert sitting.ratio_of("e", "before", "after") == [rows["before"]["us"] / rows["after"]["us"]]

    def test_a_wrong_after_is_refused_and_so_is_its_claim(self):
        sitting, called = quick(), []
        wrong = Variant("after", lambda: called.append(1), lambda: torch.zeros(2))
        rows = sitting.compare("e", "c", [Variant("before", lambda: torch.ones(2)), wrong], tolerance=0.5)
        assert list(rows) == ["before"]
        assert called == []  # never timed
        (refused,) = [row for row in sitting.rows if row["variant"] == "after"]
        assert refused["ok"] is False
        assert refused["off_by"] == 1.0
        assert "us" not in refused
        assert sitting.verdict("e", "it is faster", "", CONFIRMED)["verdict"] == REFUSED
        assert sitting.verdict("other", "it is faster", "", CONFIRMED)["verdict"] == CONFIRMED

    def test_a_wrong_before_leaves_no_ratio(self):
        sitting = quick()
        rows = sitting.compare(
            "e", "c", [Variant("a", lambda: torch.full((1,), math.inf) - math.inf), Variant("b", lambda: torch.ones(1))]
        )
        assert list(rows) == ["a"]  # the first is what the others are compared with

    def test_scale_and_uncompared_variants(self):
        sitting = quick()
        rows = sitting.compare(
            "e", "c", [Variant("a", lambda: torch.ones(1), scale=1000.0), Variant("b", lambda: None, compared=False)]
        )
        assert rows["a"]["scaled_by"] == 1000.0
        assert "off_by" not in rows["b"]
        assert rows["b"]["ratio"] > 10

    def test_rows_are_saved_as_they_come(self):
        sitting, seen = quick(), []
        sitting.save = lambda: seen.append(len(sitting.rows) + len(sitting.verdicts))
        sitting.add("e", "c", "v")
        sitting.verdict("e", "claim", "", CONFIRMED)
        assert seen == [1, 2]


def test_difference_knows_shapes_and_nan():
    one = torch.tensor([1.0, math.nan, math.inf])
    assert difference([one], [one]) == 0.0
    assert difference([one], [torch.tensor([1.0, 2.0, math.inf])]) == math.inf
    assert difference([one[:1]], [one]) == math.inf
    assert difference([], [one]) == math.inf
    assert difference([torch.tensor([1.5])], [torch.tensor([1.0])]) == 0.5
    assert difference([torch.empty(0)], [torch.empty(0)]) == 0.0


def test_turns_alternate():
    order = []
    first, second = (lambda: order.append("a")), (lambda: order.append("b"))
    seconds = in_turns([first, second], CPU, quick=True)
    assert [len(part) for part in seconds] == [len(seconds[0])] * 2
    tail = "".join(order)
    assert "ab" in tail
    assert "ba" in tail


def test_ratio_is_taken_turn_by_turn():
    found = ratio(np.array([2.0, 4.0, 8.0]), np.array([1.0, 2.0, 4.0]))
    assert (found["ratio"], found["ratio_p10"], found["ratio_p90"]) == (2.0, 2.0, 2.0)
    assert found["spread"] == "2 to 2"


@pytest.mark.parametrize(
    ("value", "word"),
    [(2.0, CONFIRMED), (1.5, PARTLY), (1.0, NOT_REPRODUCED), (None, NOT_HERE), ([], NOT_HERE), ([3.0, 1.2], PARTLY)],
)
def test_judge(value, word):
    assert judge(value, 2.0, 1.1) == word


def test_times_text():
    assert times_text([]) == ""
    assert times_text([2.0]) == "2x"
    assert times_text([3.0, 1.25]) == "1.25x to 3x"


def test_counts_see_what_goes_to_the_host():
    x = torch.ones(3)

    def call():
        return [x[0].item(), x.cpu().numpy(), x.tolist(), float(x[0]), torch.tensor([1.0]), x.to("cpu")]

    found = counts(call, CPU)
    assert found["reads"] == 4
    assert found["uploads"] == 2
    assert found["operations"] > 0
    assert counts(lambda: x + 1, CPU) == {"reads": 0, "uploads": 0, "operations": 1, "bytes": 12}
    assert counts(lambda: x[1:], CPU)["bytes"] == 0  # a view is not new memory


class TestCommand:
    """The command line and its files."""

    def test_one_experiment_writes_its_rows_and_verdicts(self, tmp_path, capsys):
        command = ["bench", "claims", "--quick", "--device", "cpu", "--out", str(tmp_path)]
        assert main([*command, "--system", "durotaxis", "--only", "rewards"]) == 0
        result = json.loads((tmp_path / "durotaxis_cpu.json").read_text(encoding="utf-8"))
        assert {"cpu", "packages"} <= set(result["machine"])
        assert {row["experiment"] for row in result["rows"]} == {"rewards"}
        assert any(row.get("part") == "verdict" for row in result["rows"])
        assert "dict from a template" in capsys.readouterr().out
        # rows of other experiments on the same machine are kept, those of the same one replaced
        assert main([*command, "--system", "durotaxis", "--only", "entropy"]) == 0
        rows = json.loads((tmp_path / "durotaxis_cpu.json").read_text(encoding="utf-8"))["rows"]
        assert {row["experiment"] for row in rows} == {"rewards", "entropy", "divergence"}
        assert main([*command, "--system", "durotaxis", "--only", "entropy"]) == 0
        again = json.loads((tmp_path / "durotaxis_cpu.json").read_text(encoding="utf-8"))["rows"]
        assert len(again) == len(rows)

    def test_rows_of_another_machine_are_not_kept(self, tmp_path):
        path = tmp_path / "durotaxis_cpu.json"
        path.write_text(json.dumps({"machine": {"cpu": "another"}, "rows": [{"experiment": "rewards"}]}))
        assert claims.kept_rows(path, set()) == []
        assert claims.kept_rows(tmp_path / "none.json", set()) == []

    def test_unknown_names_are_refused(self, capsys):
        assert main(["bench", "claims", "--system", "009"]) == 2
        assert main(["bench", "claims", "--system", "durotaxis", "--only", "sleep"]) == 2
        text = capsys.readouterr().err
        assert "received 009" in text
        assert "received sleep" in text

    def test_a_failing_experiment_leaves_the_others(self, capsys):
        def failing(sitting):
            raise RuntimeError("no colony")

        sitting = quick()
        claims.run(sitting, {"bad": failing, "good": lambda sitting: sitting.add("good", "c", "v")})
        assert [row["experiment"] for row in sitting.rows] == ["bad", "good"]
        assert sitting.rows[0]["ok"] is False
        assert "no colony" in sitting.rows[0]["note"]
        capsys.readouterr()

    def test_quick_writes_nothing_unasked(self, monkeypatch):
        monkeypatch.setattr(claims, "write_results", lambda *args: pytest.fail("written"))
        assert claims.main(["--quick", "--device", "cpu", "--system", "durotaxis", "--only", "rewards"]) == 0

    def test_every_system_has_its_experiments(self):
        assert list(claims.SYSTEMS) == ["active_dynamics", "durotaxis", "fuel_breaks", "options_market", "marine"]
        assert list(claims.experiments("durotaxis")) == [
            *("deletion", "rewards", "entropy", "advantages"),
            *("overall", "vector", "update"),
        ]
        assert list(claims.experiments("marine")) == [
            *("same", "transfers", "latency", "experience", "ddp"),
            *("environment", "end-to-end", "utilisation", "replay", "precision"),
        ]


class TestPages:
    """docs/claims.md, docs/claims_cpu.md and studies/tables/."""

    def test_verdicts_and_rows_are_made_from_the_files(self, tmp_path):
        sitting = quick()
        sitting.compare("deletion", "N=1", [Variant("a", lambda: torch.ones(1)), Variant("b", lambda: torch.ones(1))])
        sitting.verdict("deletion", "it is faster", "1.0x", PARTLY)
        claims.write_results("durotaxis_cpu", [*sitting.rows, *sitting.verdicts], tmp_path)
        text = page.verdicts("_cpu", tmp_path)
        assert "| it is faster | 1.0x" in text
        assert "studies/tables/durotaxis_cpu.md" in text
        assert "Not measured yet." in text  # marine
        rows = page.tables("durotaxis", "_cpu", tmp_path)
        assert "**deletion**" in rows
        assert "it is faster" not in rows

    @pytest.mark.parametrize(("name", "ending"), page.PAGES.items())
    def test_committed_pages_are_those_of_the_committed_files(self, name, ending):
        assert page.verdicts(ending) in (page.ROOT / "docs" / name).read_text(encoding="utf-8")
        for system in page.TITLES:
            if system not in claims.SYSTEMS and not (page.RESULTS / f"{system}{ending}.json").exists():
                continue  # another sitting's, on one kind of device alone
            table = page.ROOT / "studies" / "tables" / f"{system}{ending}.md"
            assert table.read_text(encoding="utf-8") == page.tables(system, ending)


class TestWithoutACheckout:
    """The wheel holds no study."""

    def test_the_command_says_where_to_get_them(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(claims_command, "CHECKOUT", tmp_path)
        assert main(["bench", "claims", "--quick"]) == 2
        assert "Remedy: the studies are not part of the wheel; clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(3, 7)], 4), ([(5, 9), (0, 3)], 7), ([(0, 10), (2, 4), (8, 12)], 12), ([(0, 2), (2, 5)], 5)],
)
def test_spans_that_overlap_are_counted_once(spans, length):
    assert covered(spans) == length


@pytest.mark.gpu
def test_a_gpu_that_waits_is_hardly_used():
    big = torch.randn(4096, 4096, device="cuda")
    made = Sitting("active_dynamics", big.device, quick=True)
    works = busy_share(lambda: [big @ big for _ in range(50)], made)
    waits = busy_share(lambda: (time.sleep(0.2), big @ big), made)
    assert 0.8 < works < 1.1
    assert waits < 0.1
