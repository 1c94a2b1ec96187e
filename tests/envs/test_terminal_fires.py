"""The fires that end an episode are drawn for each row and each episode."""

import torch

from torchrl_perf.envs import FuelBreaks


def terminal_burns(env):
    """Burned fractions of the same single break in each row, ``[N]``."""
    root = env.reset()
    root["action"] = torch.zeros_like(env.rand_action(root.clone())["action"])
    return env.step(root)["next", "burned"].flatten()


def test_rows_and_episodes_have_fires_of_their_own():
    env = FuelBreaks(16, size=(6, 6), budget=1, fires=3, seed=0, reward="terminal")
    first, second = terminal_burns(env), terminal_burns(env)
    assert first.unique().numel() > 1
    assert not torch.equal(first, second)
