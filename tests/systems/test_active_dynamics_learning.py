"""A short run learns the limit cycle well enough to predict it."""

import dataclasses

import torch

from torchrl_perf.systems.active_dynamics import ACTIVE_DYNAMICS_PRESETS, ActiveDynamicsTrainer


def test_predictions_beat_persistence_on_a_limit_cycle():
    torch.set_num_threads(1)
    settings = {"num_envs": 8, "num_steps": 25, "updates": 8, "samples": 2, "minibatch_size": 12, "window": 12}
    preset = ACTIVE_DYNAMICS_PRESETS["limit_cycle"]
    config = dataclasses.replace(preset, **settings, inputs="random", device="cpu", logger="none")
    trainer = ActiveDynamicsTrainer(config)
    before = trainer.evaluate()
    for _ in range(30):
        trainer.step()
    after = trainer.evaluate()
    trainer.close()
    assert before.r2[-1] < 0.3
    # ten steps are a radian along the cycle
    assert after.r2[-1] > 0.5 > max(after.persistence[-1], after.still[-1]) + 0.2, str(after)
    assert after.r2[0] > 0.85
