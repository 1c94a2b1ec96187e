"""Options, controllers and batches that several test files use."""

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_perf.modules import OptionController, OptionSet, TimeHazard

OBS = 3


class Fixed(nn.Module):
    """Outputs that do not depend on the input."""

    def __init__(self, values, device="cpu"):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, device=device))

    def forward(self, x):
        return self.values.expand(*x.shape[:-1], -1)


def rows(*batch, device="cpu", option=0, age=0, **entries):
    """A TensorDict with observations and the state of the options."""
    state = {
        "observation": torch.zeros(*batch, OBS, device=device),
        "option": torch.full(batch, option, device=device),
        "option_age": torch.full(batch, age, device=device),
    }
    return TensorDict(state | entries, batch, device=device)


def make_controller(logits=(0.0, 0.0, 0.0), device="cpu", selector=None, example=None, controller=None, **options):
    """A controller with fixed logits; keyword arguments are those of the options."""
    names = tuple(f"o{index}" for index in range(len(logits)))
    selector = Fixed(logits, device) if selector is None else selector
    example = rows(4, device=device) if example is None else example
    made = OptionController(selector, OptionSet(names, **options), example=example, **(controller or {}))
    return made.to(device)


TRADING_NAMES = ("open_long", "open_short", "close", "trend", "scalp", "wait")
TRADING_MIN_DURATION = (5, 5, 3, 10, 5, 5)
TRADING_DURATIONS = (7.50, 7.50, 52.0, 15.67, 7.07, 9.06)


def trading_hazard():
    """The time hazards of the six options of a trading system."""
    return TimeHazard(
        6,
        hazard_max=(20, 20, 50, 50, 15, 30),
        steepness=(0.4, 0.4, 0.0, 0.3, 0.6, 0.5),
        cap=(1.0, 1.0, 0.02, 0.15, 1.0, 0.5),
        hard_max=(True, True, False, False, True, True),
    )
