"""Copies between host and device without accidental waits: all asynchronous copies of the package are made here.

A copy overlaps with other work only if its host side is page-locked. It is safe only if, until it has ended, the host
side is neither read nor written, the device side is not reused, and both stay allocated. Each class here owns its
page-locked blocks, uses them in turn and records an event after each copy; on a CPU the same code makes plain copies.

* ``Upload``: arrays or host tensors of any shape to the device.
* ``Download``: one device tensor, again and again, to the host, read later.
* ``PackedRecord``: many small fields in one copy, both ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_perf.runtime._lanes import Lane

__all__ = ["Download", "PackedRecord", "Upload"]

_ALIGNMENT = 16  # bytes: every dtype may be viewed in place, on the host and on the device

Field = tuple[tuple[int, ...], torch.dtype]


@dataclass
class _Flight:
    """One page-locked block, and the copy from or to it."""

    host: Tensor
    arrived: Any
    snapshot: Tensor | None = None
    owner: Tensor | None = None


class Download:
    """Copies of a device tensor to the host that are started now and read later, at most ``slots`` of them at a time.

    A copy starts behind the work that the current stream has been given, and never makes the host wait; :meth:`wait`
    waits for that copy alone. Writes to the source that are enqueued later, on the same stream, do not reach the copy.

    Args:
        like: tensor of the shape, dtype and device of all sources.
        slots: copies that may be under way at once.
        side_stream: let the copy run beside later work of the current stream, from a snapshot on the device; worth it
            from about a megabyte on.

    Raises:
        ValueError: for fewer than one slot.
    """

    def __init__(self, like: Tensor, *, slots: int = 2, side_stream: bool = False) -> None:
        _check_slots("Download", slots)
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._lane = lane = Lane(like.device, side_stream=side_stream)
        self._flights = [_Flight(lane.host(like.shape, like.dtype), lane.event()) for _ in range(slots)]
        for flight in self._flights if lane.side is not None else ():
            flight.snapshot = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            lane.lend(flight.snapshot, lane.side)  # or its memory could be given away while the side stream reads it
        self._started = self._read = 0

    @property
    def pending(self) -> int:
        """Number of copies that were started but not waited for."""
        return self._started - self._read

    def start(self, source: Tensor) -> None:
        """Enqueue a copy of ``source`` into the next page-locked block; the host goes on at once.

        Args:
            source: tensor of the shape, dtype and device of ``like``, contiguous or not; kept alive until the copy has
                been waited for.

        Raises:
            RuntimeError: if all slots are in flight, or the current stream is being captured.
            ValueError: for another shape, dtype or device.
        """
        self._check(source)
        flight = self._flights[self._started % len(self._flights)]
        # A conjugated or negated view would be resolved on the host, after the copy and without waiting for it.
        source = source.detach().resolve_conj().resolve_neg()
        lane, stream = self._lane, self._lane.current()
        if flight.snapshot is not None:
            lane.copy(flight.snapshot, source, stream)
            source, stream = flight.snapshot, lane.fork(stream)
        flight.owner = source
        lane.copy(flight.host, source, stream)
        lane.record(flight.arrived, stream)
        self._started += 1

    def wait(self) -> Tensor:
        """The oldest copy that has been started, once it has arrived.

        Returns:
            Host tensor of the shape and dtype of ``like``; overwritten by the ``slots``-th start from now on.

        Raises:
            RuntimeError: if no copy has been started.
        """
        if not self.pending:
            raise RuntimeError("Download.wait: expected a copy under way, received none. Remedy: call start first.")
        flight = self._flights[self._read % len(self._flights)]
        flight.arrived.synchronize()
        flight.owner = None
        self._read += 1
        return flight.host

    def _check(self, source: Tensor) -> None:
        if (source.shape, source.dtype, source.device) != (self._shape, self._dtype, self._device):
            raise ValueError(
                f"Download.start: expected shape {tuple(self._shape)}, {self._dtype} on {self._device}, received shape "
                f"{tuple(source.shape)}, {source.dtype} on {source.device}. Remedy: a Download for each kind of tensor."
            )
        if self.pending == len(self._flights):
            raise RuntimeError(
                f"Download.start: expected a free slot, received a start with all {self.pending} in flight. Remedy: "
                "wait() for the oldest one first, or construct it with more slots."
            )
        self._lane.refuse_capture("Download.start")


class Upload:
    """A stager: arrays and host tensors go to the device through page-locked blocks that take turns.

    :meth:`stage` costs one copy on the host, into the block, and returns before the copy to the device has ended; what
    the current stream is given next sees the data. The input may be changed or dropped as soon as ``stage`` returns.
    The host waits only where the block is still being sent, ``slots`` calls later.

    What is made on the host anyway, such as a batch that is gathered from arrays, is best made where it is sent from:
    :meth:`block` hands out the page-locked block, and :meth:`send` sends it, without the copy that :meth:`stage` makes.

    Args:
        device: where tensors go.
        slots: blocks that take turns.
        nbytes: size that blocks have at first; a larger input makes them grow.
        side_stream: let the copy run beside the work that the current stream has already been given, as for the next
            batch while this one is learnt from.

    Raises:
        ValueError: for fewer than one slot.
    """

    def __init__(
        self, device: torch.device | str, *, slots: int = 2, nbytes: int = 0, side_stream: bool = False
    ) -> None:
        _check_slots("Upload", slots)
        self.device = torch.empty(0, device=device).device  # "cuda" with its index
        self._lane = lane = Lane(self.device, side_stream=side_stream)
        self._flights = [_Flight(lane.host((nbytes,), torch.uint8), lane.event()) for _ in range(slots)]
        self._staged = 0

    def stage(self, value: np.ndarray | Tensor, *, out: Tensor | None = None) -> Tensor:
        """Send a value to the device.

        Args:
            value: array of numbers or booleans (of any strides, byte order, read-only ones too) or a tensor on the host
                or already on the device; gradients are not tracked.
            out: tensor on the device to write into, such as the static input of a CUDA graph; a new one by default.

        Returns:
            Tensor on the device of the value's shape and dtype: ``out``, a new tensor that is the caller's, or the
            value itself where it lies on the device.

        Raises:
            TypeError: for anything else than arrays and tensors, and for dtypes that torch lacks.
            ValueError: for an ``out`` of another shape, dtype or device, or a value on a third device.
            RuntimeError: if the current stream is being captured.
        """
        dtype = _dtype_of(value)
        _check_places(value, dtype, out, self.device)
        if isinstance(value, Tensor) and value.device == self.device and self.device.type != "cpu":
            return value.detach() if out is None else out.copy_(value.detach())
        if not self._lane.is_cuda:
            return _filled(torch.empty(tuple(value.shape), dtype=dtype) if out is None else out, value)
        self._lane.refuse_capture("Upload.stage")
        return self.send(_filled(self.block(value.shape, dtype), value), out=out)

    def block(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next block, to be filled in place and given to :meth:`send`.

        Args:
            shape: of what will be sent.
            dtype: likewise.

        Returns:
            Tensor on the host, page-locked if the device is a GPU, with whatever it held before; ``.numpy()`` is an
            array over the same memory. It may be written until it is sent, and is handed out again ``slots`` calls
            later.

        Raises:
            RuntimeError: if the current stream is being captured.
        """
        self._lane.refuse_capture("Upload.block")
        flight = self._flights[self._staged % len(self._flights)]
        flight.arrived.synchronize()
        size = prod(shape) * dtype.itemsize
        if size > flight.host.numel():
            flight.host = self._lane.host((1 << (size - 1).bit_length(),), torch.uint8)
        self._staged += 1
        flight.owner = flight.host[:size].view(dtype).view(tuple(shape))
        return flight.owner

    def send(self, block: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Start the copy of a filled block to the device; the host goes on at once.

        Args:
            block: the tensor that the last :meth:`block` returned.
            out: tensor on the device to write into; a new one by default.

        Returns:
            ``out``, or a new tensor that is the caller's.

        Raises:
            ValueError: for another tensor, a block that has been sent, or an ``out`` of another shape, dtype or device.
            RuntimeError: if the current stream is being captured.
        """
        flight = self._flights[(self._staged - 1) % len(self._flights)]
        if flight.owner is None or block is not flight.owner:
            raise ValueError(
                f"Upload.send: expected the block handed out last, received another tensor {tuple(block.shape)}, or "
                "one that has been sent. Remedy: block = upload.block(shape, dtype) for each send, or stage(value)."
            )
        _check_places(block, block.dtype, out, self.device)
        self._lane.refuse_capture("Upload.send")
        flight.owner = None
        return self._send(block, flight.arrived, out)

    def _send(self, host: Tensor, arrived: Any, out: Tensor | None) -> Tensor:
        lane, current = self._lane, self._lane.current()
        stream = current if lane.side is None else lane.side
        if out is not None:
            target = out
            stream = lane.fork(current)  # behind what still reads the old content
        else:
            # Memory of the stream that writes it: that of the current one may still be read by work under way.
            target = lane.empty(host.shape, host.dtype, stream)
        lane.copy(target, host, stream)
        lane.record(arrived, stream)
        if lane.side is not None:
            lane.join(current, arrived)
            lane.lend(target, current if out is None else lane.side)
        return target


class PackedRecord:
    """Fields side by side in one block of bytes, twice: in page-locked host memory and on the device.

    One copy moves all of them, after the work of the current stream. The host side has ``slots`` blocks that take
    turns, so that the next record can be written while the copy of the last one still runs; :meth:`write` and
    :meth:`wait` wait for the event after a block's copy. On a CPU the same code makes plain copies.

    Args:
        fields: shape and dtype of each field.
        device: the other side.
        slots: number of host blocks.

    Attributes:
        device_fields: the fields on the device, contiguous tensors that stay where they are.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device, *, slots: int = 2) -> None:
        _check_slots("PackedRecord", slots)
        spans, size = [], 0
        for shape, dtype in fields:
            nbytes = prod(shape) * dtype.itemsize
            spans.append((size, size + nbytes))
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._lane = lane = Lane(device)
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._flights = [_Flight(lane.host((size,), torch.uint8).zero_(), lane.event()) for _ in range(slots)]
        self.device_fields = _views(self._device_bytes, fields, spans)
        self._host_fields = [[v.numpy() for v in _views(flight.host, fields, spans)] for flight in self._flights]
        self._slot = 0

    @property
    def host_fields(self) -> list[np.ndarray]:
        """The fields of the current host block, as arrays over its memory."""
        return self._host_fields[self._slot]

    def write(self, *, advance: bool = True) -> list[np.ndarray]:
        """Host fields that may be overwritten: those of the next block, or of the current one.

        Waits for the last copy from or to that block, which has long ended where blocks take turns.
        """
        if advance:
            self._slot = (self._slot + 1) % len(self._flights)
        return self.wait()

    def upload(self) -> None:
        """Copy the current host block to the device; does not wait."""
        self._copy(self._device_bytes, self._flights[self._slot].host)

    def download(self) -> None:
        """Copy the device's block to the current host block; does not wait: see :meth:`wait`."""
        self._copy(self._flights[self._slot].host, self._device_bytes)

    def wait(self) -> list[np.ndarray]:
        """The current host fields, once the last copy from or to them has ended; never waits for the whole device."""
        self._flights[self._slot].arrived.synchronize()
        return self.host_fields

    def _copy(self, target: Tensor, source: Tensor) -> None:
        stream = self._lane.current()
        self._lane.copy(target, source, stream)
        self._lane.record(self._flights[self._slot].arrived, stream)


def _views(block: Tensor, fields: Sequence[Field], spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [
        block[first:last].view(dtype).view(shape) for (shape, dtype), (first, last) in zip(fields, spans, strict=True)
    ]


def _check_slots(name: str, slots: int) -> None:
    if slots < 1:
        raise ValueError(f"{name}: expected slots >= 1, received {slots}. Remedy: 2, so that blocks can take turns.")


def _filled(host: Tensor, value: np.ndarray | Tensor) -> Tensor:
    """``host``, with the elements of ``value``: one copy, whatever the strides and the byte order."""
    if isinstance(value, Tensor):
        return host.copy_(value.detach())
    np.copyto(host.numpy(), value)
    return host


def _dtype_of(value: Any) -> torch.dtype:
    if isinstance(value, Tensor):
        return value.dtype
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"Upload.stage: expected an array or a tensor, received {type(value).__name__}. Remedy: "
            "np.asarray(value), once and outside the loop, for a list converts element by element."
        )
    try:
        return torch.from_numpy(np.empty(0, value.dtype.newbyteorder("="))).dtype
    except TypeError:
        raise TypeError(
            f"Upload.stage: expected an array of numbers or booleans that torch has, received dtype {value.dtype} of "
            f"shape {value.shape}. Remedy: value.astype(np.float32)."
        ) from None


def _check_places(value: np.ndarray | Tensor, dtype: torch.dtype, out: Tensor | None, device: torch.device) -> None:
    if isinstance(value, Tensor) and value.device.type != "cpu" and value.device != device:
        raise ValueError(
            f"Upload.stage: expected a value on the host or on {device}, received one on {value.device}. Remedy: an "
            f"Upload for {value.device}, or value.to({str(device)!r})."
        )
    if out is not None and (tuple(out.shape), out.dtype, out.device) != (tuple(value.shape), dtype, device):
        raise ValueError(
            f"Upload.stage: expected out of shape {tuple(value.shape)}, {dtype} on {device}, received shape "
            f"{tuple(out.shape)}, {out.dtype} on {out.device}. Remedy: torch.empty of that shape there."
        )
