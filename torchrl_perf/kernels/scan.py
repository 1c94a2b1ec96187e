"""Triton kernels of the time scans: the fused GAE and the plain linear recurrence, over ``[T, N]`` rows.

A program owns ``BLOCK_N`` environments and walks through time in tiles of ``BLOCK_T`` steps. A tile is loaded at once,
the next one while the current is computed, and solved by an associative scan of the pairs (decay, value); one carry an
environment links the tiles. With many environments each thread owns one of them and the scan within a tile is serial,
in registers; with few, the threads of a program share one environment's time. :func:`launch_shape` chooses.

Import this module only where Triton is. References: :mod:`torchrl_perf.functional.advantages` and
:mod:`torchrl_perf.functional.scan`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Smallest normal float32. A product of decays that underflows stays there, so that a NaN or an infinity still travels
# through its whole episode, as it does in the serial loop, and only a true zero (an episode's end) stops it.
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _combine(decay_far, value_far, decay, value):
    """Composition of two steps of ``y -> value + decay * y``; a decay of zero ignores even a NaN beyond it."""
    is_cut = decay == 0.0
    result = tl.where(is_cut, value, value + decay * value_far)
    product = decay * decay_far
    product = tl.where(product == 0.0, _TINY, product)
    return tl.where(is_cut | (decay_far == 0.0), 0.0, product), result


@triton.jit
def scan_tile(decay, value, carry, FROM_END: tl.constexpr, BLOCK_T: tl.constexpr):
    """Solve a [BLOCK_N, BLOCK_T] tile that continues from ``carry`` [BLOCK_N]; returns solution and new carry."""
    t = tl.arange(0, BLOCK_T)[None, :]
    first = BLOCK_T - 1 if FROM_END else 0
    last = 0 if FROM_END else BLOCK_T - 1
    value = tl.where((t == first) & (decay != 0.0), value + decay * carry[:, None], value)
    _, solved = tl.associative_scan((decay, value), 1, _combine, reverse=FROM_END)
    return solved, tl.sum(tl.where(t == last, solved, 0.0), axis=1)


@triton.jit
def _columns(num_envs, TIME_CONTIGUOUS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Environment indices of this program, [BLOCK_N, 1] int64, and which of them exist."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if not TIME_CONTIGUOUS:
        # One element a thread along n for every dtype: the flags would otherwise get 16 and, by forcing their layout on
        # the floats, move the scan from registers to shared memory.
        n = tl.max_contiguous(n, 1)
    return n[:, None].to(tl.int64), n[:, None] < num_envs


@triton.jit
def _steps(start, num_steps, TIME_CONTIGUOUS: tl.constexpr, REVERSE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Time indices of a tile, [1, BLOCK_T] int64, and which of them exist (a prefetched tile may lie before time 0)."""
    t = start + tl.arange(0, BLOCK_T)
    if TIME_CONTIGUOUS:
        t = tl.max_contiguous(t, 4)
    elif REVERSE:
        # Loaded backwards, the tile is scanned forwards, which saves the shuffles of a reversed scan. Along a
        # contiguous time this would cost the vector loads.
        t = start + (BLOCK_T - 1) - tl.arange(0, BLOCK_T)
    return t[None, :].to(tl.int64), (t[None, :] >= 0) & (t[None, :] < num_steps)


@triton.jit
def _load_signals(
    value_ptr, next_ptr, reward_ptr, done_ptr, term_ptr,
    value_t, next_t, reward_t, done_t, term_t, start, num_steps, is_env,
    TIME_CONTIGUOUS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One tile of the five inputs; a step that does not exist is done, with reward and values 0."""
    t, is_step = _steps(start, num_steps, TIME_CONTIGUOUS, True, BLOCK_T)
    mask = is_step & is_env
    value = tl.load(value_ptr + t * value_t, mask=mask, other=0.0)
    next_value = tl.load(next_ptr + t * next_t, mask=mask, other=0.0)
    reward = tl.load(reward_ptr + t * reward_t, mask=mask, other=0.0)
    done = tl.load(done_ptr + t * done_t, mask=mask, other=1)
    term = tl.load(term_ptr + t * term_t, mask=mask, other=1)
    return value, next_value, reward, done, term


@triton.jit
def _gae_kernel(
    value_ptr, next_ptr, reward_ptr, done_ptr, term_ptr, advantage_ptr, target_ptr, gamma_arg, lmbda_arg,
    num_steps, num_envs,
    value_t, value_n, next_t, next_n, reward_t, reward_n, done_t, done_n, term_t, term_n, out_t, out_n,
    GAMMA_IN_MEMORY: tl.constexpr, LMBDA_IN_MEMORY: tl.constexpr, TIME_CONTIGUOUS: tl.constexpr,
    MANY_TILES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Advantage and value target, backwards in time; every input is read once and nothing is written in between."""
    gamma = tl.load(gamma_arg).to(tl.float32) if GAMMA_IN_MEMORY else gamma_arg
    lmbda = tl.load(lmbda_arg).to(tl.float32) if LMBDA_IN_MEMORY else lmbda_arg
    n, is_env = _columns(num_envs, TIME_CONTIGUOUS, BLOCK_N)
    value_ptrs, next_ptrs, reward_ptrs = value_ptr + n * value_n, next_ptr + n * next_n, reward_ptr + n * reward_n
    done_ptrs, term_ptrs = done_ptr + n * done_n, term_ptr + n * term_n

    num_tiles = tl.cdiv(num_steps, BLOCK_T)
    start = (num_tiles - 1) * BLOCK_T
    carry = tl.zeros([BLOCK_N], tl.float32)
    value, next_value, reward, done, term = _load_signals(
        value_ptrs, next_ptrs, reward_ptrs, done_ptrs, term_ptrs, value_t, next_t, reward_t, done_t, term_t,
        start, num_steps, is_env, TIME_CONTIGUOUS, BLOCK_T,
    )  # fmt: skip
    for _ in range(num_tiles):
        if MANY_TILES:
            value_, next_value_, reward_, done_, term_ = _load_signals(
                value_ptrs, next_ptrs, reward_ptrs, done_ptrs, term_ptrs, value_t, next_t, reward_t, done_t, term_t,
                start - BLOCK_T, num_steps, is_env, TIME_CONTIGUOUS, BLOCK_T,
            )  # fmt: skip
        # TD error r + gamma V' - V. The selects, not a product with 0, keep a NaN behind an episode's end.
        state_value = value.to(tl.float32)
        bootstrap = tl.where(term != 0, 0.0, gamma * next_value.to(tl.float32))
        delta = reward.to(tl.float32) + bootstrap - state_value
        decay = tl.where(done != 0, 0.0, gamma * lmbda)
        advantage, carry = scan_tile(decay, delta, carry, TIME_CONTIGUOUS, BLOCK_T)

        t, is_step = _steps(start, num_steps, TIME_CONTIGUOUS, True, BLOCK_T)
        offsets = t * out_t + n * out_n
        tl.store(advantage_ptr + offsets, advantage, mask=is_step & is_env)
        tl.store(target_ptr + offsets, advantage + state_value, mask=is_step & is_env)
        if MANY_TILES:
            value, next_value, reward, done, term = value_, next_value_, reward_, done_, term_
        start -= BLOCK_T


@triton.jit
def _recurrence_kernel(
    decay_ptr, value_ptr, initial_ptr, out_ptr, num_steps, num_envs,
    decay_t, decay_n, value_t, value_n, initial_n, out_t, out_n, decay_b, value_b, initial_b, out_b,
    HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr, TIME_CONTIGUOUS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``y_t = value_t + decay_t * y`` of the step before (REVERSE: after) in time; a batch b of them along the grid."""
    batch = tl.program_id(1).to(tl.int64)
    decay_ptr += batch * decay_b
    value_ptr += batch * value_b
    initial_ptr += batch * initial_b
    out_ptr += batch * out_b
    n, is_env = _columns(num_envs, TIME_CONTIGUOUS, BLOCK_N)
    carry = tl.zeros([BLOCK_N], tl.float32)
    if HAS_INITIAL:
        first = tl.load(initial_ptr + n * initial_n, mask=is_env, other=0.0).to(tl.float32)
        carry = tl.reshape(first, [BLOCK_N])
    num_tiles = tl.cdiv(num_steps, BLOCK_T)
    for tile in range(num_tiles):
        start = (num_tiles - 1 - tile if REVERSE else tile) * BLOCK_T
        t, is_step = _steps(start, num_steps, TIME_CONTIGUOUS, REVERSE, BLOCK_T)
        mask = is_step & is_env
        # The steps that fill up the last tile pass the carry on unchanged (REVERSE starts with them).
        decay = tl.load(decay_ptr + t * decay_t + n * decay_n, mask=mask, other=1.0).to(tl.float32)
        value = tl.load(value_ptr + t * value_t + n * value_n, mask=mask, other=0.0).to(tl.float32)
        solved, carry = scan_tile(decay, value, carry, REVERSE and TIME_CONTIGUOUS, BLOCK_T)
        tl.store(out_ptr + t * out_t + n * out_n, solved, mask=mask)


def launch_shape(num_envs: int, num_steps: int, *, time_contiguous: bool = False) -> tuple[int, int, int]:
    """Tile and warps of a scan kernel for this problem.

    Args:
        num_envs: N, independent recurrences.
        num_steps: T.
        time_contiguous: memory is ``[N, T]`` (env-major) instead of ``[T, N]`` (time-major).

    Returns:
        ``(block_n, block_t, num_warps)``. A program serves ``block_n`` environments, ``block_t`` steps at a time.
    """
    padded_steps = max(triton.next_power_of_2(num_steps), 8)
    if time_contiguous:
        # Lanes lie along time: a warp takes 128 steps of one environment in one pass.
        block_t = min(padded_steps, 2048)
        block_n = 1 if num_envs <= 512 else max(1, 2048 // block_t)
        block_n = min(block_n, 32, triton.next_power_of_2(num_envs))
        return block_n, block_t, 8 if block_t >= 2048 else 4
    # Lanes lie along environments: with very many of them a thread scans its own in registers. Measured on an H100.
    if num_envs > 16384:
        return 32, min(padded_steps, 4), 1
    if num_envs >= 8192:
        return 16, min(padded_steps, 64), 2
    if num_envs >= 512:
        # half the tiles of a long time, each twice as wide: the walk through them is what takes the time
        return (8, 256, 8) if padded_steps > 256 else (8, min(padded_steps, 128), 4)
    if num_envs > 128:
        return 2, min(padded_steps, 512), 4
    return 1, min(padded_steps, 2048), 8 if padded_steps >= 1024 else 4


def launch_gae(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch the fused GAE kernel; arguments and results as in :func:`torchrl_perf.kernels.gae_rows`."""
    num_steps, num_envs = reward.shape
    if num_steps > 256 and 512 <= num_envs < 8192 and reward.is_cuda and not _is_time_contiguous(reward):
        from torchrl_perf.kernels import gae_runs  # Gluon is loaded where it is used

        rows = state_value, next_state_value, reward, done, terminated
        if gae_runs.takes(rows):
            return gae_runs.gae_in_runs(gamma, lmbda, *rows)
    advantage = torch.empty_like(reward, dtype=torch.float32)
    target = torch.empty_like(reward, dtype=torch.float32)
    time_contiguous = _is_time_contiguous(reward)
    block_n, block_t, num_warps = launch_shape(num_envs, num_steps, time_contiguous=time_contiguous)
    # A bool pointer is an int1 pointer to Triton; the bytes are what is loaded.
    done, terminated = done.view(torch.uint8), terminated.view(torch.uint8)
    with torch.cuda.device_of(reward):
        _gae_kernel[(triton.cdiv(num_envs, block_n),)](
            state_value, next_state_value, reward, done, terminated, advantage, target, gamma, lmbda,
            num_steps, num_envs,
            *state_value.stride(), *next_state_value.stride(), *reward.stride(), *done.stride(), *terminated.stride(),
            *advantage.stride(),
            GAMMA_IN_MEMORY=isinstance(gamma, Tensor), LMBDA_IN_MEMORY=isinstance(lmbda, Tensor),
            TIME_CONTIGUOUS=time_contiguous, MANY_TILES=num_steps > block_t, BLOCK_T=block_t, BLOCK_N=block_n,
            num_warps=num_warps, num_stages=1,
        )  # fmt: skip
    return advantage, target


def launch_recurrence(decay: Tensor, value: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """Launch the plain recurrence; arguments and result as in :func:`torchrl_perf.kernels.recurrence_rows`."""
    num_steps, num_envs = value.shape[-2:]
    batches = len(value) if value.ndim > 2 else 1
    out = torch.empty_like(value, dtype=torch.float32)
    time_contiguous = _is_time_contiguous(value)
    block_n, block_t, num_warps = launch_shape(batches * num_envs, num_steps, time_contiguous=time_contiguous)
    block_n = min(block_n, triton.next_power_of_2(num_envs))
    carries = value[..., 0, :] if initial is None else initial
    grid = triton.cdiv(num_envs, block_n), batches
    with torch.cuda.device_of(value):
        _recurrence_kernel[grid](
            decay, value, carries, out, num_steps, num_envs,
            *decay.stride()[-2:], *value.stride()[-2:], carries.stride(-1), *out.stride()[-2:],
            *(each.stride(0) if batches > 1 else 0 for each in (decay, value, carries, out)),
            HAS_INITIAL=initial is not None, REVERSE=reverse, TIME_CONTIGUOUS=time_contiguous,
            BLOCK_T=block_t, BLOCK_N=block_n, num_warps=num_warps, num_stages=1,
        )  # fmt: skip
    return out


def _is_time_contiguous(rows: Tensor) -> bool:
    """Whether neighbouring steps, rather than neighbouring environments, are neighbours in memory."""
    return rows.shape[-1] == 1 or rows.stride(-2) < rows.stride(-1)
