"""The end of a rank: graphs first, then the group, by itself where nobody asks for it."""

import importlib

import torch
import torch.distributed as dist
from rank_processes import run, said

from torchrl_perf.parallel import leave

capturing = importlib.import_module("torchrl_perf.runtime.capture")


class Graph:
    """What a recording gives, for its order beside the end of the group."""

    def __init__(self, told):
        self._told = told

    def replay(self):
        self._told.append("replay")

    def reset(self):
        self._told.append("reset")


def captured_function(monkeypatch, told):
    """A captured function whose graph tells when it is reset."""
    monkeypatch.setattr(capturing, "record", lambda fn, *_: (Graph(told), fn()))
    for name, stands_in in (("synchronize", lambda *_: told.append("wait")), ("empty_cache", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stands_in)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    captured = capturing.capture(lambda: None, device="cpu", warmup=1, audit=False)
    captured.device = torch.device("cuda", 0)
    monkeypatch.setattr(capturing, "warming_up", lambda device: capturing.nullcontext())
    captured()
    captured()
    assert captured.captured
    return captured


def test_graphs_are_released_before_the_group_is_taken_down(monkeypatch):
    told = []
    captured = captured_function(monkeypatch, told)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: told.append("destroyed"))
    leave()
    assert told == ["replay", "wait", "reset", "destroyed"]
    assert not captured.captured
    captured()
    assert told[4:] == ["replay"], "it is recorded again"


def test_a_process_alone_keeps_its_graphs(monkeypatch):
    told = []
    captured = captured_function(monkeypatch, told)
    leave()
    assert captured.captured
    assert told == ["replay"]


def test_a_rank_leaves_at_its_end_in_any_case(tmp_path):
    ends = "left_by_exception", "left_by_interrupt", "left_without_a_word", "left_in_order"
    checks = [f"leave_checks.{end}" for end in ends]
    codes = run(tmp_path, 2, *checks)
    assert codes == dict(zip(checks, ([1, 1], [2, 2], [0, 0], [0, 0]), strict=True))
    for check in checks:
        for rank in range(2):
            words = said(tmp_path, check, rank)
            assert "destroy_process_group() was called" in words, check
            # one that lives on can abort the process while the interpreter ends
            assert "0 threads of gloo at the end" in words, check
            assert ("1 or more before" in words) == (check != checks[0]), "gloo's threads have names"
    assert "received a call after leave(), which has ended it" in said(tmp_path, checks[-1], 1)
