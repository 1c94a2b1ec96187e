"""Small runs of traders, and what can be seen of one."""

import gzip

import torch

from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer

SMALL = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "device": "cpu", "mode": "eager", "hidden_size": 16},
    **{"capacity": 64, "minibatch_size": 16, "updates_per_iteration": 2, "learning_starts": 16, "option_capacity": 16},
    **{"window": 2, "max_episode_steps": 6, "logger": "none", "max_option_share": 1.0, "min_options_used": 1},
}
EXPOSURE = {"options": "exposure", "semantics": "target"}


def make(parts=None, **options):
    return OptionsMarketTrainer(OptionsMarketConfig.without_task(**{**SMALL, **options}), **(parts or {}))


def parameters(trainer):
    return {name: param.detach().clone() for name, param in trainer.loss.named_parameters()}


def write_prices(path, bars=150, seed=0):
    """A file of dates and closes as skfolio's."""
    closes = (0.02 * torch.randn(bars, generator=torch.Generator().manual_seed(seed))).cumsum(0).exp()
    days = [f"2001-{1 + i // 28:02d}-{1 + i % 28:02d}" for i in range(bars)]
    rows = [f"{day},{100 * float(close)}" for day, close in zip(days, closes, strict=True)]
    path.write_bytes(gzip.compress("\n".join(["Date,SP500", *rows]).encode()))
    return path
