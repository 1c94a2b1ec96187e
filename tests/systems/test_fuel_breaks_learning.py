"""Breaks are learnt: a small landscape in seconds, the whole task from the preset within minutes."""

import dataclasses

import pytest

from torchrl_perf.systems.fuel_breaks import FUEL_BREAKS_PRESETS, FuelBreaksTrainer
from torchrl_perf.systems.fuel_breaks.evaluation import compare

PRESET = dataclasses.replace(FUEL_BREAKS_PRESETS["FuelBreaks"], device="cpu", mode="eager", logger="none")
SMALL = dataclasses.replace(
    PRESET,
    **{"size": 8, "budget": 0.125, "num_steps": 8, "n_step": 8, "total_steps": 11_000, "learning_starts": 2_048},
    **{"hidden_size": 8, "demonstrations": 16, "eps_frames": 4_000, "learning_rate": 2e-3},
)


def trained(config):
    """Burned fractions of the trained policy and of rules."""
    trainer = FuelBreaksTrainer(config)
    for _ in range(config.iterations):
        trainer.step()
    trainer.close()
    return compare(trainer.policy, trainer.env, fires=512).burned


@pytest.mark.slow
def test_a_small_landscape_burns_less():
    burned = trained(SMALL)  # .42 to .45; random .55, DomiRank .50, column .32
    assert burned["policy"] < min(burned["random"] - 0.08, burned["domirank"] - 0.03)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(3))
def test_the_preset_parts_the_landscape(seed):
    """Random breaks leave .83 to burn, a column .42."""
    assert trained(dataclasses.replace(PRESET, seed=seed))["policy"] <= 0.60
