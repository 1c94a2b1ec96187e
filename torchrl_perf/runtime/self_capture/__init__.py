"""Modules that record themselves: forward and backward pass as CUDA graphs, inside an ordinary eager loop."""

from torchrl_perf.runtime.self_capture.conditions import SelfCaptureWarning, plain_calls
from torchrl_perf.runtime.self_capture.in_place import InPlaceReplays
from torchrl_perf.runtime.self_capture.module import is_recorded, self_capturing
from torchrl_perf.runtime.self_capture.substitutes import substituted

__all__ = ["InPlaceReplays", "SelfCaptureWarning", "is_recorded", "plain_calls", "self_capturing", "substituted"]
