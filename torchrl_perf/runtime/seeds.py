"""Seeds of many streams from one seed, which no other seed gives, and blocks of code with their own random numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch

__all__ = ["block_seed", "check_seed", "independent_seed", "own_draws", "seeded", "stream_seeds"]

WORD = 2**31
"""Bound of the numbers that envs written in C or on ``numpy.random.seed`` accept."""


def check_seed(name: str, seed: Any) -> int | None:
    """A seed as a Python int, or None.

    Args:
        name: of the argument, for the message.
        seed: what was given.

    Raises:
        ValueError: for anything but None and integers from 0 on.
    """
    if seed is None:
        return None
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(
            f"{name}: expected None or an integer from 0 on, received {seed!r}. Remedy: {name}=0, 1, 2 and so on, one "
            "for each run."
        )
    return int(seed)


def stream_seeds(seed: int, count: int, *, start: int = 0, first: int = 0, total: int | None = None) -> list[int]:
    """``count`` seeds that belong to ``seed`` alone: two seeds share none, however many each one gives.

    The number of stream i is ``i * i + seed`` for ``i > seed`` and ``seed * seed + seed + i`` otherwise (Szudzik's
    pairing, a bijection of pairs and numbers). It stays below 2**31, which is what some envs take, for seeds and
    numbers of streams up to 46,340; beyond that it grows.

    Args:
        seed: of the run, from 0 on.
        count: how many seeds.
        start: number of the start: 0 for a new run, another one for each point that it is resumed from. If seeds of a
            later start would exceed 31 bits while those of the first start do not, they come from a hash, so that two
            of them coincide only as rarely as random words.
        first: number of the first stream, if other callers use those before it.
        total: streams of a start; by default ``first + count``.
    """
    total = first + count if total is None else total
    exact = [_pair(seed, start * total + i) for i in range(first, first + count)]
    if start == 0 or max(exact, default=0) < WORD or _pair(seed, total - 1) >= WORD:
        return exact
    words = np.random.SeedSequence(seed, spawn_key=(start,)).generate_state(total, np.uint32)
    taken = {_pair(seed, i) for i in range(total)}
    numbers = []
    for word in words.tolist():
        number = word % WORD
        while number in taken:
            number = (number + 1) % WORD
        taken.add(number)
        numbers.append(number)
    return numbers[first : first + count]


def block_seed(seed: int, count: int, *, start: int = 0, number: int = 0) -> int:
    """The first of ``count`` consecutive seeds, for envs that take one number and count up from it themselves.

    Blocks of two seeds do not overlap for equal ``count``.

    Args:
        seed: of the run.
        count: length of the block.
        start: see :func:`stream_seeds`.
        number: of the block, where a run has several.
    """
    length = 1 << max(count - 1, 0).bit_length()
    return _pair(seed, _pair(start, number)) * length


def independent_seed(seed: int, *purpose: int) -> int:
    """A 128-bit seed for a numpy generator with another purpose than the envs.

    Args:
        seed: of the run.
        purpose: numbers that tell the purposes of one seed apart.
    """
    words = np.random.SeedSequence(seed, spawn_key=purpose).generate_state(2, np.uint64)
    return int(words[0]) << 64 | int(words[1])


@contextmanager
def seeded(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Run a block on separate random numbers; torch's generators continue afterwards as if it had drawn none.

    Args:
        seed: of the numbers within the block; None continues from the present state.
        device: whose generator the block draws from, beside the CPU's.
    """
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def own_draws(function: Callable[..., Any], seed: int, device: torch.device | None = None) -> Callable[..., Any]:
    """The function with random numbers of its own, which go on from call to call.

    A policy that is judged so leaves an env the numbers that it would have drawn beside any other policy, so that all
    of them meet the same prices or noise for the same seed.

    Args:
        function: draws from torch's default generators.
        seed: of its numbers.
        device: as for :func:`seeded`.
    """
    words = independent_seed(seed, 1) % 2**63
    with seeded(words, device):
        state = _drawn(device)

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal state
        with seeded(None, device):
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], cast("torch.device", device))
            result = function(*arguments, **options)
            state = _drawn(device)
        return result

    return call


def _drawn(device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States of the CPU's generator and of a GPU's."""
    is_cuda = device is not None and device.type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state(cast("torch.device", device)) if is_cuda else None


def _pair(a: int, b: int) -> int:
    return b * b + a if b > a else a * a + a + b
