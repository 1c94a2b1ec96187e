"""Parts that record themselves as CUDA graphs inside an ordinary eager loop: modules, optimisers, replay buffers."""

from torchrl_perf.runtime.self_capture.conditions import DEVICES, SelfCaptureWarning, plain_calls
from torchrl_perf.runtime.self_capture.held import HELD, HeldReplays
from torchrl_perf.runtime.self_capture.in_place import InPlaceReplays
from torchrl_perf.runtime.self_capture.module import is_recorded, self_capturing
from torchrl_perf.runtime.self_capture.substitutes import substituted

__all__ = [
    "DEVICES",
    "HELD",
    "HeldReplays",
    "InPlaceReplays",
    "SelfCaptureWarning",
    "is_recorded",
    "plain_calls",
    "self_capturing",
    "substituted",
]
