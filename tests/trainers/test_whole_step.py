"""Updates of a compiled on-policy run on a CPU are one function: the same as in parts, and parts where it cannot be."""

import logging
import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_perf.runtime.oom import OutOfMemoryWarning
from torchrl_perf.trainers import HybridPPOConfig, HybridPPOTrainer, PPOConfig, PPOTrainer, PQNConfig, PQNTrainer

COMMON = {"num_envs": 8, "num_steps": 16, "device": "cpu", "logger": "none", "total_steps": 100_000}
PPO = {**COMMON, "epochs": 2, "minibatches": 2, "hidden_size": 32, "learning_rate": 1e-2}


def make(mode="compile", **changes):
    return PPOTrainer(PPOConfig.without_task(**{**PPO, "mode": mode, **changes}))


def run(trainer, iterations=3):
    for _ in range(iterations):
        trainer.step()
        trainer.iterations_done += 1
    return trainer


def state(trainer):
    moments = [value for each in trainer.optimizer.state.values() for value in each.values()]
    return [value.detach().clone() for value in [*trainer.optimizer.params, *moments, trainer.optimizer.learning_rate]]


def assert_same(one, two, tolerance=2e-4):
    torch.testing.assert_close(state(one), state(two), rtol=tolerance, atol=tolerance)
    rows = one.metrics.flush(1), two.metrics.flush(1)
    for name, value in rows[0].items():
        assert value == pytest.approx(rows[1][name], rel=1e-2, abs=1e-3, nan_ok=True), name


def steps_taken(trainer, monkeypatch):
    """Counts the updates that are made whole."""
    taken, step = [], trainer._whole_step

    def counted(*args):
        noted = step(*args)
        taken.append(noted is not None)
        return noted

    monkeypatch.setattr(trainer, "_whole_step", counted)
    return taken


@pytest.mark.parametrize(
    "options",
    [
        {"target_kl": 1e-4, "on_nan": "skip"},
        {
            **{"env": "Pendulum", "hidden_sizes": (32, 16), "activation": "elu", "layer_norm": True},
            **{"normalize_observations": True, "normalize_rewards": True},
            **{"anneal_learning_rate": True, "weight_decay": 0.01, "max_grad_norm": 0.01},
        },
        {"desired_kl": 0.01, "precision": "fp16"},
    ],
    ids=["stop", "pendulum", "adaptive"],
)
def test_equals_an_update_in_parts(traced, monkeypatch, options):
    whole = make(**options)
    taken = steps_taken(whole, monkeypatch)
    run(whole)
    assert taken == [True] * 12
    assert_same(whole, run(make("eager", **options)))


@pytest.mark.parametrize(
    ("trainer", "config"), [(HybridPPOTrainer, HybridPPOConfig), (PQNTrainer, PQNConfig)], ids=["hybrid", "pqn"]
)
def test_other_algorithms(traced, monkeypatch, trainer, config):
    settings = {**COMMON, "num_steps": 8, "minibatches": 2}
    whole = trainer(config.without_task(**settings, mode="compile"))
    taken = steps_taken(whole, monkeypatch)
    run(whole, 2)
    assert taken
    assert all(taken)
    assert_same(whole, run(trainer(config.without_task(**settings, mode="eager")), 2))


def test_one_that_runs_out_of_memory_half_way_is_undone_and_made_in_parts(traced, monkeypatch):
    whole, split = run(make("eager")), make()
    failures = [torch.OutOfMemoryError("no room")]
    step_fn = split._whole_step._step_fn

    def fail(*args):
        noted = step_fn(*args)  # has written everything
        if failures:
            raise failures.pop()
        return noted

    monkeypatch.setattr(split._whole_step, "_step_fn", fail)
    with pytest.warns(OutOfMemoryWarning):
        run(split)
    assert split.micro.parts == 2
    torch.testing.assert_close(state(split), state(whole), rtol=1e-3, atol=1e-3)


def test_later_one_that_runs_out_of_memory_is_an_error_with_a_remedy(traced, monkeypatch):
    trainer = run(make())

    def fail(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(trainer._whole_step, "_step_fn", fail)
    with pytest.raises(torch.OutOfMemoryError, match="Remedy: go on from the last checkpoint"):
        trainer.step()


@torch.library.custom_op("torchrl_perf_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: 2 * grad)


class Twice(nn.Module):
    """An operator that autograd differentiates, and torch.func does not."""

    def forward(self, x):
        return torch.ops.torchrl_perf_tests.twice(x)


def test_networks_that_the_compiler_cannot_differentiate_are_updated_in_parts(traced, caplog):
    def with_critic(mode):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 16), Twice(), nn.Tanh(), nn.Linear(16, 1))
        critic = TensorDictModule(net, ["observation"], ["state_value"])
        return PPOTrainer(PPOConfig.without_task(**PPO, mode=mode), critic=critic)

    with caplog.at_level(logging.WARNING, "torchrl_perf"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = run(with_critic("compile"))
    said = [record.getMessage() for record in caplog.records if "in parts" in record.getMessage()]
    assert len(said) == 1
    assert_same(whole, run(with_critic("eager")))


def test_changes_with_the_compiler_in_the_middle_of_a_run(traced, monkeypatch):
    late = make("auto", compile_after=2 * 128)
    taken = steps_taken(late, monkeypatch)
    run(late, late.kernels.at + 2)
    assert taken == [False] * 4 * late.kernels.at + [True] * 8
    assert_same(late, run(make("eager"), late.kernels.at + 2))


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_the_guard_notes_each_update_by_itself(traced, monkeypatch, mode):
    trainer = run(make(mode), 1)
    noted = []
    monkeypatch.setattr(trainer.guard, "note", lambda losses, gradients, fault: noted.append((losses, gradients)))
    trainer.step()
    for numbers in zip(*noted, strict=True):
        assert len({number.data_ptr() for number in numbers}) == len(numbers)


def test_frozen_parameters_stay_as_they_are(traced):
    def frozen(mode):
        trainer = make(mode)
        trainer.optimizer.params[0].requires_grad_(False)
        return trainer

    trainer = frozen("compile")
    before = trainer.optimizer.params[0].clone()
    run(trainer)
    assert torch.equal(trainer.optimizer.params[0], before)
    assert_same(trainer, run(frozen("eager")))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_gradients_are_called(traced, register):
    trainer, called = make(), []
    getattr(trainer.optimizer.params[0], register)(lambda _: called.append(1))
    run(trainer)
    assert len(called) == 12
