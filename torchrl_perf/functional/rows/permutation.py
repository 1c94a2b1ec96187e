"""Random permutations without a sort."""

import math

import torch
from torch import Tensor

_ROUNDS = 6
_SMALLEST_SIDE = 8


def _sides(n: int) -> tuple[int, int]:
    """``n = a * b`` with ``a <= b`` as equal as its divisors allow."""
    a = next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)
    return a, n // a


def _mix(value: Tensor, key: Tensor) -> Tensor:
    """A 32-bit integer hash (multiply and xor-shift) in int64 arithmetic that cannot overflow."""
    value = (value * 0x2C1B3C6D + key) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x297A2D39) & 0xFFFFFFFF
    return value ^ (value >> 16)


def feistel_permutation(n: int, keys: Tensor) -> Tensor:
    """The permutation of ``0..n-1`` that ``keys`` names: a Feistel network over ``Z_a x Z_b`` with ``n = a b``.

    Each round adds a hash of one half to the other, modulo its side, so the map is one-to-one for any ``n`` without
    cycle walking (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, method 3). It is elementwise, so a
    compiler fuses it with the gather that uses it.

    Args:
        n: size, with a divisor of at least 8 below its square root (see :func:`random_permutation`).
        keys: ``[12]`` int64, random in ``[0, 2**31)``.

    Returns:
        ``[n]`` int64.
    """
    a, b = _sides(n)
    index = torch.arange(n, device=keys.device)
    left, right = index // b, index % b
    for first, second in keys.view(_ROUNDS, 2):
        left = (left + _mix(right, first)) % a
        right = (right + _mix(left, second)) % b
    return left * b + right


def random_permutation(n: int, device: torch.device) -> Tensor:
    """A fresh random permutation of ``0..n-1``, int64, without a host wait, from the device's default generator.

    ``torch.randperm`` on the CPU, and where ``n`` has no divisors that a Feistel network can use (a prime, say). A sort
    of half a million keys costs about 0.3 ms on an H100, the network a few microseconds.
    """
    if torch.device(device).type == "cpu" or _sides(n)[0] < _SMALLEST_SIDE:
        return torch.randperm(n, device=device)
    return feistel_permutation(n, torch.randint(2**31, (2 * _ROUNDS,), device=device))
