"""``torchrl-perf doctor --kernels``: times of perceptrons and the tiles that were chosen."""

import pytest
import torch

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
    monkeypatch.setattr(module, "time_cuda", timed)
    monkeypatch.setattr(module, "capture", lambda call, audit: call)
    monkeypatch.setattr(module, "chain_tiles", lambda x, params, activation, precision: (len(params), precision))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    head, *lines = module.kernel_table("cpu", ("tf32", "ieee"))
    assert head.split()[:7] == ["rows", "network", "activation", "precision", "kernel", "layers", "us"]
    assert [line.split() for line in lines] == [
        ["6", "3-8-4-2", "elu", "tf32", "1.0", "2.0", "6", "tf32"],
        ["6", "3-8-4-2", "elu", "ieee", "3.0", "4.0", "6", "ieee"],
        ["5", "2-4-1", "mish", "tf32", "5.0", "6.0", "4", "tf32"],
        ["5", "2-4-1", "mish", "ieee", "7.0", "8.0", "4", "ieee"],
    ]
    assert [len(grads) for grads in calls] == [6, 6, 6, 6, 4, 4, 4, 4]


@pytest.mark.gpu
def test_it_names_the_tiles(monkeypatch, capsys):
    monkeypatch.setattr(module, "SHAPES", ((8192, 3, (96, 40), 2, "elu"), (8192, 3, (64, 64), 2, "tanh")))
    assert main(["doctor", "--kernels"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("weights on chip") == 2 and printed.count("(128, 256, ") == 2
