"""Advantages and value targets: GAE, TD(lambda) and V-trace, exact at episode ends and free of host waits.

Time convention: the reward, done and terminated of step t belong to the transition s_t -> s'_t. V(s'_t) is the value of
the true next observation, also where the environment was reset after step t. ``terminated`` stops the bootstrap,
``done`` the recursion. Both act by selection, never by a product with 0, so that a NaN or an infinity stays in its
episode, and the value of a terminated step's next observation has no effect.
"""

import torch
from torch import Tensor

from torchrl_perf.functional.scan import (
    describe,
    from_rows,
    log_scan,
    needs_functional,
    resolve_time_dim,
    scan_in_place,
    to_rows,
)
from torchrl_perf.functional.wide import compute_dtype
from torchrl_perf.kernels import gae_rows, has_scan_kernels, recurrence_rows


def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimate (GAE, arXiv:1506.02438), without waiting for the host.

    ``delta_t = r_t + gamma * (0 if terminated_t else V(s'_t)) - V(s_t)``
    ``A_t = delta_t + (0 if done_t else gamma * lmbda * A_(t+1))``

    The drop-in counterpart of ``torchrl.objectives.value.functional.generalized_advantage_estimate``. On CUDA one
    kernel does all of it, in any memory order, for float32, bfloat16 and float16; where a gradient is needed, and
    elsewhere, it is differentiable.

    Args:
        gamma: discount; a float, a 0-d tensor, or a tensor that broadcasts to ``state_value`` (multi-step rewards).
        lmbda: decay of the trace; a float, a 0-d tensor, or a tensor that broadcasts to ``state_value``.
        state_value: V(s_t), ``[*batch, T, *F]`` float.
        next_state_value: V(s'_t), same shape.
        reward: same shape, or one that lacks dimensions after time (agents share it) or has size 1 there.
        done: bool, shapes as for ``reward``.
        terminated: bool, shapes as for ``reward``; None means that every done step is terminated.
        time_dim: dimension of time in ``state_value``.

    Returns:
        ``(advantage, value_target)`` with ``value_target = advantage + state_value``, both of ``state_value``'s shape
        in the memory order of ``reward``: float64 if any input is float64, else float32.

    Raises:
        TypeError: if values or reward are not float, or flags not bool.
        ValueError: if shapes or devices do not fit, or there is no such dimension.
    """
    terminated = done if terminated is None else terminated
    floats = {"state_value": state_value, "next_state_value": next_state_value, "reward": reward}
    flags = {"done": done, "terminated": terminated}
    dim, (value, next_value, reward, done, terminated) = _fit(time_dim, floats, flags)
    dtype = compute_dtype(value, next_value, reward)
    gamma, lmbda = _number(gamma, value, dtype), _number(lmbda, value, dtype)
    numbers = [number for number in (gamma, lmbda) if isinstance(number, Tensor)]
    is_fusable = has_scan_kernels(value, next_value, reward) and not any(n.ndim or n.requires_grad for n in numbers)
    if not is_fusable:
        return _gae_torch(gamma, lmbda, value, next_value, reward, done, terminated, dim)
    rows = (to_rows(tensor, dim) for tensor in (value, next_value, reward, done, terminated))
    advantage, target = gae_rows(gamma, lmbda, *rows)
    return from_rows(advantage, value.shape, dim), from_rows(target, value.shape, dim)


def td_lambda_targets(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """TD(lambda) targets (Sutton and Barto, Reinforcement Learning, 2nd ed., 12.1), without waiting for the host.

    ``G_t = r_t + gamma * ((1 - lmbda) * V(s'_t) + lmbda * G_(t+1))``; a terminated step has ``G_t = r_t``, a truncated
    one and the last of the batch ``G_t = r_t + gamma * V(s'_t)``.

    Args:
        gamma: discount; a float, a 0-d tensor, or a tensor that broadcasts to ``next_state_value``.
        lmbda: weight of the longer returns, likewise.
        next_state_value: V(s'_t) of the true next observation, ``[*batch, T, *F]`` float.
        reward: same shape, or one that lacks dimensions after time or has size 1 there.
        done: bool, shapes as for ``reward``.
        terminated: bool, shapes as for ``reward``; None means that every done step is terminated.
        time_dim: dimension of time in ``next_state_value``.

    Returns:
        Value target of ``next_state_value``'s shape: float64 if any input is float64, else float32.

    Raises:
        TypeError: if values or reward are not float, or flags not bool.
        ValueError: if shapes or devices do not fit, or there is no such dimension.
    """
    terminated = done if terminated is None else terminated
    floats = {"next_state_value": next_state_value, "reward": reward}
    flags = {"done": done, "terminated": terminated}
    dim, (next_value, reward, done, terminated) = _fit(time_dim, floats, flags)
    dtype = compute_dtype(next_value, reward)
    gamma, lmbda = _number(gamma, next_value, dtype), _number(lmbda, next_value, dtype)
    decay, gamma, lmbda = (_cast(number, dtype) for number in (gamma * lmbda, gamma, lmbda))

    bootstrap = torch.where(terminated, 0.0, next_value.to(dtype))
    mixed = torch.where(done, bootstrap, (1 - lmbda) * bootstrap)
    # The last step of the batch bootstraps with full weight, like a truncated one.
    last = mixed.shape[dim] - 1
    mixed = torch.cat([mixed.narrow(dim, 0, last), bootstrap.narrow(dim, last, 1)], dim)
    return _reverse_scan(decay, done, reward.to(dtype) + gamma * mixed, dim)


def vtrace_advantage_estimate(  # noqa: PLR0913  the signature of TorchRL's function
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages (IMPALA, arXiv:1802.01561), without waiting for the host.

    With ``ratio = exp(log_pi - log_mu)``, ``rho = min(ratio, rho_thresh)`` and ``c = min(ratio, c_thresh)``:

    ``vs_t = V(s_t) + rho_t * (r_t + gamma * V(s'_t) - V(s_t)) + gamma * c_t * (vs_(t+1) - V(s_(t+1)))``
    ``A_t = rho_t * (r_t + gamma * vs_(t+1) - V(s_t))``

    A done step ends the recursion and takes V(s'_t) for ``vs_(t+1)``, as does the last of the batch; a terminated step
    has no bootstrap at all.

    Args:
        gamma: discount; a float, a 0-d tensor, or a tensor that broadcasts to ``state_value``.
        log_pi: log-probability of the action under the policy to evaluate; shapes as for ``reward``.
        log_mu: log-probability of the action under the policy that acted; shapes as for ``reward``.
        state_value: V(s_t), ``[*batch, T, *F]`` float.
        next_state_value: V(s'_t) of the true next observation, same shape.
        reward: same shape, or one that lacks dimensions after time or has size 1 there.
        done: bool, shapes as for ``reward``.
        terminated: bool, shapes as for ``reward``; None means that every done step is terminated.
        rho_thresh: cap of the ratio in the TD error.
        c_thresh: cap of the ratio in the trace.
        time_dim: dimension of time in ``state_value``.

    Returns:
        ``(advantage, value_target)`` of ``state_value``'s shape: float64 if any input is float64, else float32.

    Raises:
        TypeError: if values, reward or log-probabilities are not float, or flags not bool.
        ValueError: if shapes or devices do not fit, or there is no such dimension.
    """
    terminated = done if terminated is None else terminated
    floats = {"state_value": state_value, "next_state_value": next_state_value, "reward": reward}
    floats |= {"log_pi": log_pi, "log_mu": log_mu}
    dim, fitted = _fit(time_dim, floats, {"done": done, "terminated": terminated})
    value, next_value, reward, log_pi, log_mu, done, terminated = fitted
    dtype = compute_dtype(value, next_value, reward, log_pi, log_mu)
    value, next_value, reward = value.to(dtype), next_value.to(dtype), reward.to(dtype)
    gamma = _cast(_number(gamma, value, dtype), dtype)

    ratio = (log_pi.to(dtype) - log_mu.to(dtype)).exp()
    rho = _cap(ratio, rho_thresh)
    delta = rho * (reward + gamma * torch.where(terminated, 0.0, next_value) - value)
    target = value + _reverse_scan(gamma * _cap(ratio, c_thresh), done, delta, dim)

    last = target.shape[dim] - 1
    following = torch.cat([target.narrow(dim, 1, last), next_value.narrow(dim, last, 1)], dim)
    following = torch.where(done, next_value, following)
    advantage = rho * (reward + gamma * torch.where(terminated, 0.0, following) - value)
    return advantage, target


def _gae_torch(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    dim: int,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(value, next_value, reward)
    value, next_value, reward = value.to(dtype), next_value.to(dtype), reward.to(dtype)
    decay, gamma = _cast(gamma * lmbda, dtype), _cast(gamma, dtype)
    numbers = [number for number in (decay, gamma) if isinstance(number, Tensor)]
    if value.is_cuda or needs_functional(value, next_value, reward, *numbers):
        delta = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    else:
        delta = torch.empty_like(reward)
        torch.where(terminated, reward.new_zeros(()), next_value, out=delta)
        if isinstance(gamma, Tensor):
            torch.addcmul(reward, delta, gamma, out=delta)
        else:
            torch.add(reward, delta, alpha=gamma, out=delta)
        delta.sub_(value)
    advantage = _reverse_scan(decay, done, delta, dim)
    return advantage, advantage + value


def _reverse_scan(decay: float | Tensor, cut: Tensor, delta: Tensor, dim: int) -> Tensor:
    """``y_t = delta_t + (0 if cut_t else decay_t * y_(t+1))``. May overwrite ``delta``."""
    if delta.shape[dim] == 1 or (not isinstance(decay, Tensor) and decay == 0.0):
        return delta
    shape, tensors = delta.shape, [delta]
    if isinstance(decay, Tensor):
        decay = decay if decay.ndim == 0 else decay.expand(shape)
        cut = cut | (decay == 0)
        tensors.append(decay)
    if not (delta.is_cuda or needs_functional(*tensors)):
        return scan_in_place(decay, cut, delta, dim, reverse=True)
    decay = decay if isinstance(decay, Tensor) else delta.new_full((), decay)
    if not has_scan_kernels(*tensors):
        return log_scan(decay, cut, delta, dim, reverse=True)
    solved = recurrence_rows(to_rows(torch.where(cut, 0.0, decay), dim), to_rows(delta, dim), None, True)
    return from_rows(solved, shape, dim)


def _number(number: float | Tensor, reference: Tensor, dtype: torch.dtype) -> float | Tensor:
    """A float, or a tensor on the reference's device: 0-d, or one that broadcasts to the reference.

    A tensor is cast to ``dtype``, or stays float64: products of such numbers are never computed in 16 bits.
    """
    if not isinstance(number, Tensor):
        return float(number)
    number = number.to(reference.device, number.dtype if number.dtype == torch.float64 else dtype)
    if number.ndim == 0 or number.numel() == 1:
        return number.reshape(()) if number.ndim else number
    try:
        number.expand(reference.shape)
    except RuntimeError as error:
        raise ValueError(
            "expected gamma and lmbda to be floats, 0-d tensors or tensors that broadcast to the values, received "
            f"{describe(number=number, values=reference)}. Remedy: a float, or a tensor with a dimension of size 1 "
            "for each one that it does not vary along"
        ) from error
    return number


def _cast(number: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    return number.to(dtype) if isinstance(number, Tensor) else number


def _cap(ratio: Tensor, threshold: float | Tensor) -> Tensor:
    if isinstance(threshold, Tensor):
        return torch.minimum(ratio, threshold.to(ratio.device, ratio.dtype))
    return ratio.clamp(max=threshold)


def _fit(time_dim: int, floats: dict[str, Tensor], flags: dict[str, Tensor]) -> tuple[int, list[Tensor]]:
    """Check all inputs against the first one and broadcast them to its shape.

    Values must have that shape; the other inputs may lack dimensions after time, or have size 1 there.

    Returns:
        The dimension of time from the front, and the tensors in the order given.
    """
    tensors = floats | flags
    reference = next(iter(floats.values()))
    shape = reference.shape
    dim = resolve_time_dim(time_dim, shape)
    if not all(tensor.is_floating_point() for tensor in floats.values()):
        raise TypeError(
            f"expected float {', '.join(floats)}, received {describe(**tensors)}. Remedy: convert with .float()."
        )
    if not all(tensor.dtype == torch.bool for tensor in flags.values()):
        raise TypeError(
            f"expected bool {', '.join(flags)}, received {describe(**tensors)}. Remedy: convert with .bool()."
        )
    if not all(tensor.device == reference.device for tensor in tensors.values()):
        raise ValueError(
            f"expected all tensors on one device, received {describe(**tensors)}. Remedy: move them with .to(device)."
        )

    fitted = [_insert_dims(tensor, len(shape), dim) for tensor in tensors.values()]
    values = [tensor for name, tensor in floats.items() if name.endswith("state_value")]
    if any(tensor.shape != shape for tensor in values) or not all(_is_expandable(t, shape, dim) for t in fitted):
        raise ValueError(
            f"expected values of one shape with time at dimension {dim} (time_dim={time_dim}), and every other input "
            f"of that shape or with dimensions after time missing or of size 1, received {describe(**tensors)}. "
            "Remedy: permute or unsqueeze the inputs"
        )
    return dim, [tensor if tensor.shape == shape else tensor.expand(shape) for tensor in fitted]


def _insert_dims(tensor: Tensor, ndim: int, dim: int) -> Tensor:
    """Dimensions of size 1 inserted after time, up to ``ndim``."""
    while dim < tensor.ndim < ndim:
        tensor = tensor.unsqueeze(dim + 1)
    return tensor


def _is_expandable(tensor: Tensor, shape: torch.Size, dim: int) -> bool:
    """Whether the sizes are those of ``shape``, or 1 after dimension ``dim``."""
    if tensor.shape == shape:
        return True
    sizes = list(tensor.shape)
    return len(sizes) == len(shape) and all(
        size == full or (size == 1 and axis > dim) for axis, (size, full) in enumerate(zip(sizes, shape, strict=True))
    )
