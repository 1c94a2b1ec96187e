"""Small promises of checkpoints and of the guard that no run would miss at once."""

import torch
from torch import nn

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import FORMAT, VERSION, TrainState, load_random_state, random_state


def test_the_version_that_files_of_this_release_have():
    # a reader of later releases tells them by these two
    assert (FORMAT, VERSION) == ("torchrl_perf.TrainState", 1)
    state = TrainState(network=nn.Linear(1, 1), counters={"iteration": 0}).state_dict()
    assert (state["format"], state["version"]) == (FORMAT, VERSION)


def test_random_state_of_a_gpu_is_left_aside_on_a_cpu():
    cpu = torch.device("cpu")
    state = random_state(cpu)
    expected = torch.rand(3)
    load_random_state(state | {"cuda": torch.zeros(16, dtype=torch.uint8)}, cpu)
    assert torch.equal(torch.rand(3), expected)


def test_what_is_noted_keeps_no_graph_alive():
    guard = NumericalGuard(DeviceMetrics("cpu"), torch.zeros(()), losses=["loss"], parameters=["w"])
    weight = torch.ones(1, requires_grad=True)
    guard.note(weight * 2, weight * 3, torch.tensor(False))
    assert [tensor.requires_grad for tensor in guard._noted[0]] == [False, False, False]


def test_a_single_bad_value_is_a_fault():
    guard = NumericalGuard(DeviceMetrics("cpu"), torch.ones(()), losses=["loss"], parameters=["w"])
    guard.note(torch.tensor([torch.nan]), torch.zeros(1), torch.tensor(True))
    guard.report()
    assert guard.verdict(guard.metrics.flush(1)).fault.key == "loss"
    guard.note(torch.zeros(1), torch.zeros(1), torch.tensor(False))
    guard.report()
    assert guard.verdict(guard.metrics.flush(2)) is None
