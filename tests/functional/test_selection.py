"""leftmost_k against a stable sort of each row, ties and degenerate rows included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional import leftmost_k
from torchrl_perf.functional.rows.selection import rank_by_counting
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.runtime.compile import compiled


def oracle(key, alive, k):
    """Rows one by one, with Python's stable sort."""
    out = torch.zeros_like(alive)
    for row in range(key.shape[0]):
        living = [i for i in range(key.shape[1]) if alive[row, i]]
        for i in sorted(living, key=lambda i: key[row, i].item())[: max(int(k[row]), 0)]:
            out[row, i] = True
    return out


def test_hand_computed(device):
    key = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0]] * 4, device=device)
    alive = torch.tensor([[True, True, True, True, False]] * 4, device=device)
    got = leftmost_k(key, alive, torch.tensor([0, 1, 3, 9], device=device))
    # the dead one is the leftmost; of the two at 1 the first comes first
    expected = [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    assert got.int().tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_is_the_stable_sort(size, values, seed):
    generator = torch.Generator().manual_seed(seed)
    key = torch.randint(values, (6, size), generator=generator).float()
    alive = torch.rand(6, size, generator=generator) < 0.7
    k = torch.randint(-1, size + 2, (6,), generator=generator)
    got = leftmost_k(key, alive, k)
    assert torch.equal(got, oracle(key, alive, k))
    assert torch.equal(got.sum(-1), torch.minimum(k.clamp_min(0), alive.sum(-1)))
    assert torch.equal(alive & (rank_by_counting(key, alive) < k.unsqueeze(-1)), got)


def test_all_of_a_tie_by_index():
    got = leftmost_k(torch.zeros(1, 6), torch.ones(1, 6, dtype=torch.bool), 4)
    assert got.tolist() == [[True] * 4 + [False] * 2]


def test_infinite_and_nan_keys_of_living_and_dead():
    key = torch.tensor([[torch.inf, torch.nan, -torch.inf, torch.inf, 0.0]])
    alive = torch.tensor([[True, True, False, False, True]])
    got = [leftmost_k(key, alive, k).int().tolist()[0] for k in range(4)]
    assert got == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1], [1, 1, 0, 0, 1]]
    assert (rank_by_counting(key, alive) * alive).tolist() == [[1, 2, 0, 0, 0]]


def test_none_alive_and_one_entry():
    assert not leftmost_k(torch.rand(3, 4), torch.zeros(3, 4, dtype=torch.bool), 2).any()
    assert leftmost_k(torch.rand(3, 1), torch.ones(3, 1, dtype=torch.bool), torch.tensor([0, 1, 2])).int().tolist() == [
        [0],
        [1],
        [1],
    ]


def test_any_batch_shape_and_no_host_read():
    key, alive = torch.rand(2, 3, 5), torch.rand(2, 3, 5) < 0.5
    k = torch.randint(6, (2, 3))
    with no_host_sync():
        got = leftmost_k(key, alive, k)
    assert torch.equal(got.view(6, 5), oracle(key.view(6, 5), alive.view(6, 5), k.view(6)))


def test_variants_agree(variant):
    key = torch.randint(3, (64, 20), device=variant.device).float()
    alive = torch.rand(64, 20, device=variant.device) < 0.6
    k = torch.randint(21, (64,), device=variant.device)
    assert torch.equal(variant(leftmost_k)(key, alive, k).cpu(), oracle(key.cpu(), alive.cpu(), k.cpu()))


def test_compiled_once_for_another_k(fresh_dynamo):
    with torch._dynamo.config.patch(error_on_recompile=True):
        fn = compiled(leftmost_k)
        key, alive = torch.rand(4, 6), torch.ones(4, 6, dtype=torch.bool)
        assert fn(key, alive, torch.full((4,), 2)).sum() == 8
        assert fn(key, alive, torch.arange(4)).sum() == 6


@pytest.mark.parametrize(
    ("alive", "k", "message"),
    [
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), r"alive: expected bool \[2, 3\].*received torch.float32"),
        (torch.ones(2, 4, dtype=torch.bool), 1, r"alive: .*received torch.bool \[2, 4\]"),
        (torch.ones(2, 3, dtype=torch.bool), torch.ones(2), r"k: expected integers \[2\].*Remedy"),
        (torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.long), r"k: .*\[2, 1\]"),
    ],
)
def test_bad_input(alive, k, message):
    with pytest.raises(ValueError, match=message):
        leftmost_k(torch.rand(2, 3), alive, k)
