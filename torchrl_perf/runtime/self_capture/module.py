"""Modules whose calls record themselves on CUDA once they repeat, and run as they are everywhere else."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import skip_existing
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn

from torchrl_perf.runtime.self_capture.closed_over import ReadsNoted
from torchrl_perf.runtime.self_capture.conditions import (
    DEVICES,
    SHAPES,
    WARMUP,
    SelfCaptureWarning,
    alone_on_side_stream,
    go_back_on_this_thread,
    may_record,
    no_autocast_cache,
    plain_calls,
)
from torchrl_perf.runtime.self_capture.recording import NotRecordableError, Recording
from torchrl_perf.runtime.self_capture.watch import Watch
from torchrl_perf.runtime.upstream.tensordicts import leaves_of
from torchrl_perf.runtime.upstream.tensors import current_stream
from torchrl_perf.runtime.waits.frames import locate, traceback_chain

__all__ = ["is_recorded", "self_capturing"]

SLOTS = 4
"""Calls of one shape whose backward pass may be outstanding at once; more run eagerly."""
RENEWALS = 8
"""Times that a module records anew because a parameter was replaced."""


_Method = Callable[[Any, TensorDictBase], Any]


class _Shape:
    """Calls of one shape: how many there were, and what is recorded of them."""

    def __init__(self) -> None:
        self.calls = 0
        self.recordings: list[Recording] = []


class _Recorder:
    """The recordings of one module."""

    def __init__(self, method: _Method, module: nn.Module) -> None:
        self._method, self._module = method, weakref.ref(module)
        self.watch = Watch(module)
        self.shapes: dict[Any, _Shape] = {}
        self.refusal: str | None = None
        self._renewals = 0
        self._warms: _Shape | None = None
        self._lock = threading.RLock()
        self._said: set[str] = set()

    def __call__(self, module: nn.Module, tensordict: TensorDictBase) -> Any:
        leaves = self._leaves(tensordict)
        device = _device_of(leaves)
        if device is None:
            return self._method(module, tensordict)
        # one thread at a time: it may choose a recording, or put aliases in the place of parameters
        with self._lock:
            recording = self._recording(tensordict, leaves, device)
            if recording is None:
                return self._eagerly(module, tensordict, leaves, device)
            return recording(tensordict, list(leaves.values()))

    def _leaves(self, tensordict: TensorDictBase) -> dict[Any, Any]:
        """The entries that the call may read, by key; none of other kinds of TensorDict."""
        if type(tensordict) is not TensorDict:
            return {}
        leaves = leaves_of(tensordict)
        read = getattr(self._module(), "recorded_entries", None)
        return leaves if read is None else read(leaves)

    def _recording(
        self, tensordict: TensorDictBase, leaves: dict[Any, Tensor], device: torch.device
    ) -> Recording | None:
        """What repeats this call; None for one that runs eagerly."""
        self._warms = None
        if (name := self.watch.replaced()) is not None:
            self._renew(name)
        if (part := self.watch.hooked()) is not None:
            self._say("hooks", f"{part} has hooks, which a graph would not call. Remedy: remove them")
            return None
        if self.refusal is not None:
            return None
        key = self._key(tensordict, leaves, device)
        shape = self.shapes.get(key)
        if shape is None:
            if len(self.shapes) == SHAPES:
                self._say(
                    "shapes",
                    f"more than {SHAPES} shapes or settings. Remedy: batches of few sizes, such as drop_last=True",
                )
                return None
            shape = self.shapes[key] = _Shape()
        if shape.calls < WARMUP:
            self._warms = shape
            return None
        for recording in shape.recordings:
            if recording.free:
                return recording
        if len(shape.recordings) == SLOTS:
            self._say("slots", f"more than {SLOTS} calls wait for their backward pass. Remedy: backward() after each")
            return None
        return self._record(shape, tensordict, leaves, device)

    def _eagerly(
        self, module: nn.Module, tensordict: TensorDictBase, leaves: dict[Any, Tensor], device: torch.device
    ) -> Any:
        """The call as it is; the last one before a recording finds out what it reads, compiled parts included."""
        shape = self._warms
        if shape is None:
            return self._method(module, tensordict)
        if shape.calls + 1 < WARMUP:
            with no_autocast_cache():  # as when it is recorded, since compiled parts depend on it
                result = self._method(module, tensordict)
        else:
            result = self._read(module, tensordict, leaves, device)
        shape.calls += 1  # a call that raised is none
        return result

    def _read(
        self, module: nn.Module, tensordict: TensorDictBase, leaves: dict[Any, Tensor], device: torch.device
    ) -> Any:
        """The call as it is, in which each read is noted."""
        # a number that is kept on the host is one in a graph: it is followed, registered or not
        given = [*leaves.values(), *[held for held in self.watch.state if held.device == device]]
        # alone: the stance is one for all threads
        with (
            alone_on_side_stream(),
            torch.compiler.set_stance("force_eager"),
            no_autocast_cache(),
            ReadsNoted(given) as reads,
        ):
            result = self._method(module, tensordict)
        self.refusal = self.watch.follow(module, reads.found, device)
        if self.refusal is not None:
            self._say("refusal", f"{self.refusal}. Remedy: register_buffer(...), or a parameter of the module")
        return result

    def _key(self, tensordict: TensorDictBase, leaves: dict[Any, Tensor], device: torch.device) -> Any:
        grad = torch.is_grad_enabled()
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        stream = current_stream(device) if device.type == "cuda" else 0
        kinds = [(key, leaf.shape, leaf.dtype, grad and leaf.requires_grad) for key, leaf in leaves.items()]
        modes = (grad, torch.is_inference_mode_enabled(), autocast, torch.get_float32_matmul_precision())
        modes = (*modes, interaction_type(), skip_existing())
        return (
            device,
            stream,
            tensordict.batch_size,
            tuple(tensordict.names),
            modes,
            self.watch.modes(),
            self.watch.settings(),
            tuple(kinds),
        )

    def _record(
        self, shape: _Shape, tensordict: TensorDictBase, leaves: dict[Any, Tensor], device: torch.device
    ) -> Recording | None:
        module = self._module()
        assert module is not None  # it is being called
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        try:
            with plain_calls():
                recording = Recording(self._method, module, tensordict, leaves, self.watch, device, pool)
        except Exception as error:
            site = (
                "" if isinstance(error, NotRecordableError) else f" at {locate(traceback_chain(error.__traceback__))}"
            )
            self.refusal = f"{type(error).__name__}{site}: {error}"
            self._say("refusal", f"{self.refusal}. Remedy: no host wait and no shape that depends on numbers")
            return None
        shape.recordings.append(recording)
        if recording.has_gradient:
            go_back_on_this_thread()
        return recording

    def _renew(self, name: str) -> None:
        """A tensor was replaced, not written: everything is recorded anew, a few times."""
        module = self._module()
        assert module is not None
        self._renewals += 1
        self.watch, self.shapes = Watch(module), {}
        if self._renewals > RENEWALS:
            self.refusal = f"{name} was replaced {self._renewals} times"
            self._say("replaced", f"{self.refusal}. Remedy: write in place, {name}.copy_(...)")

    def _say(self, what: str, why: str) -> None:
        if what not in self._said:
            self._said.add(what)
            name = type(self._module()).__name__
            warnings.warn(
                f"{name} runs eagerly: expected calls that CUDA graphs can repeat, received {why}, or capture=False.",
                SelfCaptureWarning,
                stacklevel=6,
            )


_MAKING = threading.Lock()
_RECORDERS: "weakref.WeakKeyDictionary[nn.Module, _Recorder]" = weakref.WeakKeyDictionary()


def self_capturing(forward: _Method) -> _Method:
    """Decorates ``forward(self, tensordict)`` of a module: on CUDA its calls become CUDA graphs, gradients included.

    The first two calls of a shape run as they are; the third is recorded, and from then on the call is one replay and
    its backward pass another (after one pass over the recorded forward). Everything around stays eager: any optimiser,
    clipping, scheduler, accumulation, ``zero_grad``. Results and gradients are fresh tensors, equal to eager ones.

    * **Parameters and buffers** are read where they are: write them in place. One that is replaced is found, and the
      module records anew, up to eight times.
    * **Random numbers** are fresh at each call.
    * **Backward passes** that the calling thread begins run on it from the first recording on, unless it turns
      ``torch.autograd.set_multithreading_enabled(True)`` on again.
    * **Several calls** may wait for their backward pass, up to four of a shape; more run eagerly.
    * **Each shape** is recorded by itself, up to eight; a change of ``training``, of autocast, of gradient mode, of the
      stream or of a plain attribute of the module or of a part of it counts as another shape.
    * **Entries** that the module writes into its argument are written; writing to a tensor of the argument in place is
      not recordable.
    * **Refused**: ``create_graph=True``; a second pass through an output after the next call; a backward pass after a
      write to a parameter that it needs, as in eager PyTorch.
    * **What cannot be recorded** (a host wait, shapes that depend on numbers, hooks of modules) runs eagerly, and
      :class:`SelfCaptureWarning` says so once, with the line.

    Inside ``torch.compile``, ``capture`` or a dispatch mode, on a CPU, and where the module's ``capture`` is False, the
    call is what it would be without the decorator.

    Args:
        forward: the method, of any name, and the only one of its class; takes a TensorDict and returns one.
    """

    @functools.wraps(forward)
    def call(self: nn.Module, tensordict: TensorDictBase) -> Any:
        if not (may_record() and getattr(self, "capture", True)):
            return forward(self, tensordict)
        recorder = _RECORDERS.get(self)
        if recorder is None:
            with _MAKING:
                recorder = _RECORDERS.get(self) or _RECORDERS.setdefault(self, _Recorder(forward, self))
        return recorder(self, tensordict)

    return call


def is_recorded(module: nn.Module) -> bool:
    """Whether some shape of a module's calls is recorded."""
    recorder = _RECORDERS.get(module)
    return recorder is not None and any(shape.recordings for shape in recorder.shapes.values())


def _device_of(leaves: dict[Any, Any]) -> torch.device | None:
    """The device of all leaves, where recording is possible; None for a mixture, for other kinds of leaf, for a CPU."""
    device = None
    for leaf in leaves.values():
        if type(leaf) is not Tensor:
            return None
        if device is None:
            device = leaf.device
        elif leaf.device != device:
            return None
    return device if device is not None and device.type in DEVICES else None
