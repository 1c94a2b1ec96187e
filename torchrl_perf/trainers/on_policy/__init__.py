"""What every on-policy algorithm shares."""

from torchrl_perf.moved import moved_from as _moved_from

__all__: list[str] = []

__getattr__ = _moved_from(__name__)
