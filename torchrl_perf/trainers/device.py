"""Where a run takes place, in which mode and with which precision."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from torchrl_perf.modules.chains import fuse_sequential, lacks_kernel
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.runtime.compile_switch import CompileSwitch
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.runtime.self_capture import plain_calls
from torchrl_perf.trainers.config import RunConfig

logger = logging.getLogger("torchrl_perf")
P = ParamSpec("P")
T = TypeVar("T")


def resolve_device(name: str) -> torch.device:
    """``"auto"`` is CUDA where there is one, else the CPU.

    Raises:
        ValueError: for a name that is no CPU or CUDA device, and for CUDA where there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(
            f"device: expected 'auto', 'cpu', 'cuda' or 'cuda:<index>', received {name!r}. Remedy: one of them."
        )
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: expected a device of this machine, received {name!r}, and PyTorch sees no CUDA. Remedy: "
            "device='cpu'."
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def resolve_mode(mode: str, device: torch.device) -> str:
    """``"auto"`` is ``"graph"`` on CUDA and ``"eager"`` on a CPU.

    Raises:
        ValueError: for ``"graph"`` on a CPU.
    """
    if mode == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if mode == "graph" and device.type != "cuda":
        raise ValueError(f"mode='graph': expected a CUDA device, received {device}. Remedy: mode='compile' or 'eager'.")
    return mode


def as_in_mode(mode: str) -> contextlib.AbstractContextManager[None]:
    """Within it, parts run as the mode says: under "eager" and "compile" none becomes a graph by itself.

    What those modes compute is what "graph" is compared with. Under "graph" the parts that are left outside of the
    captured iteration, such as a policy that acts in an env on the host, may.
    """
    return contextlib.nullcontext() if mode == "graph" else plain_calls()


def acceleration_of(config: RunConfig) -> Acceleration:
    """The switches of :mod:`torchrl_perf.runtime.precision` as a run's settings have them."""
    return Acceleration(config.precision, compile_mode=config.compile_mode)


def kernels_of(config: RunConfig, mode: str, device: torch.device) -> CompileSwitch:
    """What decides in which iteration the functions of a run are compiled.

    Args:
        config: settings of the run.
        mode: as :func:`resolve_mode` gives it; ``"eager"`` compiles nothing, unless it is what ``"auto"`` is on a CPU.
        device: of the run.
    """
    plain = mode == "eager" and config.mode != "auto"
    compile = None if plain else partial(acceleration_of(config).compile, device=device)
    return CompileSwitch(compile, at=config.compiles_on(device.type), may_go_on=config.mode == "auto")


def fuse_when_compiled(kernels: CompileSwitch, parts: Iterable[Any], precision: str) -> None:
    """Perceptrons among ``parts`` run as kernels, and layer by layer until the functions of the run are compiled.

    A perceptron is a network of the package's or an ``nn.Sequential`` of such layers, see
    :func:`~torchrl_perf.modules.chains.fuse_sequential`. Their kernels take Triton seconds to compile, as the
    compiler's own do, and are repaid as late.

    Args:
        kernels: decides when.
        parts: anything; modules among them are looked through, once they are made and before they are called.
        precision: of the products of an ``nn.Sequential``.
    """
    modules = list(dict.fromkeys(part for each in parts if isinstance(each, nn.Module) for part in each.modules()))
    if left := [part for part in modules if lacks_kernel(part) and _is_on_cuda(part)]:
        logger.warning(
            "%d of the networks run layer by layer, such as %s: expected float32 linear layers with one and the same "
            "activation between them. Remedy: none is needed; layers as torchrl_perf.modules.FusedMLP has them run as "
            "one kernel.",
            len(left),
            [type(layer).__name__ for layer in left[0].children()],
        )
    networks: list[Any] = [
        part for part in modules if isinstance(part, MixedSequential) or fuse_sequential(part, precision)
    ]
    if not kernels.changes:
        return

    def fuse(on: bool) -> None:
        for network in networks:
            network.fuses = on

    fuse(False)
    kernels.follow(fuse)


def _is_on_cuda(network: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in network.parameters())


def accelerated(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A trainer's method, run with ``trainer.acceleration`` active on ``trainer.device``, in ``trainer.mode``.

    Every method that computes is wrapped, and not the loop around them alone: a function that was compiled under other
    settings is compiled anew when the method is called on its own.
    """

    @functools.wraps(method)
    def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.acceleration.active(self.device), as_in_mode(self.mode):
            return method(self, *args, **kwargs)

    return run
