"""Final observations that are missing: environments that reset themselves have no true one to give.

TorchRL's convention (``EnvBase._native_autoreset_set_invalid_next_observation``, ``NextStateReconstructor``) is NaN in
("next", observation) where an episode ended. Its value estimators then read the observation of the same step instead:
the bootstrap of a truncated step is V(s_t), the nearest value that is known, and that of a terminated step is none.
"""

import torch
from torch import Tensor


def steps_without_successor(done: Tensor, batch_dims: int, time_dim: int) -> Tensor:
    """The steps whose next observation may be missing: those that end an episode, and the last of the batch.

    Args:
        done: bool ``[*batch, *F]``, time among the batch dims.
        batch_dims: number of the batch dims.
        time_dim: dimension of time, from the front.

    Returns:
        bool of ``done``'s shape.
    """
    shape = [1] * done.ndim
    shape[time_dim] = done.shape[time_dim]
    last = torch.arange(done.shape[time_dim], device=done.device) == done.shape[time_dim] - 1
    return done | last.view(shape)


def stand_in(following: Tensor, root: Tensor, ended: Tensor, batch_dims: int) -> Tensor:
    """Next observations, with the step's own numbers in place of NaN where there is no successor.

    A NaN at any other step stays: it is a fault, which has to be seen.

    Args:
        following: ``[*batch, *O]`` float.
        root: the same shape, the observations of the same steps.
        ended: bool ``[*batch, *F]``, of :func:`steps_without_successor`; an agent's own where F is those of ``O``.
        batch_dims: number of the batch dims.

    Returns:
        ``[*batch, *O]``; ``following`` itself for another dtype or shape than the root's.
    """
    if not following.is_floating_point() or following.shape != root.shape or following is root:
        return following
    own = ended.ndim == following.ndim and ended.shape[:-1] == following.shape[:-1] and ended.shape[-1] == 1
    if not own:
        ended = ended.flatten(batch_dims).any(-1) if ended.ndim > batch_dims else ended
        ended = ended.reshape(*ended.shape, *(1,) * (following.ndim - ended.ndim))
    return torch.where(following.isnan() & ended, root, following)
