"""PPOTrainer: the loop's parts, host waits, schedules, divergence, resume, memory."""

import dataclasses
import gc

import pytest
import torch
from states import run
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ValueOperator

from torchrl_perf.envs import CartPole
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import PPOConfig, PPOTrainer, TrainingDivergedError, train
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder

TINY = PPOConfig(
    num_envs=8, num_steps=8, total_steps=640, epochs=2, minibatches=2, hidden_size=32, logger="none", device="cpu"
)
ITERATIONS = TINY.iterations


def make(**options):
    return PPOTrainer(dataclasses.replace(TINY, **options))


def parameters(trainer):
    return [p.detach().clone() for p in trainer.loss.parameters()]


def flatten(state, prefix=""):
    """Every leaf of a nested state, by path."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    flat = {}
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def assert_same(one, other):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert same or (value != value and other[key] != other[key]), key


@pytest.mark.parametrize("env", ["CartPole", "Pendulum"])
@pytest.mark.parametrize("loss", ["device", "torchrl"])
def test_iterations_change_actor_and_critic(env, loss):
    trainer = make(env=env, loss=loss)
    before = parameters(trainer)
    run(trainer, 2)
    row = trainer.metrics.flush(128)
    assert all((one != two).any() for one, two in zip(before, parameters(trainer), strict=True))
    assert row["train/updates_applied"] == 4
    assert row["train/first_bad_iteration"] == -1
    assert {"train/loss_objective", "train/loss_critic", "train/entropy", "train/kl_approx", "train/grad_norm"} <= set(
        row
    )
    trainer.close()


def test_both_losses_give_the_same_run():
    states = [parameters(run(make(loss=loss, entropy_coeff=0.02), 3)) for loss in ("device", "torchrl")]
    for one, two in zip(*states, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("env", ["CartPole", "Pendulum"])
@pytest.mark.parametrize(
    "options", [{}, {"entropy_coeff": 0.0}, {"target_kl": 1e-4, "entropy_coeff_final": 0.0, "clip_value": False}]
)
def test_no_host_read_in_an_iteration(env, options):
    trainer = run(make(env=env, **options), 1)
    with no_host_sync():
        trainer.iteration()


class TestSchedules:
    def test_learning_rate_and_entropy_weight_are_linear(self):
        trainer = make(learning_rate=0.01, entropy_coeff=0.02, entropy_coeff_final=0.01)
        for iteration in range(ITERATIONS):
            trainer.step()
            done = iteration / ITERATIONS
            assert float(trainer.optimizer.learning_rate) == pytest.approx(0.01 * (1 - done), rel=1e-5)
            assert float(trainer.loss.entropy_coeff) == pytest.approx(0.02 - 0.01 * done, rel=1e-5)

    def test_constant_where_not_asked_for(self):
        trainer = run(make(learning_rate=0.01, anneal_learning_rate=False), 3)
        assert float(trainer.optimizer.learning_rate) == pytest.approx(0.01)
        assert float(trainer.loss.entropy_coeff) == pytest.approx(TINY.entropy_coeff)


class TestEarlyStop:
    def test_a_tiny_target_stops_after_the_first_updates(self):
        trainer = run(make(target_kl=1e-7, learning_rate=0.05, epochs=4), 1)
        assert 1 <= trainer.metrics.flush(64)["train/updates_applied"] <= 2

    def test_it_stops_within_an_iteration_only(self):
        trainer = run(make(target_kl=1e-7, learning_rate=0.05, epochs=4), 3)
        assert float(trainer._applied) >= 1

    def test_a_large_target_stops_nothing(self):
        trainer = run(make(target_kl=1e6), 1)
        assert trainer.metrics.flush(64)["train/updates_applied"] == 4

    def test_skipped_updates_leave_the_parameters_alone(self):
        trainer = run(make(), 1)
        before = parameters(trainer)
        object.__setattr__(trainer.config, "target_kl", -1e9)  # every estimate exceeds it
        trainer.step()
        for one, two in zip(before, parameters(trainer), strict=True):
            assert torch.equal(one, two)


def nan_env(bad_step):
    """CartPole whose reward is NaN from one step on."""

    class BadReward(CartPole):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def dynamics(self, state, action):
            next_state, reward, terminated = super().dynamics(state, action)
            self.steps += 1
            return next_state, torch.where(self.steps >= bad_step, torch.nan, reward), terminated

    return BadReward(8, device="cpu")


class TestDivergence:
    def test_parameters_stay_finite_and_the_step_is_named(self, tmp_path):
        config = dataclasses.replace(TINY, log_interval=1, checkpoint_interval=1)
        trainer = PPOTrainer(config, env=nan_env(bad_step=20))  # in the third iteration of 8 steps
        with pytest.raises(TrainingDivergedError, match=r"iteration 3 \(env step 192\)") as error:
            train(trainer, tmp_path, progress=False)
        assert str(tmp_path) in str(error.value)
        assert all(p.isfinite().all() for p in trainer.loss.parameters())
        _, state = CheckpointFolder(tmp_path / "checkpoints").load_newest()
        assert state["counters"]["iterations_done"] == 2
        assert all(v.isfinite().all() for v in flatten(state["parts"]["actor"]).values() if torch.is_tensor(v))

    def test_a_late_look_does_not_overwrite_the_last_good_checkpoint(self, tmp_path):
        config = dataclasses.replace(TINY, log_interval=5, checkpoint_interval=1)
        trainer = PPOTrainer(config, env=nan_env(bad_step=20))
        with pytest.raises(TrainingDivergedError, match="iteration 3"):
            train(trainer, tmp_path, progress=False)
        _, state = CheckpointFolder(tmp_path / "checkpoints").load_newest()
        assert float(state["counters"]["first_bad"]) == -1

    def test_moments_and_parameters_are_those_before(self):
        trainer = run(PPOTrainer(TINY, env=nan_env(bad_step=9)), 1)
        before = flatten(trainer.optimizer.state_dict()), parameters(trainer)
        trainer.step()
        for one, two in zip(before[1], parameters(trainer), strict=True):
            assert torch.equal(one, two)
        after = flatten(trainer.optimizer.state_dict())
        for key, value in before[0].items():
            if "state/" in key:
                assert torch.equal(value, after[key]), key


class TestResume:
    @pytest.mark.parametrize("env", ["CartPole", "Pendulum"])
    def test_three_and_two_are_five_bitwise(self, env, tmp_path):
        options = {"env": env, "entropy_coeff_final": 0.0}
        trainer = run(make(**options), 3)
        path = trainer.save(tmp_path / "checkpoint.pt")
        expected = run(trainer, 2).state_dict()

        resumed = make(seed=99, **options)
        resumed.load(path)
        assert_same(run(resumed, 2).state_dict(), expected)
        assert resumed.metrics.flush(320) == trainer.metrics.flush(320)

    def test_loading_into_a_trainer_in_use_goes_back(self, tmp_path):
        trainer = run(make(), 2)
        path = trainer.save(tmp_path / "checkpoint.pt")
        first = run(trainer, 2).state_dict()
        trainer.load(path)
        assert trainer.iterations_done == 2
        assert_same(run(trainer, 2).state_dict(), first)

    def test_a_snapshot_is_a_copy(self):
        trainer = run(make(), 1)
        state, copy = trainer.state_dict(), None
        copy = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in flatten(state).items()
        }
        run(trainer, 1)
        assert_same(flatten(state), copy)

    def test_a_run_that_is_interrupted_ends_like_one_that_is_not(self, tmp_path):
        whole = make()
        train(whole, tmp_path / "whole", progress=False)
        first = run(make(), 4)
        first.save(tmp_path / "half.pt")
        second = make()
        second.load(tmp_path / "half.pt")
        result = train(second, tmp_path / "second", progress=False)
        assert result.steps == 640
        for one, two in zip(parameters(whole), parameters(second), strict=True):
            assert torch.equal(one, two)


def test_the_run_does_not_depend_on_the_interval_of_logging(tmp_path):
    ends = []
    for interval in (1, 3, 100):
        trainer = make(log_interval=interval)
        result = train(trainer, tmp_path / str(interval), progress=False)
        ends.append((result.mean_return, result.steps, parameters(trainer)))
    assert ends[0][:2] == ends[1][:2] == ends[2][:2]
    for other in ends[1:]:
        assert all(torch.equal(one, two) for one, two in zip(ends[0][2], other[2], strict=True))


def test_memory_is_flat():
    trainer = run(make(), 3)

    def live():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    before = live()
    run(trainer, 50)
    assert live() <= before


def test_own_networks_and_env():
    env = CartPole(8, device="cpu")
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    trainer = PPOTrainer(TINY, env=env, critic=critic)
    assert trainer.env is env
    weight = critic.module.weight.detach().clone()
    run(trainer, 1)
    assert not torch.equal(critic.module.weight, weight)


class TestRefusals:
    def test_a_checkpoint_of_other_networks_changes_nothing(self):
        trainer, other = make(), make(hidden_size=64, seed=1)
        before = parameters(trainer)
        with pytest.raises(ValueError, match="expected in actor"):
            trainer.load_state_dict(run(other, 1).state_dict())
        assert all(map(torch.equal, before, parameters(trainer)))
        assert trainer.iterations_done == 0

    def test_cuda_where_there_is_none(self):
        if torch.cuda.is_available():
            pytest.skip("there is CUDA")
        with pytest.raises(ValueError, match=r"device: expected .*received 'cuda'.*Remedy: device='cpu'"):
            make(device="cuda")

    def test_graph_on_a_cpu(self):
        with pytest.raises(ValueError, match=r"mode='graph': expected a CUDA device, received cpu"):
            make(mode="graph")

    def test_env_of_another_size(self):
        with pytest.raises(ValueError, match=r"expected batch_size \[8\], the config's num_envs, received \[4\]"):
            PPOTrainer(TINY, env=CartPole(4, device="cpu"))

    def test_critic_that_reads_what_the_env_does_not_give(self):
        critic = TensorDictModule(nn.Linear(4, 1), ["pixels"], ["state_value"])
        with pytest.raises(ValueError, match=r"critic: .*pixels"):
            PPOTrainer(TINY, critic=critic)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"loss": "torchrl", "epochs": 1}, {"env": "Pendulum", "target_kl": 0.01}], ids=str
)
def test_compiled_iterations_equal_eager_ones(options, fresh_dynamo):
    # one epoch of TorchRL's loss, since its compiled form draws random numbers of its own for the entropy
    with torch._inductor.config.patch(fallback_random=True):
        eager, compiled = run(make(mode="eager", **options), 1), run(make(mode="compile", **options), 1)
    for one, two in zip(parameters(eager), parameters(compiled), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
class TestGraph:
    def make(self, **options):
        return make(device="cuda", num_envs=64, num_steps=16, total_steps=64 * 16 * 1000, **options)

    @pytest.mark.parametrize("options", [{}, {"env": "Pendulum", "target_kl": 0.1}, {"loss": "torchrl"}], ids=str)
    def test_replays_do_not_synchronise_and_learn(self, options):
        trainer = run(self.make(**options), 4)
        before = parameters(trainer)
        with no_host_sync("cuda", trace=False):
            run(trainer, 3)
        assert all((one != two).any() for one, two in zip(before, parameters(trainer), strict=True))
        row = trainer.metrics.flush(7 * 1024)
        assert row["train/first_bad_iteration"] == -1
        trainer.close()

    def test_resume_in_a_captured_trainer(self, tmp_path):
        trainer = run(self.make(), 4)
        path = trainer.save(tmp_path / "checkpoint.pt")
        expected = parameters(run(trainer, 3))
        trainer.load(path)
        for one, two in zip(expected, parameters(run(trainer, 3)), strict=True):
            assert torch.equal(one, two)

    def test_memory_is_flat(self):
        trainer = run(self.make(), 4)
        before = torch.cuda.memory_allocated()
        run(trainer, 100)
        assert torch.cuda.memory_allocated() == before

    def test_learning_rate_schedule_counts_in_replays(self):
        trainer = run(self.make(learning_rate=0.01), 6)
        assert float(trainer.optimizer.learning_rate) == pytest.approx(0.01 * (1 - 5 / 1000), rel=1e-4)
