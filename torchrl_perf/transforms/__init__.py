"""Transforms that run on whole batches: advantages in a script, in a replay buffer or in a TorchRL trainer."""

from torchrl_perf.modules.policy_state import PolicyState
from torchrl_perf.transforms.action_bounds import ActionBounds
from torchrl_perf.transforms.gae import GAETransform
from torchrl_perf.transforms.hidden_entries import HiddenEntries
from torchrl_perf.transforms.n_step import NStepTransform
from torchrl_perf.transforms.option_segments import OptionSegments
from torchrl_perf.transforms.option_state import OptionState
from torchrl_perf.transforms.reward_components import ComponentAdvantage, RewardComponents
from torchrl_perf.transforms.running_norm import RunningNorm, RunningRewardNorm

__all__ = [
    "ActionBounds",
    "ComponentAdvantage",
    "GAETransform",
    "HiddenEntries",
    "NStepTransform",
    "OptionSegments",
    "OptionState",
    "PolicyState",
    "RewardComponents",
    "RunningNorm",
    "RunningRewardNorm",
]
