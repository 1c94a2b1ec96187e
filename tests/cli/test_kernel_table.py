"""``torchrl-perf doctor --kernels``: times of perceptrons and the tiles that were chosen."""

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.__main__ import main
from torchrl_perf.cli import kernel_table as module
from torchrl_perf.runtime.timing import Timing


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has CUDA")
def test_without_cuda_it_says_so(capsys):
    assert main(["doctor", "--kernels"]) == 2
    assert "kernels: expected a CUDA device, received none. Remedy: leave --kernels out." in capsys.readouterr().err


@pytest.mark.parametrize("other", [["--json"], ["--after", "runs/one"]])
def test_what_would_be_ignored_is_refused(other, capsys):
    assert main(["doctor", "--kernels", *other]) == 2
    assert "--kernels: expected without --json and --after" in capsys.readouterr().err


def test_a_line_for_each_network_and_precision(monkeypatch):
    calls = []

    def timed(call, repeats):
        calls.append(call())
        return Timing(median=float(len(calls)), p10=0.0, p90=0.0, repeats=repeats)

    monkeypatch.setattr(module, "SHAPES", ((6, 3, (8, 4), 2, "elu"), (5, 2, (4,), 1, "mish")))
    monkeypatch.setattr(module, "CRITICS", ())
    monkeypatch.setattr(module, "time_cuda", timed)
    monkeypatch.setattr(module, "capture", lambda call, audit: call)
    monkeypatch.setattr(module, "chain_tiles", lambda x, params, activation, precision: (len(params), precision))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    head, *lines, _ = module.kernel_table("cpu", ("tf32", "ieee"))
    assert head.split()[:7] == ["rows", "network", "activation", "precision", "kernel", "layers", "us"]
    assert [line.split() for line in lines] == [
        ["6", "3-8-4-2", "elu", "tf32", "1.0", "2.0", "6", "tf32"],
        ["6", "3-8-4-2", "elu", "ieee", "3.0", "4.0", "6", "ieee"],
        ["5", "2-4-1", "mish", "tf32", "5.0", "6.0", "4", "tf32"],
        ["5", "2-4-1", "mish", "ieee", "7.0", "8.0", "4", "ieee"],
    ]
    assert [len(grads) for grads in calls] == [6, 6, 6, 6, 4, 4, 4, 4]


class _Ensemble:
    """Stands in for kernels, which a CPU has not."""

    def __init__(self, net):
        self.net = net

    def forward(self, x):
        return torch.zeros(self.net.weights[0].shape[0], x.shape[1], 1), "kept"

    def backward(self, g, kept, x):
        assert g.shape[:2] == (self.net.weights[0].shape[0], x.shape[1]) and kept == "kept"
        return ("own",)

    def tiles(self, rows):
        return ((rows, 1), (2,), (3,))


def test_a_line_for_each_ensemble_of_critics(monkeypatch):
    calls = []

    def timed(call, repeats):
        calls.append(call())
        return Timing(median=float(len(calls)), p10=0.0, p90=0.0, repeats=repeats)

    monkeypatch.setattr(module, "SHAPES", ())
    monkeypatch.setattr(module, "CRITICS", ((6, 2, 3, (8, 4), "elu", "tf32"), (5, 3, 2, (4,), "relu", "bf16")))
    monkeypatch.setattr(module, "time_cuda", timed)
    monkeypatch.setattr(module, "capture", lambda call, audit: call)
    monkeypatch.setattr(module, "members_of_ensemble", _Ensemble)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, *lines, last = module.kernel_table("cpu")
    assert [line.split(maxsplit=8) for line in lines] == [
        ["6", "2", "x", "3-8-4-1", "elu", "tf32", "1.0", "2.0", "(6, 1) (2,) (3,)"],
        ["5", "3", "x", "2-4-1", "relu", "bf16", "3.0", "4.0", "(5, 1) (2,) (3,)"],
    ]
    assert calls[0] == ("own",) and [len(calls[1]), len(calls[3])] == [6, 4]
    assert last.startswith("tiles of critics")


@tries_kernels
def test_critics_as_kernels_have_tiles(monkeypatch):
    """The kernels themselves, on a GPU or interpreted."""
    place = torch.device(kernel_device())
    monkeypatch.setattr(module, "SHAPES", ())
    monkeypatch.setattr(module, "CRITICS", ((20, 2, 5, (16, 9), "elu", "tf32"),))
    if place.type == "cpu":
        monkeypatch.setattr(module, "capture", lambda call, audit: call)
        monkeypatch.setattr(module, "time_cuda", lambda call, repeats: Timing(float(len(call())), 0.0, 0.0, repeats))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, line, _ = module.kernel_table(place)
    assert line.split()[:6] == ["20", "2", "x", "5-16-9-1", "elu", "tf32"] and line.count("(") == 3


@pytest.mark.gpu
def test_it_names_the_tiles(monkeypatch, capsys):
    monkeypatch.setattr(module, "SHAPES", ((8192, 3, (300, 40), 2, "elu"), (8192, 3, (64, 64), 2, "tanh")))
    monkeypatch.setattr(module, "CRITICS", ())
    assert main(["doctor", "--kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wide, narrow = ([line for line in lines if sizes in line] for sizes in ("3-300-40-2", "3-64-64-2"))
    assert len(wide) == len(narrow) == 2
    assert all("(" in line for line in wide) and all(line.endswith("weights on chip") for line in narrow)
