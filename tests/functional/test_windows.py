"""Run lengths of streams and the permutation by index, against loops."""

import itertools
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.rows.shuffle import ROUNDS, shuffled_index
from torchrl_perf.functional.rows.windows import run_lengths


def run_loop(done, active, carry):
    """Lengths and carry of one stream, row by row."""
    lengths = []
    for ends, counts in zip(done, active, strict=True):
        carry = carry + 1 if counts else 0
        lengths.append(carry)
        carry = 0 if ends or not counts else carry
    return lengths, carry


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.data())
def test_run_lengths_equal_the_loop(T, N, data):
    flags = st.lists(st.booleans(), min_size=T * N, max_size=T * N)
    done = torch.tensor(data.draw(flags)).view(T, N)
    active = torch.tensor(data.draw(flags)).view(T, N) if data.draw(st.booleans()) else None
    carry = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=N, max_size=N)))
    lengths, after = run_lengths(done, active, carry)
    for env in range(N):
        mask = [True] * T if active is None else active[:, env].tolist()
        expected, rest = run_loop(done[:, env].tolist(), mask, int(carry[env]))
        assert lengths[:, env].tolist() == expected
        assert after[env] == rest


def test_blocks_continue_one_another():
    """Two blocks with the carry between them count like one block."""
    done, zero = torch.rand(11, 4) < 0.3, torch.zeros(4, dtype=torch.int64)
    whole, carry = run_lengths(done, None, zero)
    first, between = run_lengths(done[:4], None, zero)
    second, after = run_lengths(done[4:], None, between)
    assert torch.cat([first, second]).equal(whole)
    assert after.equal(carry)


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.integers(1, 70), st.sampled_from([997, 1024, 4099])))
def test_shuffled_index_is_a_permutation(size):
    keys = torch.randint(2**31, (ROUNDS,))
    index = shuffled_index(torch.arange(size), torch.tensor(size), keys)
    assert index.sort().values.equal(torch.arange(size))


def test_every_permutation_of_four_is_as_likely():
    """Chi-square of 6,000 permutations over the 24 there are: 23 degrees of freedom, 49.7 at one in a thousand."""
    trials = 6000
    keys = torch.randint(2**31, (ROUNDS, trials, 1))
    drawn = shuffled_index(torch.arange(4).expand(trials, 4), torch.tensor(4), keys)
    counts = Counter(map(tuple, drawn.tolist()))
    expected = trials / 24
    assert sum((counts[p] - expected) ** 2 for p in itertools.permutations(range(4))) / expected < 49.7


def test_pairs_of_a_large_permutation_are_independent():
    """Differences of neighbours, in 20 cells: chi-square with 19 degrees of freedom, 43.8 at one in a thousand."""
    size, trials = 1000, 40
    keys = torch.randint(2**31, (ROUNDS, trials, 1))
    drawn = shuffled_index(torch.arange(0, size, 10).expand(trials, 100), torch.tensor(size), keys)
    gap = (drawn[:, 1:] - drawn[:, :-1]) % size
    observed = torch.bincount((gap[:, ::2].reshape(-1) - 1) * 20 // (size - 1), minlength=20).double()
    assert ((observed - observed.mean()) ** 2 / observed.mean()).sum() < 43.8
