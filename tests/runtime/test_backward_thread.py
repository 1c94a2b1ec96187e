"""Backward passes on the thread that begins them, once something of it is recorded."""

import threading

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_perf.runtime.self_capture import is_recorded, self_capturing

pytestmark = pytest.mark.gpu


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="cuda"))

    @self_capturing
    def forward(self, tensordict):
        return TensorDict({"loss": (tensordict["x"] * self.weight).square().sum()}, [])


THREADS: list[int] = []
"""Those that went back through ``Where``."""


class Where(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        THREADS.append(threading.get_ident())
        return grad


def _in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_that_records_goes_back_itself_until_it_is_told_otherwise():
    found = []

    def run():
        module, td = Squares(), TensorDict({"x": torch.arange(3.0, device="cuda")}, [3])
        for call in range(6):
            Where.apply(module(td)["loss"]).backward()
            if call == 4:
                torch.autograd.set_multithreading_enabled(True)
        assert is_recorded(module)
        assert module.weight.grad.tolist() == [0.0, 12.0, 48.0]
        found.extend([here == threading.get_ident() for here in THREADS])

    THREADS.clear()
    _in_a_thread(run)
    assert found == [False, False, True, True, True, False]


def test_other_threads_are_left_alone():
    found = []

    def run():
        Where.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()
        found.append(THREADS[-1] == threading.get_ident())

    THREADS.clear()
    _in_a_thread(run)
    assert found == [False]
