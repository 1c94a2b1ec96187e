"""Triton kernels of the sum tree of prioritised sampling, and of uniform draws from a ring.

A write is one kernel over the rows and one a level of the tree: tickets in the high half of a leaf let an atomic
maximum keep the last of several writes to a slot, whatever the order of the threads, and the sums of the first level
clear them. With the sums of a node the running sums of its children are kept, so that a draw is a search: one kernel,
two short reads a level. All sums are float64, so that the draws are those of the reference,
:mod:`torchrl_perf.functional.priority_tree`.

``sums``, ``minima`` and ``running`` hold all levels one after another, the first level first; ``levels`` lists their
sizes, one to three, each a multiple of ``FAN_OUT`` except the last (the top). ``running_leaves`` are the running sums
of the leaves. Import this module only where Triton is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.functional.priority_tree import FAN_OUT, LARGEST_PRIORITY
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch

_LARGEST = tl.constexpr(LARGEST_PRIORITY)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_HUGE = tl.constexpr(torch.finfo(torch.float32).max)
_WEIGHT_BITS = tl.constexpr(0x7FFFFFFF)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)
DRAW_BLOCK, DRAW_WARPS = 8, 1


@triton.jit
def age_and_generation(slot, cursor, steps, num_streams) -> tuple[tl.tensor, tl.tensor]:
    """Time rows written after the row, and how often its slot had been written before it."""
    # C division truncates; adding a round keeps the dividend from being negative.
    since = cursor - 1 + steps - slot // num_streams
    generation = since // steps - 1
    return since % steps, generation


@triton.jit
def weight_of(word) -> tl.tensor:
    """The float32 in the low half of words."""
    return (word & _WEIGHT_BITS).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _write_kernel(
    index_ptr, priority_ptr, keep_ptr, generation_ptr, words_ptr, max_bits_ptr, alpha_ptr, cursor_ptr, length_ptr,
    eps, num_rows, priority_stride, num_slots, steps, num_streams,
    HAS_KEEP: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_MAX: tl.constexpr, HAS_RING: tl.constexpr,
    HAS_GENERATION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weights into the leaves, with tickets that the sums of the first level clear."""
    wait_for_previous(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = i < num_rows
    slot = tl.load(index_ptr + i, mask=is_row, other=-1).to(tl.int64)
    priority = tl.load(priority_ptr + i * priority_stride, mask=is_row, other=-1.0).to(tl.float32)
    # False for a NaN too, and for the lanes beyond the last row.
    is_kept = (priority >= 0.0) & (slot >= 0) & (slot < num_slots)
    if HAS_KEEP:
        is_kept = is_kept & (tl.load(keep_ptr + i, mask=is_row, other=0) != 0)
    if HAS_RING:
        cursor = tl.load(cursor_ptr)
        age, generation = age_and_generation(slot, cursor, steps, num_streams)
        is_kept = is_kept & (age < tl.load(length_ptr))
        if HAS_GENERATION:
            is_kept = is_kept & (generation == tl.load(generation_ptr + i, mask=is_row, other=-1))
    if HAS_MAX:
        # Infinity takes part in the draws but must not become the priority of all new rows. Bits of floats that are
        # not negative compare as the floats do.
        counted = tl.where(is_kept & (priority <= _HUGE), priority, 0.0)
        largest = tl.minimum(tl.max(counted, axis=0), _LARGEST)
        tl.atomic_max(max_bits_ptr, largest.to(tl.int32, bitcast=True), sem="relaxed")
    weight = tl.minimum(tl.maximum(priority + eps, _TINY), _LARGEST)
    if HAS_ALPHA:
        alpha = tl.load(alpha_ptr)
        power = tl.exp2(alpha * tl.log2(weight))
        weight = tl.where(alpha == 1.0, weight, tl.minimum(tl.maximum(power, _TINY), _HUGE))
    weight = tl.where(priority > 0.0, weight, 0.0)
    ticket = (i + 1).to(tl.int64) << 32
    tl.atomic_max(
        words_ptr + slot, ticket | weight.to(tl.int32, bitcast=True).to(tl.int64), mask=is_kept, sem="relaxed"
    )


@triton.jit
def _first_level_kernel(
    index_ptr, words_ptr, sums_ptr, minima_ptr, running_leaves_ptr, num_rows, num_slots,
    ALL: tl.constexpr, FAN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums and minima of the nodes above the given slots (or of all nodes); clears the tickets of their leaves.

    Rows that share a node store the same numbers, so their order does not matter.
    """
    wait_for_previous(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_node = i < num_rows
    if ALL:
        node = i.to(tl.int64)
    else:
        slot = tl.load(index_ptr + i, mask=is_node, other=-1).to(tl.int64)
        is_node = is_node & (slot >= 0) & (slot < num_slots)
        node = slot // FAN
    leaf = node[:, None] * FAN + tl.arange(0, FAN)[None, :]
    word = tl.load(words_ptr + leaf, mask=is_node[:, None], other=0)
    has_ticket = word > _WEIGHT_BITS
    tl.store(words_ptr + leaf, word & _WEIGHT_BITS, mask=is_node[:, None] & has_ticket)
    weight = weight_of(word)
    weights = weight.to(tl.float64)
    tl.store(running_leaves_ptr + leaf, tl.cumsum(weights, axis=1), mask=is_node[:, None])
    tl.store(sums_ptr + node, tl.sum(weights, axis=1), mask=is_node)
    minimum = tl.min(tl.where(weight > 0.0, weight, float("inf")), axis=1)
    tl.store(minima_ptr + node, minimum, mask=is_node)


@triton.jit
def _next_level_kernel(sums_ptr, minima_ptr, running_ptr, level, FAN: tl.constexpr, EARLY: tl.constexpr):
    """One node of the second level, which begins at ``level``, from its children."""
    wait_for_previous(EARLY)
    node = tl.program_id(0)
    child = node * FAN + tl.arange(0, FAN)
    weights = tl.load(sums_ptr + child)
    tl.store(running_ptr + child, tl.cumsum(weights, axis=0))
    tl.store(sums_ptr + level + node, tl.sum(weights, axis=0))
    tl.store(minima_ptr + level + node, tl.min(tl.load(minima_ptr + child), axis=0))


@triton.jit
def _two_levels_kernel(
    sums_ptr, minima_ptr, running_ptr, arrived_ptr, level, top, FAN: tl.constexpr, EARLY: tl.constexpr
):
    """One node of the second level, from its children, and of the third, by the last of its children to arrive.

    The second level begins at ``level``, where the first ends, and is padded with nodes that have no children.
    """
    wait_for_previous(EARLY)
    node = tl.program_id(0)
    child = node * FAN + tl.arange(0, FAN)
    weights = tl.load(sums_ptr + child, mask=child < level, other=0.0)
    tl.store(running_ptr + child, tl.cumsum(weights, axis=0), mask=child < level)
    tl.store(sums_ptr + level + node, tl.sum(weights, axis=0))
    minimum = tl.min(tl.load(minima_ptr + child, mask=child < level, other=float("inf")), axis=0)
    tl.store(minima_ptr + level + node, minimum)
    parent = node // FAN
    tl.debug_barrier()  # every thread of this program has written
    arrived = tl.atomic_add(arrived_ptr + parent, 1, sem="acq_rel")
    if arrived == FAN - 1:
        sibling = level + parent * FAN + tl.arange(0, FAN)
        totals = tl.load(sums_ptr + sibling, volatile=True)
        tl.store(running_ptr + sibling, tl.cumsum(totals, axis=0))
        tl.store(sums_ptr + top + parent, tl.sum(totals, axis=0))
        tl.store(minima_ptr + top + parent, tl.min(tl.load(minima_ptr + sibling, volatile=True), axis=0))
        tl.store(arrived_ptr + parent, 0)


@triton.jit
def _rank(sums, mass):
    """How many of each row's sums [BLOCK, K] do not exceed its mass [BLOCK], and the largest of those (or 0)."""
    is_before = sums <= mass[:, None]
    return tl.sum(is_before.to(tl.int32), axis=1), tl.max(tl.where(is_before, sums, 0.0), axis=1)


@triton.jit
def _descend(running_ptr, node, mass, FAN: tl.constexpr, STRIDE: tl.constexpr):
    """From nodes of one level to one child of each, and the mass that is left inside it.

    The child is the first whose running sum exceeds the mass: first among every STRIDE-th, then among those before it.
    Of a node without weight it is the first. ``running_ptr`` is where the children's level begins.
    """
    start = running_ptr + node * FAN
    # a node's sum and the last running sum of its children may differ in the last bit: stay below the latter
    last = tl.load(start + FAN - 1)
    mass = tl.where(last > 0.0, tl.minimum(mass, last * _BELOW_ONE), -1.0)
    pivot = tl.arange(0, FAN // STRIDE) * STRIDE + STRIDE - 1
    group, before = _rank(tl.load(start[:, None] + pivot[None, :]), mass)
    first = tl.minimum(group, FAN // STRIDE - 1) * STRIDE
    place, inside = _rank(tl.load(start[:, None] + first[:, None] + tl.arange(0, STRIDE)[None, :]), mass)
    child = node * FAN + first + tl.minimum(place, STRIDE - 1)
    return child, mass - tl.maximum(before, inside)


@triton.jit
def _drawn(
    sums_ptr, running_leaves_ptr, running_ptr, uniform, num_top, top, second,
    LEVELS: tl.constexpr, FAN: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One slot for each uniform number ``[BLOCK]``, in proportion to the weights."""
    column = tl.arange(0, TOP)
    running = tl.cumsum(tl.load(sums_ptr + top + column, mask=column < num_top, other=0.0), axis=0)
    total = tl.max(running, axis=0)
    mass = tl.where(total > 0.0, tl.minimum(uniform * total, total * _BELOW_ONE), -1.0)
    child, before = _rank(tl.broadcast_to(running[None, :], (BLOCK, TOP)), mass)
    node, mass = tl.minimum(child, num_top - 1).to(tl.int64), mass - before
    if LEVELS == 3:
        node, mass = _descend(running_ptr + second, node, mass, FAN, 8)
    if LEVELS >= 2:
        node, mass = _descend(running_ptr, node, mass, FAN, 8)
    slot, mass = _descend(running_leaves_ptr, node, mass, FAN, 8)
    return slot


@triton.jit
def drawn_row(
    words_ptr, sums_ptr, minima_ptr, running_leaves_ptr, running_ptr, uniform, beta_ptr, cursor_ptr, length_ptr, steps,
    num_streams, num_top, top, second,
    LEVELS: tl.constexpr, FAN: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of a ring, importance weights and generations for uniform numbers ``[BLOCK]``.

    A tree whose weights are all 0 gives rows of the ring uniformly, with weight 1.
    """
    slot = _drawn(sums_ptr, running_leaves_ptr, running_ptr, uniform, num_top, top, second, LEVELS, FAN, TOP, BLOCK)
    column = tl.arange(0, TOP)
    minimum = tl.min(tl.load(minima_ptr + top + column, mask=column < num_top, other=float("inf")), axis=0)
    cursor = tl.load(cursor_ptr)
    weight = weight_of(tl.load(words_ptr + slot))
    is_empty = weight <= 0.0  # a leaf of weight 0 is drawn only where all are
    slot = tl.where(is_empty, uniform_slot(uniform, cursor, tl.load(length_ptr), steps, num_streams), slot)
    ratio = tl.where(is_empty, 1.0, tl.minimum(weight / minimum, _HUGE))
    importance = tl.exp2(-tl.load(beta_ptr) * tl.log2(ratio))
    _, generation = age_and_generation(slot, cursor, steps, num_streams)
    return slot, importance, generation


@triton.jit
def _draw_kernel(
    words_ptr, sums_ptr, minima_ptr, running_leaves_ptr, running_ptr, uniform_ptr, index_ptr, weight_ptr,
    generation_ptr, beta_ptr, cursor_ptr, length_ptr, num_draws, steps, num_streams, num_top, top, second,
    HAS_RING: tl.constexpr, LEVELS: tl.constexpr, FAN: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One slot a uniform number, its importance weight and its generation; without a ring the slot alone."""
    wait_for_previous(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_draw = i < num_draws
    uniform = tl.load(uniform_ptr + i, mask=is_draw, other=0.0)
    if HAS_RING:
        slot, importance, generation = drawn_row(
            words_ptr, sums_ptr, minima_ptr, running_leaves_ptr, running_ptr, uniform, beta_ptr, cursor_ptr, length_ptr,
            steps, num_streams, num_top, top, second, LEVELS, FAN, TOP, BLOCK,
        )  # fmt: skip
        tl.store(weight_ptr + i, importance, mask=is_draw)
        tl.store(generation_ptr + i, generation, mask=is_draw)
    else:
        slot = _drawn(sums_ptr, running_leaves_ptr, running_ptr, uniform, num_top, top, second, LEVELS, FAN, TOP, BLOCK)
    tl.store(index_ptr + i, slot, mask=is_draw)


@triton.jit
def uniform_slot(uniform, cursor, length, steps, num_streams) -> tl.tensor:
    """A slot among the newest ``length`` time rows."""
    count = length * num_streams
    row = tl.minimum((uniform * count.to(tl.float64)).to(tl.int64), count - 1)
    row = tl.maximum(row, 0)
    return (row + (cursor - length) * num_streams) % (steps * num_streams)


@triton.jit
def _uniform_kernel(
    uniform_ptr, index_ptr, cursor_ptr, length_ptr, num_draws, steps, num_streams, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One slot a uniform number."""
    wait_for_previous(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_draw = i < num_draws
    uniform = tl.load(uniform_ptr + i, mask=is_draw, other=0.0)
    slot = uniform_slot(uniform, tl.load(cursor_ptr), tl.load(length_ptr), steps, num_streams)
    tl.store(index_ptr + i, slot, mask=is_draw)


def launch_write(
    words: Tensor,
    index: Tensor,
    priority: Tensor,
    *,
    num_slots: int,
    eps: float,
    keep: Tensor | None,
    alpha: Tensor | None,
    max_priority: Tensor | None,
    ring: tuple[Tensor, Tensor, int, int, Tensor | None] | None,
) -> None:
    """Launch the write of leaves; arguments as in :meth:`PriorityTree.update_`."""
    num_rows = index.shape[0]
    cursor, length, steps, num_streams, generation = ring if ring is not None else (words, words, 0, 0, None)
    block = 128
    args = (
        index.contiguous(), priority,
        words if keep is None else keep.contiguous().view(torch.uint8),
        words if generation is None else generation.contiguous(),
        words,
        words if max_priority is None else max_priority.view(torch.int32),
        words if alpha is None else alpha,
        cursor, length,
        eps, num_rows, priority.stride(0) if priority.ndim else 0, num_slots, steps, num_streams,
    )  # fmt: skip
    constants = {
        "HAS_KEEP": keep is not None, "HAS_ALPHA": alpha is not None, "HAS_MAX": max_priority is not None,
        "HAS_RING": ring is not None, "HAS_GENERATION": generation is not None, "BLOCK": block,
    }  # fmt: skip
    launch(_write_kernel, (-(-num_rows // block),), args, constants, num_warps=4)


def launch_refresh(
    words: Tensor, sums: Tensor, minima: Tensor, running: tuple[Tensor, ...], index: Tensor | None,
    levels: tuple[int, ...], num_slots: int,
) -> None:  # fmt: skip
    """Launch the sums of all levels above the slots ``index`` (of all slots for None).

    ``running`` is ``(running_leaves, running)``, see the module, and behind them int32 zeros, one for each node of the
    third level.
    """
    num_nodes = words.shape[0] // FAN_OUT
    is_all = index is None or index.shape[0] >= num_nodes
    index = words if index is None else index.contiguous()
    num_rows = num_nodes if is_all else index.shape[0]
    args = (index, words, sums, minima, running[0], num_rows, num_slots)
    constants = {"ALL": is_all, "FAN": FAN_OUT, "BLOCK": 16}
    launch(_first_level_kernel, (-(-num_rows // 16),), args, constants, num_warps=4)
    if len(levels) == 2:
        args, constants = (sums, minima, running[1], levels[0]), {"FAN": FAN_OUT}
        launch(_next_level_kernel, (levels[0] // FAN_OUT,), args, constants, num_warps=1)
    elif len(levels) == 3:
        args = (sums, minima, running[1], running[2], levels[0], levels[0] + levels[1])
        launch(_two_levels_kernel, (levels[1],), args, {"FAN": FAN_OUT}, num_warps=1)


def tree_constants(levels: tuple[int, ...]) -> dict[str, int]:
    """Constants of kernels that draw from a tree."""
    return {"LEVELS": len(levels), "FAN": FAN_OUT, "TOP": max(2, 1 << (levels[-1] - 1).bit_length())}


def launch_draw(
    words: Tensor, sums: Tensor, minima: Tensor, running: tuple[Tensor, ...], uniform: Tensor,
    levels: tuple[int, ...], beta: Tensor | None, ring: tuple[Tensor, Tensor, int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the draws of ``uniform [B]`` float64: slots, and with a ring importance weights and generations."""
    num_draws = uniform.shape[0]
    index = torch.empty_like(uniform, dtype=torch.int64)
    weight, generation = index, index
    if ring is not None:
        weight, generation = torch.empty_like(uniform, dtype=torch.float32), torch.empty_like(index)
    cursor, length, steps, num_streams = ring if ring is not None else (words, words, 0, 0)
    args = (
        words, sums, minima, *running[:2], uniform, index, weight, generation, words if beta is None else beta,
        cursor, length, num_draws, steps, num_streams, levels[-1], sum(levels[:-1]),
        levels[0] if len(levels) == 3 else 0,
    )  # fmt: skip
    constants = {"HAS_RING": ring is not None, **tree_constants(levels), "BLOCK": DRAW_BLOCK}
    launch(_draw_kernel, (-(-num_draws // DRAW_BLOCK),), args, constants, num_warps=DRAW_WARPS)
    return index, weight, generation


def launch_uniform(uniform: Tensor, cursor: Tensor, length: Tensor, steps: int, num_streams: int) -> Tensor:
    """Launch uniform draws; arguments and result as in :func:`torchrl_perf.functional.priority_tree.uniform_rows`."""
    index = torch.empty_like(uniform, dtype=torch.int64)
    args = (uniform, index, cursor, length, uniform.shape[0], steps, num_streams)
    launch(_uniform_kernel, (-(-uniform.shape[0] // 256),), args, {"BLOCK": 256}, num_warps=4)
    return index
