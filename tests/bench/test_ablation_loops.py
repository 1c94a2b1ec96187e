"""The loops of the ablation: a reset goes back to the start, whichever optimiser ran."""

import pytest
import torch

from torchrl_perf.bench.ablation_loops import DQNLoop, PPOLoop, SACLoop


@pytest.mark.parametrize("kind", [PPOLoop, DQNLoop, SACLoop])
@pytest.mark.parametrize("fused", [True, False])
def test_iterations_after_a_reset_repeat_those_after_the_start(kind, fused):
    loop = kind("ieee", compiles=False, quick=True, device=torch.device("cpu"))
    losses = []
    for _ in range(2):
        loop.reset()
        for _ in range(3):
            loop.select(fused, channels_last=False)
            loop.iteration()
        losses.append(loop.loss_value())
    loop.close()
    assert losses[0] == losses[1]
