"""A run of any trainer, which ``torchrl_perf.trainers.train`` starts: folder, loop, checkpoints, guards, memory."""

from torchrl_perf.moved import moved_from as _moved_from

__all__: list[str] = []

__getattr__ = _moved_from(__name__)
