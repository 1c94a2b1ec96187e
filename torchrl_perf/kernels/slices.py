"""Triton kernels of slices of a ring: one follows them from their starts, one learns where they may start.

In torch operations they are some sixty launches each, and each launch takes longer than its work. Import this module
only where Triton is. Reference: :mod:`torchrl_perf.replay.slice_rows`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.priority_tree import age_and_generation, uniform_slot, weight_of

MAX_LENGTH = 4096
"""Rows of the longest slice that one program follows."""

MAX_TIME_ROWS = 512
"""New time rows that one program walks along a stream; of more the operations of torch are faster."""


@triton.jit
def _flag(flag_ptr, row, stride, is_row):
    """Whether a flag of rows is set."""
    return tl.load(flag_ptr + row * stride, mask=is_row, other=0) != 0


@triton.jit
def _slices(
    uniform_ptr, start_ptr, words_ptr, weight_ptr, cursor_ptr, length_ptr,
    end_ptr, truncated_ptr, init_ptr, mask_ptr, terminated_ptr,
    index_ptr, flags_ptr, weights_ptr, generation_ptr, num_slices, steps, num_streams, stride,
    HAS_TREE: tl.constexpr, MARKS: tl.constexpr, HAS_TRUNCATED: tl.constexpr, HAS_INIT: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_TERMINATED: tl.constexpr, HAS_PRIORITY: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK slices; WIDTH is the power of two from LENGTH on."""
    wait_for_previous(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_slice = i < num_slices
    cursor, length = tl.load(cursor_ptr), tl.load(length_ptr)
    uniform = tl.load(uniform_ptr + i, mask=is_slice, other=0.0)
    # A round more, since C division truncates: the dividend must not be negative.
    windows = tl.maximum(length - (LENGTH - 1), 1)
    start = uniform_slot(uniform, cursor + steps - (LENGTH - 1), windows, steps, num_streams)
    if HAS_TREE:
        drawn = tl.load(start_ptr + i, mask=is_slice, other=0)
        weight = weight_of(tl.load(words_ptr + drawn, mask=is_slice, other=0))
        start = tl.where(weight > 0.0, drawn, start)  # a leaf of weight 0 is drawn only where all are
    order = tl.arange(0, WIDTH)[None, :]
    is_row = is_slice[:, None] & (order < LENGTH)
    first = start[:, None]
    row = (first + order.to(tl.int64) * num_streams) % (steps * num_streams)
    age, _ = age_and_generation(first, cursor, steps, num_streams)
    age = age - order
    end = _flag(end_ptr, row, stride, is_row)
    first_end = tl.min(tl.where(end, order, LENGTH - 1), axis=1)[:, None]
    is_in = (age >= 0) & (age < length) & (order <= first_end)
    is_followed = (age >= 1) & (age <= length) & (order < first_end)
    if HAS_MASK:
        following = (first + (order + 1).to(tl.int64) * num_streams) % (steps * num_streams)
        is_active = _flag(mask_ptr, row, stride, is_row)
        is_active_next = _flag(mask_ptr, following, stride, is_row)
        if HAS_TERMINATED:
            is_active = is_active | _flag(terminated_ptr, row, stride, is_row)
            is_active_next = is_active_next | _flag(terminated_ptr, following, stride, is_row)
        is_in = is_in & is_active
        is_followed = is_followed & is_active_next
    place = i[:, None] * LENGTH + order
    total = num_slices * LENGTH
    tl.store(index_ptr + place, row, mask=is_row)
    tl.store(flags_ptr + place, is_in.to(tl.uint8), mask=is_row)
    if MARKS:
        is_cut = (order == LENGTH - 1) | (is_in & (is_followed == 0))
        truncated = is_cut & (end == 0)
        if HAS_TRUNCATED:
            truncated = truncated | _flag(truncated_ptr, row, stride, is_row)
        tl.store(flags_ptr + total + place, (is_cut | end).to(tl.uint8), mask=is_row)
        tl.store(flags_ptr + 2 * total + place, truncated.to(tl.uint8), mask=is_row)
    if HAS_INIT:
        is_first = (order == 0) | _flag(init_ptr, row, stride, is_row)
        tl.store(flags_ptr + 3 * total + place, is_first.to(tl.uint8), mask=is_row)
    if HAS_PRIORITY:
        importance = tl.load(weight_ptr + i, mask=is_slice, other=0.0)
        tl.store(weights_ptr + place, tl.broadcast_to(importance[:, None], (BLOCK, WIDTH)), mask=is_row)
        _, generation = age_and_generation(row, cursor, steps, num_streams)
        tl.store(generation_ptr + place, generation, mask=is_row)


@triton.jit
def _starts(
    run_ptr, cursor_ptr, length_ptr, end_ptr, mask_ptr, terminated_ptr, slots_ptr, starts_ptr,
    time_rows, count, steps, num_streams, stride,
    HAS_END: tl.constexpr, HAS_MASK: tl.constexpr, HAS_TERMINATED: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK streams, each from its oldest new row to the newest."""
    wait_for_previous(EARLY)
    stream = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_stream = stream < num_streams
    cursor, length = tl.load(cursor_ptr), tl.load(length_ptr)
    oldest = cursor + steps - count  # a round more, so that the dividend is not negative
    run = tl.load(run_ptr + stream, mask=is_stream, other=0)
    time = time_rows - time_rows  # not `range`, which Triton's interpreter cannot count with NumPy 2
    while time < time_rows:
        row = (oldest + count - time_rows + time) % steps * num_streams + stream
        is_active = is_stream & (time - time_rows + length >= 0)
        if HAS_MASK:
            is_admitted = _flag(mask_ptr, row, stride, is_stream)
            if HAS_TERMINATED:
                is_admitted = is_admitted | _flag(terminated_ptr, row, stride, is_stream)
            is_active = is_active & is_admitted
        run = tl.where(is_active, run + 1, 0)
        first = count - time_rows + time - (LENGTH - 1)  # the row that this one ends the window of
        is_start = (run >= LENGTH).to(tl.uint8)
        tl.store(starts_ptr + first * num_streams + stream, is_start, mask=is_stream & (first >= 0))
        if HAS_END:
            run = tl.where(_flag(end_ptr, row, stride, is_stream), 0, run)
        time += 1
    tl.store(run_ptr + stream, run, mask=is_stream)
    place = count - count
    while place < count:
        slot = (oldest + place) % steps * num_streams + stream
        tl.store(slots_ptr + place * num_streams + stream, slot, mask=is_stream)
        is_newest = is_stream & (place > count - LENGTH)
        tl.store(starts_ptr + place * num_streams + stream, tl.zeros_like(stream).to(tl.uint8), mask=is_newest)
        place += 1


class Flags(NamedTuple):
    """Flags of the stored rows, uint8 ``[capacity]`` with one stride for all; None for those that are not read."""

    end: Tensor
    truncated: Tensor | None
    init: Tensor | None
    mask: Tensor | None
    terminated: Tensor | None


class Slices(NamedTuple):
    """Rows of slices, ``[S * L]`` each.

    Attributes:
        index: slots, int64.
        flags: bool ``[4, S * L]``: rows that count, ends, truncations, first rows; those not asked for are undefined.
        weight: importance weights, float32, and ``generation``: int64; None without priorities.
    """

    index: Tensor
    flags: Tensor
    weight: Tensor | None
    generation: Tensor | None


def launch_slices(
    uniform: Tensor, drawn: tuple[Tensor, Tensor] | None, weight: Tensor | None, flags: Flags, length: int, *,
    counters: tuple[Tensor, Tensor, int, int], marks: bool,
) -> Slices:  # fmt: skip
    """Follows slices of ``length`` rows.

    Args:
        uniform: ``[S]`` float64 in [0, 1): where a slice starts that has no drawn start.
        drawn: starts ``[S]`` int64 of a tree, and its words; a start without weight is none. None where every row may
            be a start.
        weight: importance weights of the slices, ``[S]`` float32, where they have priorities.
        flags: of the stored rows.
        length: rows L of a slice, at most ``MAX_LENGTH``.
        counters: cursor and length of the ring, 0-d int64; its steps and streams.
        marks: whether ends and truncations are wanted.
    """
    cursor, valid, steps, streams = counters
    count = uniform.shape[0]
    index = torch.empty(count * length, dtype=torch.int64, device=uniform.device)
    found = torch.empty((4, count * length), dtype=torch.bool, device=uniform.device)
    weights = generation = None
    if weight is not None:
        weights, generation = torch.empty_like(index, dtype=torch.float32), torch.empty_like(index)
    start, words = drawn if drawn is not None else (index, index)
    end = flags.end
    args = (
        uniform, start, words, uniform if weight is None else weight, cursor, valid,
        end, *(end if flag is None else flag for flag in flags[1:]),
        index, found.view(torch.uint8), uniform if weights is None else weights,
        index if generation is None else generation, count, steps, streams, end.stride(0),
    )  # fmt: skip
    width = 1 << (length - 1).bit_length()
    constants = {
        "HAS_TREE": drawn is not None, "MARKS": marks, "HAS_TRUNCATED": flags.truncated is not None,
        "HAS_INIT": flags.init is not None, "HAS_MASK": flags.mask is not None,
        "HAS_TERMINATED": flags.terminated is not None, "HAS_PRIORITY": weight is not None,
        "LENGTH": length, "WIDTH": width, "BLOCK": max(1, 256 // width),
    }  # fmt: skip
    launch(_slices, (-(-count // constants["BLOCK"]),), args, constants)
    return Slices(index, found, weights, generation)


def launch_starts(
    run: Tensor, flags: Flags, time_rows: int, length: int, *, counters: tuple[Tensor, Tensor, int, int], has_end: bool
) -> tuple[Tensor, Tensor]:
    """Finds the slots that slices may start at since the newest ``time_rows`` time rows were written.

    Args:
        run: int64 ``[N]``, rows since the last break of each stream before them; brought up to date.
        flags: of the stored rows.
        time_rows: number of new time rows, at most the steps of the ring.
        length: rows L of a slice, at most the steps of the ring.
        counters: cursor and length of the ring, 0-d int64; its steps and streams.
        has_end: whether an end breaks a run.

    Returns:
        Slots ``[R * N]`` int64 of the newest R = min(time_rows + L - 1, steps) time rows, in the order of time, and
        whether a slice may start there, bool.
    """
    cursor, valid, steps, streams = counters
    count = min(time_rows + length - 1, steps)
    slots = torch.empty(count * streams, dtype=torch.int64, device=run.device)
    starts = torch.empty_like(slots, dtype=torch.bool)
    end, mask, terminated = flags.end, flags.mask, flags.terminated
    args = (
        run, cursor, valid, end, end if mask is None else mask, end if terminated is None else terminated,
        slots, starts.view(torch.uint8), time_rows, count, steps, streams, end.stride(0),
    )  # fmt: skip
    block = min(128, 1 << (streams - 1).bit_length())
    constants = {
        "HAS_END": has_end, "HAS_MASK": mask is not None, "HAS_TERMINATED": terminated is not None,
        "LENGTH": length, "BLOCK": block,
    }  # fmt: skip
    launch(_starts, (-(-streams // block),), args, constants, num_warps=max(1, block // 32))
    return slots, starts
