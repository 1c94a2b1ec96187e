"""``torchrl-perf bench transfer``: rows, verdicts, and what a CPU can say."""

import json

import pytest
import torch

from torchrl_perf.bench import transfer
from torchrl_perf.cli import main


def test_on_a_cpu_copies_are_not_applicable_and_the_rest_is_measured(tmp_path, capsys):
    assert main(["bench", "transfer", "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "transfer_cpu.json").read_text(encoding="utf-8"))["rows"]
    copies = [row for row in rows if row["part"] in transfer.COPIES]
    assert len(copies) == sum(map(len, transfer.COPIES.values()))
    assert {row["note"] for row in copies} == {"n/a: no CUDA"}
    measured = [row for row in rows if row["part"] in ("creation", "metrics")]
    assert len(measured) == 9
    assert all(0 < row["p10_us"] <= row["us"] <= row["p90_us"] and row["host_us"] <= row["us"] for row in measured)
    verdicts = {row["claim"]: row["verdict"] for row in rows if row["part"] == "verdict"}
    assert len(verdicts) == 6
    assert sum(verdict == "n/a: no CUDA" for verdict in verdicts.values()) == 4
    text = capsys.readouterr().out
    assert "n/a: no CUDA" in text
    assert "from_numpy makes tensors 100 times faster" in text


def test_quick_writes_nothing_unasked(monkeypatch):
    monkeypatch.setattr(transfer, "write_results", lambda *args: pytest.fail("written"))
    assert transfer.main(["--quick", "--device", "cpu"]) == 0


def test_verdicts_follow_the_rows():
    bench = transfer.Bench(torch.device("cpu"), (1,), 1)
    for part, variant, us in (
        ("metrics", "20 x .item()", 100.0),
        ("metrics", "packed, read an update later", 10.0),
        ("creation", "tensor(np.array(list))", 30.0),
        ("creation", "from_numpy(array)", 10.0),
    ):
        bench.rows.append({"part": part, "variant": variant, "us": us})
    creation, metrics = transfer.verdicts(bench)[:2]
    assert (creation["measured"], creation["verdict"]) == ("3.0 times", "does not hold")
    assert (metrics["measured"], metrics["verdict"]) == ("90%", "holds")


@pytest.mark.gpu
def test_on_cuda_each_copy_has_its_time_and_overlap(tmp_path):
    options = ["--sizes", "0.25", "4", "--repeats", "5", "--device", "cuda", "--out", str(tmp_path)]
    assert transfer.main(options) == 0
    rows = json.loads((tmp_path / "transfer.json").read_text(encoding="utf-8"))["rows"]
    copies = [row for row in rows if row["part"] in transfer.COPIES]
    assert len(copies) == 2 * sum(map(len, transfer.COPIES.values()))
    assert all(row["us"] > 0 for row in copies)
    assert all(0 <= row["overlap"] <= 1 for row in copies if row["variant"] != "resident")
    assert all(row["verdict"] in ("holds", "does not hold") for row in rows if row["part"] == "verdict")
