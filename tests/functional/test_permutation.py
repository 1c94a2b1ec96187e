"""Feistel permutations and random permutations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.rows.permutation import feistel_permutation, random_permutation
from torchrl_perf.runtime import no_host_sync


def keys(seed=0, device="cpu"):
    return torch.randint(2**31, (12,), generator=torch.Generator().manual_seed(seed)).to(device)


def is_permutation(p, n):
    return p.dtype == torch.int64 and torch.equal(p.sort().values.cpu(), torch.arange(n))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31 - 1))
def test_feistel_is_one_to_one_for_any_n_and_keys(n, seed):
    assert is_permutation(feistel_permutation(n, keys(seed)), n)


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000, 8192, 2**17, 3 * 2**12])
def test_feistel_sizes(n, device):
    assert is_permutation(feistel_permutation(n, keys(device=device)), n)


def test_feistel_is_what_a_scalar_loop_gives():
    """The same network in Python's integers, which cannot overflow."""
    n, network = 8 * 12, keys(5)

    def mix(value, key):
        value = (value * 0x2C1B3C6D + key) % 2**32
        value = ((value ^ (value >> 15)) * 0x297A2D39) % 2**32
        return value ^ (value >> 16)

    expected = []
    for index in range(n):
        left, right = divmod(index, 12)
        for first, second in network.view(6, 2).tolist():
            left = (left + mix(right, first)) % 8
            right = (right + mix(left, second)) % 12
        expected.append(left * 12 + right)
    assert feistel_permutation(n, network).tolist() == expected


def chi_square_excess(counts, expected):
    """Standard deviations by which a chi-square statistic exceeds its mean."""
    cells = counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - cells) / math.sqrt(2 * cells))


def test_feistel_positions_and_pairs_are_uniform():
    n, draws = 64, 6400
    generator = torch.Generator().manual_seed(1)
    permutations = torch.stack(
        [feistel_permutation(n, torch.randint(2**31, (12,), generator=generator)) for _ in range(draws)]
    )
    place = torch.stack([permutations[:, i].bincount(minlength=n) for i in range(n)]).double()
    assert abs(chi_square_excess(place, draws / n)) < 5
    # neighbours stay neighbours no more often than chance: the difference of two adjacent places is uniform over n - 1
    gap = ((permutations[:, 1:] - permutations[:, :-1]) % n).flatten().bincount(minlength=n).double()
    assert gap[0] == 0
    assert abs(chi_square_excess(gap[1:], draws * (n - 1) / (n - 1))) < 6


@pytest.mark.parametrize("n", [1, 2, 13, 97, 96, 4096])
def test_random_permutation_is_fresh_and_repeats_with_the_seed(n, device):
    torch.manual_seed(3)
    first, second = random_permutation(n, device), random_permutation(n, device)
    torch.manual_seed(3)
    assert torch.equal(first, random_permutation(n, device))
    assert is_permutation(first, n)
    assert is_permutation(second, n)
    assert first.device.type == device.type
    if n > 50:
        assert not torch.equal(first, second)


def test_no_host_read():
    with no_host_sync():
        random_permutation(96, torch.device("cpu"))
        feistel_permutation(96, keys())
