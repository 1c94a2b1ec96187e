"""PPO's extras for any actor: closed-form divergence, range of the value's change, entropy schedule and floor."""

import pytest
import torch

from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import PPOConfig, PPOTrainer

TINY = {"num_envs": 8, "num_steps": 8, "total_steps": 640, "epochs": 2, "minibatches": 2, "hidden_size": 32}


def make(**options):
    return PPOTrainer(PPOConfig(**{**TINY, "logger": "none", "device": "cpu", **options}))


@pytest.mark.parametrize("env", ["CartPole", "Pendulum"])
def test_the_closed_form_stops_after_one_update(env):
    trainer = make(env=env, kl_estimate="closed_form", target_kl=1e-6, epochs=4, learning_rate=0.05)
    trainer.step()
    with no_host_sync():
        trainer.iteration()
    row = trainer.metrics.flush(128)
    # the first update of an iteration sees the rounding of no divergence, each later one far more
    assert row["train/updates_applied"] == 1
    assert abs(row.get("train/kl", 0.0)) < 1e-6


def test_the_closed_form_is_what_the_samples_estimate():
    trainer = make(kl_estimate="closed_form", minibatches=1, epochs=1, num_envs=512, learning_rate=0.02)
    batch = trainer.advantage(trainer.collect())
    trainer.update(batch)
    losses = trainer.loss(batch.reshape(-1))
    assert float(losses["kl"]) > 0
    assert float(losses["kl"]) == pytest.approx(float(losses["kl_approx"]), rel=0.5, abs=1e-3)


def test_the_range_of_the_value():
    wide, narrow = (make(clip_value=True, value_clip_epsilon=size) for size in (None, 0.05))
    assert float(wide.loss.clip_value) == pytest.approx(wide.config.clip_epsilon)
    assert float(narrow.loss.clip_value) == pytest.approx(0.05)


def test_what_torchrls_loss_lacks_is_refused():
    with pytest.raises(
        ValueError, match=r"kl_estimate: expected 'samples' with loss='torchrl', .*Remedy: another loss"
    ):
        PPOConfig(loss="torchrl", kl_estimate="closed_form")
    with pytest.raises(ValueError, match=r"entropy_floor: expected None with loss='torchrl', .*received 1\.0"):
        PPOConfig(loss="torchrl", entropy_floor=1.0)
    with pytest.raises(ValueError, match="entropy_frames: expected None or a positive integer, received 0"):
        PPOConfig(entropy_frames=0)


def test_a_floor_needs_one_weight():
    trainer = make()
    with pytest.raises(ValueError, match="entropy_floor: expected None without an entropy bonus"):
        DeviceClipPPOLoss(trainer.actor, trainer.critic, entropy_bonus=False, entropy_floor=1.0)


@pytest.mark.parametrize(("floor", "extra"), [(0.0, 0.0), (10.0, 3.0)])
def test_the_floor_by_hand(floor, extra):
    trainer = make(entropy_coeff=0.01, entropy_floor=floor, entropy_floor_coeff=3.0)
    losses = trainer.loss(trainer.advantage(trainer.collect()).reshape(-1))
    entropy = losses["entropy"]
    expected = -0.01 * entropy + extra * torch.relu(floor - entropy)
    torch.testing.assert_close(losses["loss_entropy"], expected)
