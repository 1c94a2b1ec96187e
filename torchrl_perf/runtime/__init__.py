"""Running things: CUDA graph capture, compilation, the host-wait audit, clocks and the machine card.

The only home of ``torch.compile``, CUDA graphs, device synchronisation, streams and clocks in the package.
"""

from torchrl_perf.runtime.capture import Captured, CaptureError, capture, is_capturing
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.runtime.loss_scale import LossScale
from torchrl_perf.runtime.machine import machine_card
from torchrl_perf.runtime.memory import LeakCheck, LeakReport, MemoryGuard
from torchrl_perf.runtime.nvml import GpuReader, GpuSampler, read_gpu
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.runtime.timing import Stopwatch, Timing, synchronize, time_cuda
from torchrl_perf.runtime.transfer import Download, PackedRecord, Upload
from torchrl_perf.runtime.waits.audit import HostSync, HostSyncError, HostSyncReport, host_syncs, no_host_sync

__all__ = [
    "Acceleration",
    "CaptureError",
    "Captured",
    "Download",
    "GpuReader",
    "GpuSampler",
    "HostSync",
    "HostSyncError",
    "HostSyncReport",
    "LeakCheck",
    "LeakReport",
    "LossScale",
    "MemoryGuard",
    "PackedRecord",
    "Stopwatch",
    "Timing",
    "Upload",
    "capture",
    "compiled",
    "host_syncs",
    "is_capturing",
    "machine_card",
    "no_host_sync",
    "read_gpu",
    "synchronize",
    "time_cuda",
]
