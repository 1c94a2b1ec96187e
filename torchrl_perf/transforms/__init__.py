"""Transforms that run on whole batches: advantages in a script, in a replay buffer or in a TorchRL trainer."""

from torchrl_perf.transforms.gae import GAETransform

__all__ = ["GAETransform"]
