"""The hooks with which TorchRL's trainers run on the device's parts, each alone."""

import math
from types import SimpleNamespace

import pytest
import torch
from device_trainers import make_adam, make_ppo, weights
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.trainers.trainers import DefaultOptimizationStepper

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.trainers import (
    DeviceLogHook,
    DeviceReplayHook,
    GuardedAdam,
    GuardedStepper,
    MinibatchHook,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*Trainer is an experimental")


class TestGuardedStepper:
    def batch(self, trainer):
        return trainer._pre_epoch_hook(trainer.collector.collect().clone()).reshape(-1)

    def test_equals_the_stepper_of_torchrl(self):
        torch.manual_seed(1)
        ours = make_ppo()
        rows = self.batch(ours)
        torch.manual_seed(1)
        theirs = make_ppo(clip_norm=0.5)
        theirs.loss_module.load_state_dict(ours.loss_module.state_dict())
        theirs.optimizer = torch.optim.Adam(theirs.loss_module.parameters(), lr=1e-2, eps=1e-5)
        stepper = GuardedStepper(make_adam(ours))
        for _ in range(3):
            mine = stepper.step(ours, rows.clone())
            expected = DefaultOptimizationStepper().step(theirs, rows.clone())
            torch.testing.assert_close(mine["grad_norm"], expected["grad_norm"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine["loss_objective"], expected["loss_objective"].detach())
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-5)
        assert mine.batch_size == torch.Size([])
        assert not mine.requires_grad

    @pytest.mark.parametrize("max_grad_norm", [0.5, math.inf])
    def test_skips_and_counts_what_is_not_finite(self, max_grad_norm):
        trainer = make_ppo()
        stepper = GuardedStepper(make_adam(trainer, max_grad_norm=max_grad_norm))
        rows = self.batch(trainer)
        stepper.step(trainer, rows.clone())
        before = weights(trainer)
        stepper.step(trainer, rows.clone().set("advantage", torch.full((64, 1), math.nan)))
        assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
        assert stepper.skipped.item() == 1
        stepper.step(trainer, rows)
        assert not any(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
        assert stepper.skipped.item() == 1

    def test_metrics_go_to_the_accumulators(self):
        trainer = make_ppo()
        metrics = DeviceMetrics("cpu")
        rows = self.batch(trainer)
        alone = GuardedStepper(make_adam(trainer, learning_rate=0.0)).step(trainer, rows.clone())
        stepper = GuardedStepper(make_adam(trainer, learning_rate=0.0), metrics=metrics)
        assert stepper.step(trainer, rows.clone()).is_empty()
        row = metrics.flush(0)
        assert row["train/loss_critic"] == pytest.approx(alone["loss_critic"].item())
        assert set(row) == {f"train/{name}" for name in alone.keys()} | {"train/steps_skipped"}

    def test_losses_by_hand(self):
        """Loss w^2 + 3 w at w = 2: gradient 7, norm 7, Adam's first step is the learning rate."""
        weight = nn.Parameter(torch.tensor(2.0))
        loss = {"loss_a": weight**2, "loss_b": 3 * weight, "rate": torch.tensor([1.0, 2.0])}
        trainer = SimpleNamespace(compute_loss=lambda batch: TensorDict(loss), loss_module=None)
        stepper = GuardedStepper(GuardedAdam([weight], learning_rate=0.1, max_grad_norm=1.0))
        values = stepper.step(trainer, TensorDict())
        assert values["grad_norm"].item() == 7.0
        assert values["loss_a"].item() == 4.0
        assert values["rate"].item() == 1.5
        assert weight.item() == pytest.approx(1.9, abs=1e-5)

    def test_state_goes_on_bit_for_bit(self):
        trainer = make_ppo()
        rows = self.batch(trainer)
        first = GuardedStepper(make_adam(trainer))
        first.step(trainer, rows.clone())
        state, parameters = first.state_dict(), weights(trainer)
        first.step(trainer, rows.clone())
        expected = weights(trainer)
        with torch.no_grad():
            for p, saved in zip(trainer.loss_module.parameters(), parameters, strict=True):
                p.copy_(saved)
        second = GuardedStepper(make_adam(trainer, learning_rate=5.0))
        second.load_state_dict(state)
        second.step(trainer, rows.clone())
        assert all(torch.equal(a, b) for a, b in zip(expected, weights(trainer), strict=True))

    def test_refuses_a_loss_without_losses_and_a_graph_on_a_cpu(self):
        adam = GuardedAdam([nn.Parameter(torch.zeros(()))], learning_rate=0.1, max_grad_norm=1.0)
        trainer = SimpleNamespace(compute_loss=lambda batch: TensorDict(entropy=torch.zeros(())), loss_module=None)
        with pytest.raises(ValueError, match=r"start with 'loss', received \['entropy'\]"):
            GuardedStepper(adam).step(trainer, TensorDict())
        with pytest.raises(ValueError, match="mode='graph': expected parameters on CUDA"):
            GuardedStepper(adam, mode="graph")
        with pytest.raises(ValueError, match="mode: expected"):
            GuardedStepper(adam, mode="fast")


class TestMinibatchHook:
    @pytest.mark.parametrize(("shape", "size"), [((4, 6), 8), ((1, 1), 1), ((5, 1), 5), ((1, 6), 2), ((12,), 3)])
    def test_every_row_once_and_then_the_end(self, shape, size):
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        batch = TensorDict({"a": numbers, ("next", "b"): numbers * 2}, batch_size=shape)
        hook = MinibatchHook(size)
        assert hook.extend(batch) is batch
        parts = []
        with pytest.raises(StopIteration):
            while True:
                parts.append(hook.sample(batch))
        assert all(part.batch_size == (size,) for part in parts)
        rows = torch.cat(parts)
        assert torch.equal(rows["a"].sort().values, torch.arange(math.prod(shape)))
        assert torch.equal(rows["next", "b"], rows["a"] * 2)

    def test_keeps_the_keys_asked_for(self):
        batch = TensorDict({"a": torch.zeros(2, 2), ("next", "b"): torch.zeros(2, 2)}, batch_size=(2, 2))
        hook = MinibatchHook(2, keys=["a"])
        hook.extend(batch)
        assert list(hook.sample(batch).keys()) == ["a"]

    def test_refuses_a_ragged_part_and_no_batch(self):
        hook = MinibatchHook(5)
        with pytest.raises(ValueError, match=r"expected a divisor of the 12 rows .* received 5"):
            hook.extend(TensorDict({"a": torch.zeros(3, 4)}, batch_size=(3, 4)))
        with pytest.raises(TypeError, match="received None"):
            hook.extend(None)


class TestDeviceReplayHook:
    def rows(self, *shape):
        numbers = torch.arange(math.prod(shape), dtype=torch.float32).reshape(*shape, 1)
        return TensorDict({"observation": numbers, ("next", "reward"): numbers}, batch_size=shape)

    def test_off_policy_samples_without_end(self):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(24), batch_size=6)
        hook = DeviceReplayHook(buffer)
        assert not hook.on_policy
        batch = self.rows(3, 4)
        assert hook.extend(batch) is batch
        assert len(buffer) == 12
        for _ in range(5):
            sample = hook.sample(batch)
            assert sample.batch_size == (6,)
            assert torch.equal(sample["observation"], sample["next", "reward"])

    def test_on_policy_ends_with_the_pass(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=SamplerWithoutReplacement(), batch_size=4)
        hook = DeviceReplayHook(buffer)
        assert hook.on_policy
        for _ in range(2):
            hook.extend(self.rows(3, 4))
            seen = [hook.sample(None)["observation"] for _ in range(3)]
            with pytest.raises(StopIteration):
                hook.sample(None)
            assert torch.equal(torch.cat(seen).flatten().sort().values, torch.arange(12.0))

    def test_state_is_the_buffer(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(12), batch_size=4)
        hook = DeviceReplayHook(buffer)
        hook.extend(self.rows(3, 4))
        other = DeviceReplayHook(ReplayBuffer(storage=LazyTensorStorage(12), batch_size=4))
        other.load_state_dict(hook.state_dict())
        assert torch.equal(other.replay_buffer[:]["observation"], buffer[:]["observation"])

    def test_refuses_a_buffer_without_batch_size(self):
        with pytest.raises(ValueError, match="expected a batch_size, received None"):
            DeviceReplayHook(ReplayBuffer(storage=LazyTensorStorage(12)))


class TestDeviceLogHook:
    def batch(self, reward, done):
        reward, done = torch.tensor(reward).unsqueeze(-1), torch.tensor(done).unsqueeze(-1)
        return TensorDict({"next": {"reward": reward, "done": done}}, batch_size=reward.shape[:2])

    def make(self, **options):
        hook = DeviceLogHook(DeviceMetrics("cpu"), **options)
        registered = []
        hook.register(
            trainer := SimpleNamespace(
                collected_frames=0,
                register_op=lambda stage, op: registered.append(stage),
                register_module=lambda name, module: registered.append(name),
            )
        )
        assert registered == ["post_steps_log", "shutdown", "device_log"]
        return hook, trainer

    def test_rows_by_hand(self):
        hook, trainer = self.make(interval=8, show=("episode/mean_return", "absent"))
        trainer.collected_frames = 4
        assert hook(self.batch([[1.0, 2.0], [3.0, 4.0]], [[False, False], [False, True]])) is None
        assert hook.row == {}
        trainer.collected_frames = 8
        shown = hook(self.batch([[5.0, 6.0], [7.0, 9.0]], [[True, False], [False, False]]))
        # episodes: env 1 earned 3 + 4 in 2 steps, env 0 earned 1 + 2 + 5 in 3
        assert shown == {"episode/mean_return": 7.5, "log_pbar": True}
        speed = hook.row.pop("time/frames_per_second")
        assert speed > 0
        assert hook.row == {
            "batch/reward": 37 / 8,
            "batch/reward_max": 9.0,
            "episode/mean_return": 7.5,
            "episode/mean_length": 2.5,
            "episode/count": 2.0,
        }

    def test_no_episode_no_entry(self):
        hook, trainer = self.make(interval=2)
        trainer.collected_frames = 2
        assert hook(self.batch([[1.0, 1.0]], [[False, False]])) is None
        assert set(hook.row) == {"batch/reward", "batch/reward_max", "time/frames_per_second"}

    def test_last_interval_is_written_once(self):
        hook, trainer = self.make(interval=1000)
        trainer.collected_frames = 2
        hook(self.batch([[1.0, 1.0]], [[False, True]]))
        hook.finish()
        assert hook.row["episode/count"] == 1
        hook.row = {}
        hook.finish()
        assert hook.row == {}

    def test_state_before_the_first_batch_and_after(self):
        hook, trainer = self.make(interval=1000)
        trainer.collected_frames = 2
        hook(self.batch([[1.0, 1.0]], [[False, False]]))
        state = hook.state_dict()
        for start in (False, True):
            other, trainer = self.make(interval=1000)
            if start:
                other.add(self.batch([[9.0, 9.0]], [[True, True]]))
            other.load_state_dict(state)
            trainer.collected_frames = 4
            other(self.batch([[1.0, 1.0]], [[False, True]]))
            other.flush()
            assert other.row["episode/mean_return"] == 4
            assert other.row["batch/reward"] == 1

    def test_refuses(self):
        with pytest.raises(ValueError, match="interval: expected at least 1 frame"):
            DeviceLogHook(DeviceMetrics("cpu"), interval=0)
        with pytest.raises(RuntimeError, match="expected a trainer"):
            DeviceLogHook(DeviceMetrics("cpu")).flush()
