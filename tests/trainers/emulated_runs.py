"""Runs in mode "graph" on a CPU: the graphs of their iterations in slow motion."""

import importlib
from contextlib import nullcontext

import emulated_graph
import torch

from torchrl_perf.replay.ring import Ring
from torchrl_perf.replay.rows import PackedRows
from torchrl_perf.trainers import captures, whole_loop
from torchrl_perf.trainers.off_policy import trainer as off_policy
from torchrl_perf.trainers.on_policy import trainer as on_policy

capturing = importlib.import_module("torchrl_perf.runtime.capture")  # the package has a function of that name


def emulate(monkeypatch):
    """Has trainers made in mode "auto" or "graph" emulate what they do on CUDA."""
    monkeypatch.setattr(capturing, "record", emulated_graph.record)
    monkeypatch.setattr(capturing, "warming_up", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(captures, "capture", _capture)
    for module in (on_policy, off_policy, whole_loop):
        monkeypatch.setattr(module, "resolve_mode", lambda mode, device: "graph" if mode == "auto" else mode)
    _write_at_the_devices_cursor(monkeypatch)


def _capture(fn, *, device, audit, parameters):
    captured = capturing.capture(fn, device=device, audit=audit, parameters=parameters)
    captured.device, captured.mode = torch.device("cuda", 0), "graph"
    return captured


def _write_at_the_devices_cursor(monkeypatch):
    """A replay buffer on a CPU writes where the host says, which no graph would repeat."""
    init = Ring.__init__

    def recorded(self, *args):
        init(self, *args)
        self.recorded = True

    def write(self, leaves, time_rows, skipped):
        rows = (self.ring.cursor + skipped + torch.arange(time_rows)) % self.ring.steps
        for key, view in self._by_time.items():
            if key in leaves:
                view.index_copy_(0, rows, leaves[key] if self.flat else leaves[key].transpose(0, 1))

    monkeypatch.setattr(Ring, "__init__", recorded)
    monkeypatch.setattr(PackedRows, "_write_runs", write)
