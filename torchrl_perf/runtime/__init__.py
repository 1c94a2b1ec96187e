"""Running things: CUDA graph capture, compilation, the host-wait audit, clocks and the machine card.

The only home of `torch.compile`, CUDA graphs, device synchronisation, streams and clocks in the package.
"""

from torchrl_perf.runtime.audit import HostSync, HostSyncError, HostSyncReport, host_syncs, no_host_sync
from torchrl_perf.runtime.capture import Captured, CaptureError, capture, is_capturing
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.runtime.machine import machine_card
from torchrl_perf.runtime.timing import Stopwatch, Timing, synchronize, time_cuda

__all__ = [
    "CaptureError",
    "Captured",
    "HostSync",
    "HostSyncError",
    "HostSyncReport",
    "Stopwatch",
    "Timing",
    "capture",
    "compiled",
    "host_syncs",
    "is_capturing",
    "machine_card",
    "no_host_sync",
    "synchronize",
    "time_cuda",
]
