"""Which windows of a stream of steps lie within one episode."""

import torch
from torch import Tensor


def run_lengths(done: Tensor, active: Tensor | None, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Rows since the episode began, each row itself counted, for a block of time rows that continues streams.

    Args:
        done: ``[T, N]`` bool, whether the episode ends with this row.
        active: ``[T, N]`` bool, rows that may be used, None for all. An inactive row has length 0 and breaks the run.
        carry: ``[N]`` int64, length of the run that the first row continues; 0 after an end.

    Returns:
        The lengths, ``[T, N]`` int64, and the carry of the next block, ``[N]`` int64.
    """
    T = done.shape[0]
    order = torch.arange(T, device=done.device).unsqueeze(1)
    breaks = done if active is None else done | ~active
    # Before the block begins there is a break `carry` rows ago: at -1 where a new run begins with row 0.
    first = -1 - carry.unsqueeze(0)
    last_break = torch.cat([first, torch.where(breaks, order, first)]).cummax(0).values
    lengths = order - last_break[:-1]
    if active is not None:
        lengths = torch.where(active, lengths, 0)
    return lengths, T - 1 - last_break[-1]
