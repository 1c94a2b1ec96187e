"""Checks of the GPU: driver, precision, graphs, memory, power. On a machine without CUDA they do not apply."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, cast

import torch

from torchrl_perf.runtime.doctor.checks import Finding, short_error
from torchrl_perf.runtime.nvml import GpuReader

__all__ = ["device_probes"]

MIB, GIB = 2**20, 2**30
PINNED_BYTES = 64 * MIB
LITTLE_FREE_GIB = 1.0
BUSY_PERCENT = 10.0


def device_probes(device: Any = "cuda") -> dict[str, Callable[[], Finding]]:
    """The checks of this module, by name.

    Args:
        device: CUDA device to look at.
    """
    probes: dict[str, Callable[[torch.device], Finding]] = {
        "GPU": _gpu,
        "TF32": _tf32,
        "bf16": _bf16,
        "CUDA graph": _graph,
        "GPU memory": _free_memory,
        "GPU in use": _in_use,
        "power limit": _power,
    }
    return {
        "CUDA": partial(_cuda, device),
        **{name: partial(_only_on_cuda(probe), device) for name, probe in probes.items()},
        "pinned memory": _pinned,
    }


def _only_on_cuda(probe: Callable[[torch.device], Finding]) -> Callable[[Any], Finding]:
    """A check that does not apply where CUDA cannot be used; ``_cuda`` says why it cannot."""

    @wraps(probe)
    def checked(device: Any) -> Finding:
        return probe(torch.device(device)) if torch.cuda.is_available() else Finding("n/a", "no CUDA.")

    return checked


def _cuda(device: Any) -> Finding:
    """Whether torch can use the card that the driver shows: the build of torch, the driver, and what is visible."""
    with GpuReader(device, environ={}) as reader:
        facts = reader.facts()
    card = f"{facts.get('name', 'a GPU')}, driver {facts.get('driver', 'unknown')}" if facts else "no NVIDIA driver"
    built, driver_cuda = torch.version.cuda, facts.get("cuda_driver")
    if torch.cuda.is_available():
        found = (
            f"torch built for CUDA {built}, driver {facts.get('driver', 'unknown')} runs up to {driver_cuda or '?'}."
        )
        if built and driver_cuda and _number(driver_cuda) < _number(built):
            # within one major release the older driver still runs it, as CUDA promises; new kernels may not load
            return Finding("warn", found, f"a driver for CUDA {built}, or a torch build for CUDA {driver_cuda}.")
        return Finding("ok", found)
    if not facts:
        build = f"torch built for CUDA {built}" if built else "torch built without CUDA"
        return Finding("n/a", f"{build}, {card}: all runs on the CPU.")
    if built is None:
        remedy = f"a torch build for CUDA {driver_cuda or 'of the driver'} or older, from pytorch.org/get-started."
        return Finding("fail", f"{card} is there, torch is built without CUDA.", remedy)
    if driver_cuda and _number(driver_cuda) < _number(built):
        remedy = f"a newer driver, or a torch build for CUDA {driver_cuda}."
        return Finding("fail", f"{card} runs CUDA up to {driver_cuda}, torch is built for {built}.", remedy)
    return Finding("fail", f"{card} is there, torch sees none of it ({_cuda_error()}).", "check CUDA_VISIBLE_DEVICES.")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _cuda_error() -> str:
    """What CUDA says when it is made to start."""
    try:
        torch.cuda.init()
    except Exception as error:
        return short_error(error)
    return "no device is visible"


def _gpu(device: torch.device) -> Finding:
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        return Finding("fail", f"{device} is not there, {count} visible.", "another --device, or CUDA_VISIBLE_DEVICES.")
    properties = torch.cuda.get_device_properties(device)
    own, built_for = f"sm_{properties.major}{properties.minor}", torch.cuda.get_arch_list()
    found = f"{properties.name}, {properties.total_memory / GIB:.1f} GiB, {own}, {count} visible."
    if built_for and not any(_runs_on(arch, 10 * properties.major + properties.minor) for arch in built_for):
        remedy = f"a torch build for {own}; this one has {', '.join(built_for)}."
        return Finding("fail", found, remedy)
    return Finding("ok", found)


def _runs_on(arch: str, card: int) -> bool:
    """Whether what was built for ``sm_80`` or ``compute_80`` runs on a card such as 90."""
    kind, _, version = arch.partition("_")
    number = int("".join(filter(str.isdigit, version)) or 0)
    if version[-1:] == "a":  # for this very card, no newer one
        return number == card
    # PTX is translated for any newer card, a binary runs on newer ones of its major release
    return number <= card and (kind == "compute" or number // 10 == card // 10)


def _tf32(device: torch.device) -> Finding:
    """Both of torch's settings, the flags of old and fp32_precision since 2.9; reading refuses if they disagree."""
    settings: dict[str, Any] = {}
    probes: dict[str, Callable[[], Any]] = {
        "matmul_precision": torch.get_float32_matmul_precision,
        "matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
        "fp32_precision": lambda: cast("Any", torch.backends).fp32_precision,
    }
    conflict = ""
    for name, probe in probes.items():
        try:
            settings[name] = probe()
        except AttributeError:
            continue
        except Exception as error:
            conflict = short_error(error)
    found = ", ".join(f"{name} {value}" for name, value in settings.items()) + "."
    if conflict:
        remedy = "set TF32 through one of torch's two APIs only, at best by the setting precision of a run."
        return Finding("warn", f"{found} The two APIs disagree ({conflict}).", remedy)
    if torch.cuda.get_device_capability(device)[0] < 8:
        return Finding("n/a", f"{found} This card has no TF32.")
    return Finding("ok", f"{found} A run sets its own by precision and restores these.")


def _bf16(device: torch.device) -> Finding:
    with torch.cuda.device(device):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Finding("ok", "supported by the card.")
    return Finding("warn", "not supported by the card, emulated at best.", "precision='fp16' or 'ieee'.")


def _graph(device: torch.device) -> Finding:
    """Capture and replay one addition."""
    try:
        with torch.cuda.device(device):
            value = torch.ones(8, device=device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                value.add_(1.0)  # warm up outside of the graph
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value.add_(1.0)
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            sums = value.sum().item()
            graph.reset()
    except Exception as error:
        remedy = "mode='compile' or 'eager'; end other users of the card that profile or debug it."
        return Finding("fail", f"capture fails ({short_error(error)}).", remedy)
    if sums != 8 * 4.0:
        return Finding("fail", f"two replays gave {sums / 8}, expected 4.0.", "mode='compile', and a newer driver.")
    return Finding("ok", "captured and replayed.")


def _free_memory(device: torch.device) -> Finding:
    free, total = torch.cuda.mem_get_info(device)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free."
    if free < LITTLE_FREE_GIB * GIB:
        return Finding("fail", found, "end the processes that nvidia-smi lists, or another device.")
    if free < total / 2:
        return Finding("warn", found, "another process holds most of the card: see nvidia-smi.")
    return Finding("ok", found)


def _in_use(device: torch.device) -> Finding:
    with GpuReader(device) as reader:
        reading = reader.read()
    if "gpu/utilization" not in reading:
        missing = "nvidia-ml-py is not installed" if not _has_pynvml() else "NVML does not tell"
        return Finding("n/a", f"{missing}: no readings of utilisation, temperature and power.")
    parts = [f"{reading['gpu/utilization']:.0f} % utilised"]
    parts += [f"{reading['gpu/temperature_c']:.0f} °C"] if "gpu/temperature_c" in reading else []
    parts += [f"{reading['gpu/power_w']:.0f} W"] if "gpu/power_w" in reading else []
    found = f"{', '.join(parts)} before the run."
    if reading["gpu/utilization"] > BUSY_PERCENT:
        return Finding("warn", found, "another process computes here: its run and yours slow each other.")
    return Finding("ok", found)


def _has_pynvml() -> bool:
    with suppress(Exception):
        import pynvml  # noqa: F401

        return True
    return False


def _power(device: torch.device) -> Finding:
    with GpuReader(device) as reader:
        facts = reader.facts()
    limit, default, most = (facts.get(f"power_{name}_w") for name in ("limit", "default", "max"))
    if limit is None:
        return Finding("n/a", "NVML does not tell.")
    found = f"{limit:.0f} W, default {_watts(default)}, at most {_watts(most)}."
    if default is not None and limit < default - 0.5:
        return Finding("warn", found, f"`nvidia-smi -pl {default:.0f}` as root; a lower limit lowers the clocks.")
    return Finding("ok", found)


def _watts(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} W"


def _pinned() -> Finding:
    """The limit of locked memory, and on CUDA whether a block can be pinned, which is not bound to that limit."""
    limit = "unknown"
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / MIB:.0f} MiB"
    if not torch.cuda.is_available():
        return Finding("n/a", f"no CUDA, no pinning; ulimit -l is {limit}.")
    try:
        block = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except Exception as error:
        remedy = "raise `ulimit -l`, or the container's memory limit; transfers would wait for the host."
        return Finding("fail", f"{PINNED_BYTES // MIB} MiB cannot be pinned ({short_error(error)}), ulimit -l {limit}.",
                       remedy)  # fmt: skip
    del block
    return Finding("ok", f"{PINNED_BYTES // MIB} MiB pinned; ulimit -l is {limit}.")
