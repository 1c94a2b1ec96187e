"""Small FuelBreaks, and a few steps of one."""

import torch

from torchrl_perf.envs import FuelBreaks, Landscape

MODES = ["sequential", "one_shot"]
REWARDS = ["terminal", "shaped"]


def small(rows=3, **more):
    return FuelBreaks(rows, **{"size": (4, 5), "budget": 3, "fires": 5, "seed": 0, **more})


def hilly(rows=6, **more):
    land = Landscape.fractal(2, (5, 4), count=3, wind=(3.0, 1.0), bare=0.2, base=0.4)
    return FuelBreaks(rows, **{"landscape": land, "budget": 4, "fires": 9, "seed": 0, **more})


def play(env, steps, policy=None):
    td, log = env.reset(), []
    policy = policy or env.rand_action
    for _ in range(steps):
        out, td = env.step_and_maybe_reset(policy(td))
        log.append(out.clone())
    return torch.stack(log, 1)
