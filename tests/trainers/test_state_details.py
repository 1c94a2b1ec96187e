"""Small promises of checkpoints and of the guard that no run would miss at once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder
from torchrl_perf.trainers.run.fault import Fault, remedy_of
from torchrl_perf.trainers.run.memory_floor import _act
from torchrl_perf.trainers.run.metric_names import known_metrics
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


@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ("batch", "next/observation", "the env's arithmetic"),
        ("batch", "action", "a lower learning_rate"),
        ("batch", "agents/action_log_prob", "a lower learning_rate"),
        ("loss", "critic", "a lower learning_rate"),
        ("gradient", "weight", "a lower learning_rate"),
    ],
)
def test_the_remedy_is_where_the_fault_came_from(source, key, words):
    assert words in remedy_of(Fault(key, "NaN", 1, source))


def test_the_remedy_of_an_overflow_without_a_place():
    assert "a lower learning_rate" in remedy_of(None)


class Trainer:
    """Stands in for a trainer: only what the names of metrics are read from."""

    metrics, env = SimpleNamespace(names=["speed"]), SimpleNamespace(outcomes=("none", "solved", "lost"))
    statistics, metric_names = ("loss_actor",), ("curriculum/stage",)


def test_names_of_metrics_that_a_trainer_may_have():
    known = known_metrics(Trainer())
    assert known[0] == "speed"
    assert {"train/loss_actor", "curriculum/stage", "episode/solved", "episode/lost"} <= set(known)
    assert "episode/none" not in known
    assert len(known) == len(set(known))


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"hidden_size": 8}, 8),
        ({"hidden_size": 8, "num_action_taus": 4}, 32),
        ({"hidden_size": 8, "num_quantiles": 20, "num_atoms": 1}, 42),
        ({"hidden_size": 8, "candidates": 10, "plan_horizon": 3, "latent_size": 4, "inputs": "plan"}, 120),
        ({"hidden_size": 8, "candidates": 10, "plan_horizon": 3, "inputs": "plan"}, 30),
        ({"hidden_size": 8, "candidates": 10, "plan_horizon": 3, "latent_size": 4, "inputs": "random"}, 8),
    ],
)
def test_numbers_that_acting_takes_for_a_row(settings, numbers):
    assert _act(SimpleNamespace(**settings)) == numbers


def test_a_checkpoint_of_the_same_iteration_is_written_over(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=3)
    for number in (1, 2):
        folder.write(TrainState(counters={"number": number}, network=nn.Linear(1, 1)).snapshot(), 7)
    assert [path.name for path in tmp_path.iterdir()] == ["000000007.pt"]
