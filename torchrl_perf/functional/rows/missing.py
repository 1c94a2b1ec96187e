"""Final observations that are missing: environments that reset themselves have no true one to give.

TorchRL's convention (``EnvBase._native_autoreset_set_invalid_next_observation``, ``NextStateReconstructor``) is NaN in
("next", observation) where an episode ended. Its value estimators then read the observation of the same step instead:
the bootstrap of a truncated step is V(s_t), the nearest value that is known, and that of a terminated step is none.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def steps_without_successor(done: Tensor, time_dim: int) -> Tensor:
    """The steps whose next observation may be missing: those that end an episode, and the last of the batch.

    Args:
        done: bool ``[*batch, *F]``, time among the batch dims.
        time_dim: dimension of time, from the front.

    Returns:
        bool of ``done``'s shape.
    """
    shape = [1] * done.ndim
    shape[time_dim] = done.shape[time_dim]
    last = torch.arange(done.shape[time_dim], device=done.device) == done.shape[time_dim] - 1
    return done | last.view(shape)


def stand_in(following: Tensor, root: Tensor, ended: Tensor, batch_dims: int) -> Tensor:
    """Next observations or values, with the step's own numbers in place of NaN where there is no successor.

    A NaN at any other step stays: it is a fault, which has to be seen.

    Args:
        following: ``[*batch, *O]`` float.
        root: the same shape, of the same steps.
        ended: bool ``[*batch, *F]``, of :func:`steps_without_successor`; an agent's own where F is those of ``O``.
        batch_dims: number of the batch dims.

    Returns:
        ``[*batch, *O]``; ``following`` itself for another dtype or shape than the root's.
    """
    if not _comparable(following, root):
        return following
    return torch.where(following.isnan() & _of_rows(ended, following, batch_dims), root, following)


def stand_in_rows(following: Tensor, root: Tensor, ended: Tensor, batch_dims: int) -> Tensor:
    """:func:`stand_in` in one pass, for observations that are missing as a whole: the first number of a row decides.

    Args:
        following: ``[*batch, *O]`` float.
        root: the same shape.
        ended: as for :func:`stand_in`.
        batch_dims: number of the batch dims.

    Returns:
        ``[*batch, *O]``; ``following`` itself for another dtype or shape than the root's.
    """
    if not _comparable(following, root) or not following.numel():
        return following
    ended = _of_rows(ended, following, batch_dims)
    first = following
    for dim in range(following.ndim - 1, batch_dims - 1, -1):
        if ended.shape[dim] == 1:  # agents, which ``ended`` may tell apart, have a first number each
            first = first.narrow(dim, 0, 1)
    return torch.where(first.isnan() & ended, root, following)


def missing_rows(following: Iterable[Tensor], done: Tensor, batch_dims: int) -> Tensor | None:
    """The steps that end an episode and whose next observation is missing: NaN in any entry.

    Args:
        following: next observations ``[*batch, *O]``, of which those that are floating point are looked at.
        done: bool ``[*batch]`` or ``[*batch, 1]``.
        batch_dims: number of the batch dims.

    Returns:
        bool ``[*batch]``; None where there is nothing to look at, or not one flag for each row.
    """
    missing: Tensor | None = None
    for value in following:
        if value.is_floating_point() and value.ndim > batch_dims:
            gone = value.isnan().flatten(batch_dims).any(-1)
            missing = gone if missing is None else missing | gone
    if missing is None or done.numel() != missing.numel():
        return None
    return missing & done.reshape(missing.shape)


def _comparable(following: Tensor, root: Tensor) -> bool:
    return following.is_floating_point() and following.shape == root.shape and following is not root


def _of_rows(ended: Tensor, like: Tensor, batch_dims: int) -> Tensor:
    """Flags that broadcast to ``like [*batch, *O]``: an agent's own, or whether any of the step's is set."""
    if ended.ndim == like.ndim and ended.shape[:-1] == like.shape[:-1] and ended.shape[-1] == 1:
        return ended
    ended = ended.flatten(batch_dims).any(-1) if ended.ndim > batch_dims else ended
    return ended.reshape((*ended.shape, *(1,) * (like.ndim - ended.ndim)))
