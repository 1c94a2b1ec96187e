"""Continuing after an out-of-memory error: the same gradient from smaller parts of the batch."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_perf.runtime.capture import Captured, CaptureError

__all__ = ["MicroBatches", "OutOfMemoryWarning", "Part", "WholeUpdates", "is_out_of_memory", "parts_of", "refused"]

T = TypeVar("T")
B = TypeVar("B", Tensor, TensorDictBase)

# what CUDA, cuBLAS, the allocator of the CPU and drivers say in errors that are not torch.OutOfMemoryError
_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class OutOfMemoryWarning(UserWarning):
    """Issued once for each size of the micro-batches that an update continues with."""


class Part(NamedTuple):
    """A micro-batch."""

    batch: Any
    """``[b]`` of the ``[B]`` rows, in order."""
    share: float
    """``b / B``: its weight in a mean over rows."""
    weight: float | Tensor
    """Its share of the importance weights in a weighted mean, 0-d; ``share`` without weights."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory could not be allocated."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS):
            return True
        error = error.__cause__
    return False


@contextmanager
def refused(what: str, remedy: str) -> Iterator[None]:
    """Context in which an out-of-memory error says what needed the memory and what to do.

    Args:
        what: beginning of the message ("collect: 4096 envs of 128 steps").
        remedy: for the message ("fewer num_envs").

    Raises:
        torch.OutOfMemoryError: from the original one.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error) or isinstance(error, CaptureError):
            raise
        raise torch.OutOfMemoryError(
            f"{what}: expected to fit into memory, received {first_line(error)} Remedy: {remedy}."
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with a full stop."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line if line.endswith(".") else f"{line}."


def parts_of(batch: B, parts: int, weights: Tensor | None = None) -> list[Part]:
    """A batch in ``parts`` micro-batches, views of it, whose sizes differ by one row at most.

    The sum over them of ``weight`` times a mean loss is the mean loss of the batch, and so are the gradients.

    Args:
        batch: tensor or TensorDict ``[B, ...]``.
        parts: at most B.
        weights: ``[B]`` or ``[B, *]`` importance weights, or a mask, where the loss is ``sum(w x) / sum(w)``. Where all
            of them are 0, so is the weight of each part.

    Raises:
        ValueError: for parts without a row, and for weights of another number of rows.
    """
    rows = batch.shape[0] if batch.ndim else 0
    if not 1 <= parts <= rows:
        raise ValueError(
            f"parts: expected 1 to {rows}, the rows of a batch of shape {tuple(batch.shape)}, received {parts}. "
            "Remedy: fewer parts, or a batch with rows."
        )
    if weights is not None and (weights.ndim == 0 or weights.shape[0] != rows):
        raise ValueError(
            f"weights: expected one for each of the {rows} rows, received shape {tuple(weights.shape)}. Remedy: the "
            "weights of this batch."
        )
    sizes = [rows // parts + (k < rows % parts) for k in range(parts)]
    chunks = batch.split(sizes)
    shares = [size / rows for size in sizes]
    if weights is None:
        return [Part(chunk, share, share) for chunk, share in zip(chunks, shares, strict=True)]
    # the sum of many 16-bit numbers, or of a mask, needs more digits than they have
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    total = weights.sum(dtype=dtype)
    total = torch.where(total == 0, 1.0, total)
    sums = [part.sum(dtype=dtype) / total for part in weights.split(sizes)]
    return [Part(*part) for part in zip(chunks, shares, sums, strict=True)]


class MicroBatches:
    """Runs updates, and after an out-of-memory error continues in 2, 4, 8, ... micro-batches, for good.

    The gradient is that of the whole batch, up to rounding; only speed is lost. In your own loop::

        micro = MicroBatches("cuda")
        for batch in loader:
            loss = micro.backward(lambda part: ((net(part["x"]) - part["y"]) ** 2).mean(), batch, net.parameters())
            optimizer.step()

    :meth:`run` is the same for any function that can be repeated. An attempt that failed leaves nothing behind: its
    intermediate results are freed, the random state is the one before it, so that the next attempt draws the same
    numbers, and ``undo`` puts back what it wrote.

    In a CUDA graph memory is allocated while warming up, which is treated like any call, and while recording, when
    nothing has been computed yet: :meth:`call` then warms up and records the function again. Replays allocate nothing.

    Args:
        device: device of the update.
        enabled: whether to split at all; else errors are passed on as they come.

    Attributes:
        parts: micro-batches of an update, 1 until memory runs out. May be set.
        count: the same on the device, float32 0-d, for the metrics.
    """

    def __init__(self, device: torch.device | str, *, enabled: bool = True) -> None:
        self.device = torch.device(device)
        self.enabled = enabled
        self.count = torch.ones((), device=self.device)
        self._parts = 1
        self._outdated = False  # whether captured functions use another number
        self._unrecorded = 0  # rows of the update in which a recording ran out of memory

    @property
    def parts(self) -> int:
        """Micro-batches of an update."""
        return self._parts

    @property
    def recording(self) -> bool:
        """Whether a CUDA graph is being recorded, so that calls compute nothing."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @parts.setter
    def parts(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"parts: expected a positive integer, received {value!r}. Remedy: 1, not to split.")
        self._parts = value
        self.count.fill_(value)

    def state_dict(self) -> dict[str, int]:
        """The number of micro-batches, so that a resumed run continues bit for bit without another error."""
        return {"parts": self._parts}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restores :meth:`state_dict`; a function that was captured with another number is recorded again."""
        self._outdated = self._outdated or state_dict["parts"] != self._parts
        self.parts = state_dict["parts"]

    def backward(
        self,
        loss_fn: Callable[[B], Tensor],
        batch: B,
        params: Iterable[nn.Parameter],
        *,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Gradients of a mean loss, which replace ``.grad`` of the parameters.

        Args:
            loss_fn: the mean loss, 0-d, of the rows it is given.
            batch: tensor or TensorDict ``[B, ...]``.
            params: the parameters.
            weights: ``[B]``, where ``loss_fn`` is a mean with importance weights. A micro-batch whose weights are all 0
                adds 0 to loss and gradients, also where ``loss_fn`` divides by their sum.

        Returns:
            The loss of the whole batch, detached, 0-d.

        Raises:
            torch.OutOfMemoryError: if a single row does not fit.
            ValueError: for a batch without rows, and weights of another number of rows.
        """
        params = list(params)

        def attempt(parts: int) -> Tensor:
            clear(params)
            total = None
            for part in parts_of(batch, parts, weights):
                before = [param.grad for param in params]
                if isinstance(part.weight, Tensor):
                    clear(params)
                loss = loss_fn(part.batch) * part.weight
                loss.backward()
                loss = loss.detach()
                if isinstance(part.weight, Tensor):
                    loss = _without_nothing(loss, part.weight, params, before)
                total = loss if total is None else total + loss
            return cast("Tensor", total)

        return self.run(attempt, batch.shape[0], undo=lambda: clear(params))

    def run(self, attempt: Callable[[int], T], rows: int, *, undo: Callable[[], object] | None = None) -> T:
        """``attempt(parts)``, and again with twice as many parts as long as memory runs out.

        Args:
            attempt: does the work in that many parts, and nothing that cannot be undone.
            rows: rows of the batch, the most parts there can be.
            undo: puts back what a failed attempt has changed, such as gradients.

        Raises:
            torch.OutOfMemoryError: if a single row does not fit; whatever else ``attempt`` raises.
        """
        if not self.enabled:
            return attempt(1)
        recording = self.recording
        before = self._parts
        while True:
            parts = min(self._parts, rows)
            random = None if recording else _random_state(self.device)
            try:
                result = attempt(parts)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if recording:
                    self._unrecorded = rows
                    raise
                if parts >= rows:
                    raise torch.OutOfMemoryError(
                        f"update: expected one row at a time to fit into memory, received {first_line(error)} Remedy: "
                        "a smaller network or observation, fewer num_envs, or another device."
                    ) from error
                reason = first_line(error)
            else:
                if self._parts != before:
                    self._announce(rows, reason)  # pyright: ignore[reportPossiblyUnboundVariable]
                return result
            # Here, not above: the error kept the frames of the attempt alive, and these its intermediate results.
            _set_random_state(random, self.device)
            if undo is not None:
                undo()
            self._make_room()
            self.parts = 2 * parts

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Calls a function; if it is captured and its recording runs out of memory in :meth:`run`, splits the batch.

        Args:
            fn: what ``capture`` returned, or any function.
            *args: its arguments.

        Raises:
            CaptureError: if recording fails for another reason, or a single row does not fit.
        """
        if not isinstance(fn, Captured):
            return fn(*args)
        if self._outdated and fn.calls:
            fn.restart()
        self._outdated = False
        while True:
            self._unrecorded = 0
            try:
                return fn(*args)
            except CaptureError as error:
                if self._unrecorded <= self._parts:
                    raise
                reason = first_line(error.__cause__ or error)
            rows = self._unrecorded
            fn.restart()
            self._make_room()
            self.parts = 2 * self._parts
            self._announce(rows, reason)

    def _make_room(self) -> None:
        if self.device.type == "cuda":
            gc.collect()  # autograd graphs in reference cycles
            torch.cuda.empty_cache()

    def _announce(self, rows: int, reason: str) -> None:
        parts = min(self._parts, rows)
        warnings.warn(
            f"an update of {rows} rows ran out of memory on {self.device} ({reason.rstrip('.')}); from here on it is "
            f"made of {parts} micro-batches of {-(-rows // parts)} rows, with the same gradient. Faster: a smaller "
            "minibatch, network or number of envs.",
            OutOfMemoryWarning,
            stacklevel=3,
        )


class WholeUpdates:
    """Compiled updates that are made whole, or not at all where memory runs out.

    Compiled, nobody knows what an update has written when memory runs out. So the first ones, which need as much memory
    as all others, begin with a copy of what they write.

    Args:
        micro: splits the updates that follow one that did not fit.
        trials: updates that begin with a copy.
    """

    def __init__(self, micro: MicroBatches, trials: int) -> None:
        self._micro, self._trials = micro, trials

    def __call__(self, update: Callable[[], T], rows: int, state: Callable[[], Iterable[Tensor]]) -> T | None:
        """What the update gives; None where memory ran out, nothing has changed, and micro-batches are to be made.

        Args:
            update: the compiled function.
            rows: of its batch.
            state: what it writes. A recording computes nothing, so that nothing is copied.

        Raises:
            torch.OutOfMemoryError: if memory runs out later.
        """
        if not self._micro.recording and self._trials == 0:
            with refused("update", "go on from the last checkpoint; this update may be half done"):
                return update()
        values = [] if self._micro.recording else [value.detach() for value in state()]
        before = [value.clone() for value in values]

        def undo() -> None:
            for value, old in zip(values, before, strict=True):
                value.copy_(old)

        def attempt(parts: int) -> T | None:
            return update() if parts == 1 else None

        outcome = self._micro.run(attempt, rows, undo=undo)
        self._trials = max(0, self._trials - 1)
        return outcome


@torch.no_grad()
def _without_nothing(
    loss: Tensor, weight: Tensor, params: Sequence[nn.Parameter], before: Sequence[Tensor | None]
) -> Tensor:
    """Adds up gradients and returns the loss, both 0 for a part of weight 0, whose own mean is 0 / 0.

    Decided on the device: a product with 0 would keep the NaN, in the loss as in the gradients.
    """
    counts = weight != 0
    for param, earlier in zip(params, before, strict=True):
        if param.grad is not None:
            param.grad = torch.where(counts, param.grad, 0.0)
        if earlier is not None:
            param.grad = earlier if param.grad is None else earlier.add_(param.grad)
    return torch.where(counts, loss, 0.0)


def clear(params: Sequence[nn.Parameter]) -> None:
    """Drops the gradients of parameters."""
    for param in params:
        param.grad = None


def _random_state(device: torch.device) -> Any:
    """State of the generators that an update draws from: host numbers, no wait."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: Any, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
