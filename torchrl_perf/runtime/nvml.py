"""Readings of an NVIDIA GPU through NVML: once, or in a separate thread; none if there is no NVML.

NVML's Python binding (``pynvml``, of the package nvidia-ml-py) is imported at first use. Nothing here raises if it, a
driver or a GPU is missing, and readings that a card does not have (utilisation of a MIG slice, for one) are left out.
NVML asks the driver, so a reading neither waits for the device's work nor touches a stream.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

__all__ = ["GpuReader", "GpuSampler", "read_gpu", "visible_id"]

MIB = 2**20
UUID_KINDS = ("GPU-", "MIG-")
JOIN_SECONDS = 2.0


def visible_id(index: int, environ: Mapping[str, str] | None = None) -> str | None:
    """The driver's name of CUDA device ``index``: a number, or the UUID in CUDA_VISIBLE_DEVICES.

    Numbers are those of the PCI bus, which CUDA shares where all cards are alike or CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        index: CUDA device of the process.
        environ: environment of the process; by default this one's.

    Returns:
        For example ``"3"`` or ``"GPU-1d2c..."`` (possibly cut short); None if the process sees no such device.
    """
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    ids: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        # CUDA itself ignores the first entry that it does not understand and all after it.
        if not (entry.isdecimal() or entry.startswith(UUID_KINDS)) or entry in ids:
            break
        ids.append(entry)
    return ids[index] if 0 <= index < len(ids) else None


class GpuReader:
    """Reads one GPU through NVML, which it keeps open. Without NVML, a driver or the GPU every reading is empty.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, a ``torch.device``; anything else has no readings.
        nvml: module with NVML's functions; by default ``pynvml``.
        environ: environment of the process whose device is meant, for its CUDA_VISIBLE_DEVICES; by default this
            process, whose device is then known exactly once CUDA is initialised.
    """

    def __init__(self, device: Any = "cuda", *, nvml: Any = None, environ: Mapping[str, str] | None = None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        kind, _, number = str(device).partition(":")
        if kind != "cuda":
            return
        with suppress(Exception):
            if nvml is None:
                import pynvml as nvml
            nvml.nvmlInit()
            self._nvml = nvml
            self._handle = _find_handle(nvml, int(number) if number else None, environ)
        if self._handle is None:
            self.close()

    @property
    def available(self) -> bool:
        """Whether there is a GPU to read."""
        return self._handle is not None

    def read(self) -> dict[str, float]:
        """Read the GPU once; takes about a millisecond.

        Returns:
            ``gpu/utilization`` (percent of the last sixth of a second to second in which a kernel ran),
            ``gpu/memory_used_mib`` and ``gpu/memory_total_mib`` (of all processes), ``gpu/temperature_c``,
            ``gpu/power_w``; those that the card has, none where there is no card or the driver fails.
        """
        return self._collect(
            {
                "gpu/utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                "gpu/memory_used_mib": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / MIB,
                "gpu/memory_total_mib": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total / MIB,
                "gpu/temperature_c": _temperature,
                "gpu/power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            },
            float,
        )

    def facts(self) -> dict[str, Any]:
        """Read the constant properties of the GPU.

        Returns:
            name, uuid, driver, cuda_driver (the newest CUDA that the driver runs, such as ``"12.8"``), power_limit_w,
            power_default_w, power_max_w; those that the card has.
        """
        return self._collect(
            {
                "name": lambda nvml, gpu: _text(nvml.nvmlDeviceGetName(gpu)),
                "uuid": lambda nvml, gpu: _text(nvml.nvmlDeviceGetUUID(gpu)),
                "driver": lambda nvml, _: _text(nvml.nvmlSystemGetDriverVersion()),
                "cuda_driver": lambda nvml, _: _cuda_version(nvml.nvmlSystemGetCudaDriverVersion()),
                "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
                "power_default_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
                "power_max_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[1] / 1000,
            },
            lambda value: value,
        )

    def close(self) -> None:
        """Shut NVML down; further calls do nothing."""
        nvml, self._nvml, self._handle = self._nvml, None, None
        if nvml is not None:
            with suppress(Exception):
                nvml.nvmlShutdown()

    def _collect(self, fields: Mapping[str, Callable[[Any, Any], Any]], kind: Callable[[Any], Any]) -> dict[str, Any]:
        """The fields that can be read, each as ``kind``."""
        found: dict[str, Any] = {}
        if self._handle is None:
            return found
        for name, field in fields.items():
            with suppress(Exception):
                found[name] = kind(field(self._nvml, self._handle))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_gpu(device: Any = "cuda", *, nvml: Any = None) -> dict[str, float]:
    """Read a GPU once, with NVML opened and closed around it; see :meth:`GpuReader.read`.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, a ``torch.device``.
        nvml: module with NVML's functions; by default ``pynvml``.

    Returns:
        Names under ``gpu/`` and numbers; empty where there is no NVML or no such GPU.
    """
    with GpuReader(device, nvml=nvml) as reader:
        return reader.read()


class GpuSampler:
    """Reads a GPU at intervals on a daemon thread, so that a row of metrics shows the mean of its interval.

    Without NVML or a GPU no thread is started and nothing is ever returned. Errors of NVML in mid-run leave the
    readings out until it works again.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, a ``torch.device``.
        interval: seconds between two readings.
        nvml: module with NVML's functions; by default ``pynvml``.

    Raises:
        ValueError: if ``interval`` is not positive.
    """

    def __init__(self, device: Any, interval: float = 1.0, *, nvml: Any = None) -> None:
        if not interval > 0:
            raise ValueError(
                f"interval: expected a positive number of seconds, received {interval}. Remedy: interval=1.0, for "
                "example."
            )
        self.interval = interval
        self._reader = GpuReader(device, nvml=nvml)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._readings: list[dict[str, float]] = []
        self._last: dict[str, float] = {}

    def start(self) -> Self:
        """Start reading; does nothing without a GPU, after ``close``, or when called again."""
        if self._thread is None and self._reader.available and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()
        return self

    def latest(self) -> dict[str, float]:
        """Return the mean of each reading since the last call, or the newest reading if there was none since.

        Returns:
            Names as in :meth:`GpuReader.read`; empty without NVML, before the first reading and while NVML fails.
        """
        with self._lock:
            readings = self._readings or [self._last]
            self._readings = []
        means: dict[str, float] = {}
        for name in {name: None for reading in readings for name in reading}:
            values = [reading[name] for reading in readings if name in reading]
            means[name] = sum(values) / len(values)
        return means

    def close(self) -> None:
        """End the thread and shut NVML down; further calls do nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                return  # the driver hangs: NVML stays open for the thread, which ends with the process
        self._reader.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            reading = self._reader.read()
            with self._lock:
                self._last = reading
                if reading:
                    self._readings.append(reading)
                # A run that never asks must not fill the memory.
                del self._readings[:-3600]
            self._stop.wait(self.interval)


def _find_handle(nvml: Any, index: int | None, environ: Mapping[str, str] | None) -> Any:
    """NVML's handle of a CUDA device, or None."""
    torch = sys.modules.get("torch")
    is_known = environ is None and torch is not None and torch.cuda.is_initialized()
    if index is None:
        index = int(torch.cuda.current_device()) if torch is not None and is_known else 0
    name = visible_id(index, environ)
    if name is not None and name.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    if torch is not None and is_known:
        # CUDA may number the cards by speed, NVML numbers them by bus: the UUID is the same for both.
        with suppress(Exception):
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    if name is None:
        return None
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    for number in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(name):
            return handle
    return None


def _temperature(nvml: Any, gpu: Any) -> float:
    # NVML 13 announces the end of the first function; drivers before it lack the second.
    with suppress(Exception):
        return nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
    return nvml.nvmlDeviceGetTemperatureV(gpu, nvml.NVML_TEMPERATURE_GPU)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
