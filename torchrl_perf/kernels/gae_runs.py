"""A kernel of GAE in which each thread owns a run of steps, for about a thousand steps of about a thousand envs.

:mod:`torchrl_perf.kernels.scan` hands the steps of a tile to the threads in turn, so that each eighth of its steps is a
scan across all warps, and 1,024 steps are four tiles, one after the other, each of which waits for memory. Here, in
Triton's Gluon, which lets a kernel say which thread has which numbers, a tile is 512 steps: a thread scans its run of
steps in registers, and one scan goes across the threads.

Reference: :mod:`torchrl_perf.functional.advantages`. Import this module only where Triton is, and has Gluon.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchrl_perf.kernels.launch import launch

__all__ = ["Runs", "gae_in_runs", "takes"]

_TINY = gl.constexpr(1.1754943508222875e-38)  # see kernels/scan.py


class Runs(NamedTuple):
    """Shape of a program: envs, steps of a thread's run and warps; others of as many envs and more are slower."""

    envs: int = 8
    steps: int = 8
    warps: int = 16


@gluon.jit
def _compose(decay_far, value_far, decay, value):
    """Two steps of ``y -> value + decay * y``; a decay of zero ignores even a NaN beyond it."""
    is_cut = decay == 0.0
    result = gl.where(is_cut, value, value + decay * value_far)
    product = decay * decay_far
    product = gl.where(product == 0.0, _TINY, product)
    return gl.where(is_cut | (decay_far == 0.0), 0.0, product), result


@gluon.jit
def _gae_runs_kernel(
    value_ptr, next_ptr, reward_ptr, done_ptr, term_ptr, advantage_ptr, target_ptr, gamma_arg, lmbda_arg,
    num_steps, num_envs, value_t, value_n, next_t, next_n, reward_t, reward_n, done_t, done_n, term_t, term_n, out_t,
    out_n,
    GAMMA_IN_MEMORY: gl.constexpr, LMBDA_IN_MEMORY: gl.constexpr, ENVS: gl.constexpr, STEPS: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:  # fmt: skip
    """Advantage and value target of ENVS envs, backwards in time."""
    TILE: gl.constexpr = STEPS * (32 // ENVS) * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, STEPS], [ENVS, 32 // ENVS], [1, WARPS], [0, 1])
    of_envs: gl.constexpr = gl.SliceLayout(1, layout)
    gamma = gl.load(gamma_arg).to(gl.float32) if GAMMA_IN_MEMORY else gamma_arg
    lmbda = gl.load(lmbda_arg).to(gl.float32) if LMBDA_IN_MEMORY else lmbda_arg
    n = (gl.program_id(0) * ENVS + gl.arange(0, ENVS, of_envs))[:, None]
    place = gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    num_tiles = (num_steps + TILE - 1) // TILE
    carry = gl.zeros([ENVS], gl.float32, of_envs)
    for tile in range(num_tiles):
        t = (num_tiles - tile) * TILE - 1 - place  # backwards, so that the scan goes forwards
        mask = (n < num_envs) & (t < num_steps)
        value = gl.load(value_ptr + (t * value_t + n * value_n), mask=mask, other=0.0).to(gl.float32)
        following = gl.load(next_ptr + (t * next_t + n * next_n), mask=mask, other=0.0).to(gl.float32)
        reward = gl.load(reward_ptr + (t * reward_t + n * reward_n), mask=mask, other=0.0).to(gl.float32)
        done = gl.load(done_ptr + (t * done_t + n * done_n), mask=mask, other=1)
        term = gl.load(term_ptr + (t * term_t + n * term_n), mask=mask, other=1)
        # the selects, not a product with 0, keep a NaN behind an episode's end
        delta = reward + gl.where(term != 0, 0.0, gamma * following) - value
        decay = gl.where(done != 0, 0.0, gamma * lmbda)
        delta = gl.where((place == 0) & (decay != 0.0), delta + decay * carry[:, None], delta)
        _, advantage = gl.associative_scan((decay, delta), 1, _compose)
        carry = gl.sum(gl.where(place == TILE - 1, advantage, 0.0), axis=1)
        target = t * out_t + n * out_n
        gl.store(advantage_ptr + target, advantage, mask=mask)
        gl.store(target_ptr + target, advantage + value, mask=mask)


def takes(rows: tuple[Tensor, ...]) -> bool:
    """Whether places in these tensors ``[T, N]``, which the kernel counts in 32 bits, fit into them."""
    return all(sum((size - 1) * step for size, step in zip(r.shape, r.stride(), strict=True)) < 2**30 for r in rows)


def gae_in_runs(
    gamma: float | Tensor, lmbda: float | Tensor, state_value: Tensor, next_state_value: Tensor, reward: Tensor,
    done: Tensor, terminated: Tensor, shape: Runs | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages and value targets of time-major ``[T, N]`` rows in one launch.

    Arguments and results as of :func:`torchrl_perf.kernels.gae_rows`; ``shape`` is that of a program.
    """
    envs, steps, warps = shape or Runs()
    num_steps, num_envs = reward.shape
    advantage = torch.empty_like(reward, dtype=torch.float32)
    target = torch.empty_like(advantage)
    done, terminated = done.view(torch.uint8), terminated.view(torch.uint8)  # a pointer to bool is one to bits
    rows = (state_value, next_state_value, reward, done, terminated, advantage)
    launch(
        _gae_runs_kernel, (triton.cdiv(num_envs, envs),),
        (*rows, target, gamma, lmbda, num_steps, num_envs, *(stride for row in rows for stride in row.stride())),
        {
            "GAMMA_IN_MEMORY": isinstance(gamma, Tensor), "LMBDA_IN_MEMORY": isinstance(lmbda, Tensor),
            "ENVS": envs, "STEPS": steps, "WARPS": warps,
        },
        num_warps=warps,
    )  # fmt: skip
    return advantage, target
