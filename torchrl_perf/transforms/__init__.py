"""Transforms that run on whole batches: advantages in a script, in a replay buffer or in a TorchRL trainer."""

from torchrl_perf.transforms.gae import GAETransform
from torchrl_perf.transforms.n_step import NStepTransform

__all__ = ["GAETransform", "NStepTransform"]
