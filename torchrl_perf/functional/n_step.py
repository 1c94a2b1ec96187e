"""n-step returns, exact at episode ends and at the end of the batch.

A window of step t holds the steps t, t+1, ... of one stream. It ends with the first done step, with the last step
available, or after n steps: a window never crosses an episode end, another environment's row or the write position of a
ring. Rewards beyond the end are left out by selection, never by a product with 0, so a NaN there has no effect.
"""

import torch
from torch import Tensor

from torchrl_perf.functional.scan import describe, resolve_time_dim
from torchrl_perf.functional.wide import compute_dtype


def n_step_window(reward: Tensor, done: Tensor, available: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """Discounted reward sum of a window of at most n steps (Sutton and Barto, Reinforcement Learning, 2nd ed., 7.1).

    ``returns = sum_(k < steps) gamma^k * reward_k`` where ``steps`` counts the rows up to the first done one, that row
    included, and is at most ``available`` and n. The target that belongs to it is
    ``returns + gamma^steps * V(next observation of the window's last row)``, without the second term where that row is
    terminated.

    Args:
        reward: ``[*, n]`` float, the rewards of the window in time order.
        done: ``[*, n]`` bool.
        available: ``[*]`` int64, how many rows of the window exist, at least 1; more than n counts as n.
        gamma: discount, a float or a 0-d tensor.

    Returns:
        ``returns`` ``[*]``, float64 if reward is float64, else float32, and ``steps`` ``[*]`` int64 in ``[1, n]``.
    """
    steps = _window_steps(done, available)
    return _discounted_sum(reward, steps, gamma), steps


def n_step_targets(
    reward: Tensor, done: Tensor, *, n: int, gamma: float | Tensor, time_dim: int = -2
) -> tuple[Tensor, Tensor, Tensor]:
    """n-step rewards of every step of a batch, for a buffer that makes its targets when it is written.

    The windows of the last ``n - 1`` steps end with the batch: they are shorter, but still exact.

    Args:
        reward: ``[*batch, T, *F]`` float.
        done: bool, of reward's shape, or with dimensions after time missing or of size 1 (agents share it).
        n: longest window, at least 1.
        gamma: discount, a float or a 0-d tensor.
        time_dim: dimension of time in ``reward``.

    Returns:
        - ``returns``, of reward's shape, float64 if reward is float64, else float32;
        - ``steps``, of ``done``'s shape, int64: rows in the window;
        - ``last_index``, of ``done``'s shape, int64: time index within the batch of the window's last row, whose next
          observation and flags belong to the window.

    Raises:
        TypeError: if reward is not float or done not bool.
        ValueError: if n is below 1, or the shapes or devices do not fit.
    """
    if n < 1:
        raise ValueError(f"expected a window of n >= 1 steps, received n={n}. Remedy: n=1 is the plain reward.")
    dim = resolve_time_dim(time_dim, reward.shape)
    flags = _aligned_flags(reward, done, dim)
    T = reward.shape[dim]
    n = min(n, T)
    left = torch.arange(T, 0, -1, device=reward.device)
    left = left.view(-1, *(1 for _ in range(reward.ndim - dim - 1)))
    steps = _window_steps(_windows(flags, n, dim), left)
    returns = _discounted_sum(_windows(reward, n, dim), steps, gamma)
    last_index = T - left + steps - 1
    return returns, steps.view(done.shape), last_index.view(done.shape)


def _window_steps(done: Tensor, available: Tensor) -> Tensor:
    """Rows up to the first done one of ``[*, n]``, that one included, at most ``available``."""
    n = done.shape[-1]
    order = torch.arange(n, device=done.device)
    first_done = torch.where(done, order, n - 1).amin(-1)
    return torch.minimum(first_done + 1, available)


def _discounted_sum(reward: Tensor, steps: Tensor, gamma: float | Tensor) -> Tensor:
    """``sum_(k < steps) gamma^k * reward_k`` over the last dimension of ``[*, n]``."""
    dtype = compute_dtype(reward)
    order = torch.arange(reward.shape[-1], device=reward.device)
    inside = torch.where(order < steps.unsqueeze(-1), reward.to(dtype), 0.0)
    gamma = gamma.to(dtype) if isinstance(gamma, Tensor) else gamma
    return (inside * torch.pow(gamma, order.to(dtype))).sum(-1)


def _windows(tensor: Tensor, n: int, dim: int) -> Tensor:
    """``[*, T, *F, n]``: element k of the last dimension is the step k rows later; zeros after the last row."""
    shape = list(tensor.shape)
    shape[dim] = n - 1
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).unfold(dim, n, 1)


def _aligned_flags(reward: Tensor, done: Tensor, dim: int) -> Tensor:
    """``done`` with dimensions of size 1 after time where it lacks them, checked against ``reward``."""
    received = describe(reward=reward, done=done)
    if not reward.is_floating_point() or done.dtype != torch.bool:
        raise TypeError(
            f"expected a float reward and a bool done, received {received}. Remedy: reward.float(), done.bool()"
        )
    flags = done
    while dim < flags.ndim < reward.ndim:
        flags = flags.unsqueeze(dim + 1)
    same_lead = flags.ndim == reward.ndim and flags.shape[: dim + 1] == reward.shape[: dim + 1]
    if not same_lead or any(a not in (1, b) for a, b in zip(flags.shape, reward.shape, strict=True)):
        raise ValueError(
            f"expected done of reward's shape, dimensions after time (dimension {dim}) missing or of size 1, received "
            f"{received}. Remedy: done.squeeze(-1), or a done of size 1 after time"
        )
    if done.device != reward.device:
        raise ValueError(
            f"expected reward and done on one device, received {received}. Remedy: move them with .to(device)."
        )
    return flags
