"""The benchmark of logging: what a quick run leaves behind."""

import json

import pytest

from torchrl_perf.bench import logging as bench

ROWS = [{"part": "read 20 metrics", "variant": ".item() of each", "us": 2.0, "p10_us": 1.0, "p90_us": 3.0}]


@pytest.fixture
def parts(monkeypatch):
    """Measures nothing."""
    for name in ("call_rows", "loop_rows"):
        monkeypatch.setattr(bench, name, lambda *args: [])
    monkeypatch.setattr(bench, "read_rows", lambda *args: list(ROWS))


def test_quick_writes_nothing_unasked(parts, monkeypatch):
    monkeypatch.setattr(bench, "write_results", lambda *args: pytest.fail("written"))
    assert bench.main(["--quick", "--device", "cpu"]) == 0


def test_rows_are_written_where_asked_for(parts, tmp_path, capsys):
    assert bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "logging_cpu.json").read_text())["rows"] == ROWS
    assert f"written to {tmp_path / 'logging_cpu.json'}" in capsys.readouterr().out
