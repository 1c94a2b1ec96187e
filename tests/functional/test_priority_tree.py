"""The tree functions and the tree against slow float64 loops: weights, sums, draws, duplicates, drift, frequencies."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.priority_tree import (
    LARGEST_PRIORITY,
    draw_leaves,
    importance_weight,
    priority_weight,
    row_age,
    uniform_rows,
)
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.ring import Ring
from torchrl_perf.runtime import no_host_sync

SIZES = (1, 2, 63, 64, 65, 100, 4095, 4096, 4097, 5000)


def filled(weights, device="cpu", **options):
    tree = PriorityTree(len(weights), device, **options)
    tree.set_(torch.arange(len(weights), device=device), torch.as_tensor(weights, dtype=torch.float32, device=device))
    return tree


def draw_loop(weights, uniform):
    """The first slot whose running sum exceeds the mass."""
    running = np.cumsum(np.asarray(weights, dtype=np.float64))
    return [int(np.argmax(running > u * running[-1])) for u in uniform]


def uniforms(count, device="cpu"):
    return torch.rand(count, dtype=torch.float64, device=device)


class TestPriorityWeight:
    def test_by_hand(self):
        priority = torch.tensor([100.0, 1.0, 0.0, -0.0])
        weight, usable = priority_weight(priority, 0.7)
        torch.testing.assert_close(weight, torch.tensor([25.118864, 1.0, 0.0, 0.0]))
        assert usable.all()
        assert not weight.signbit().any()

    def test_bad_numbers(self):
        weight, usable = priority_weight(torch.tensor([float("nan"), -1.0, float("inf"), 1e-45, 3e38]), 1.0)
        assert usable.tolist() == [False, False, True, True, True]
        assert weight.isfinite().all()
        assert weight[2] == weight[4] == LARGEST_PRIORITY
        assert weight[3] > 0

    @pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 8.0])
    def test_stays_positive_and_finite(self, alpha):
        weight, _ = priority_weight(torch.tensor([1e-38, 1e-10, 1.0, 1e10, 1e38]), alpha)
        assert (weight > 0).all()
        assert weight.isfinite().all()
        if alpha == 0:
            assert (weight == 1).all()

    def test_eps_raises_positive_priorities_only(self):
        assert priority_weight(torch.tensor([0.0, 1.0]), 1.0, 0.5)[0].tolist() == [0.0, 1.5]


class TestRing:
    @pytest.mark.parametrize(("steps", "streams"), [(1, 1), (5, 1), (4, 3)])
    def test_age_and_generation_follow_a_simulated_ring(self, steps, streams):
        times_written, written_at = [0] * steps, [None] * steps
        slot = torch.arange(steps * streams)
        for cursor in range(3 * steps + 2):
            age, generation = row_age(slot, torch.tensor(cursor), steps, streams)
            for s in slot.tolist():
                t = s // streams
                assert generation[s] == times_written[t] - 1
                assert written_at[t] is None or age[s] == cursor - 1 - written_at[t]
                assert written_at[t] is not None or age[s] >= cursor
            times_written[cursor % steps] += 1
            written_at[cursor % steps] = cursor

    @pytest.mark.parametrize(("cursor", "length"), [(3, 3), (5, 5), (13, 5), (13, 2), (0, 0)])
    def test_uniform_rows_cover_the_valid_rows_evenly(self, cursor, length):
        valid = {(time % 5) * 3 + stream for time in range(cursor - length, cursor) for stream in range(3)}
        count = max(len(valid), 1)
        uniform = (torch.arange(count * 10, dtype=torch.float64) + 0.5) / (count * 10)
        slot = uniform_rows(uniform, torch.tensor(cursor), torch.tensor(length), 5, 3)
        if not valid:
            assert ((slot >= 0) & (slot < 15)).all()
            return
        assert set(slot.tolist()) == valid
        assert (slot.bincount()[sorted(valid)] == 10).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
class TestTree:
    def test_frequencies_and_weights_by_hand(self, device):
        tree = filled([1.0, 2.0, 3.0, 4.0], device)
        uniform = (torch.arange(1000, dtype=torch.float64, device=device) + 0.5) / 1000
        assert tree.draw(uniform).bincount().tolist() == [100, 200, 300, 400]
        weight = importance_weight(tree.weights, tree.minimum, 1.0)
        torch.testing.assert_close(weight.cpu(), torch.tensor([1.0, 0.5, 1 / 3, 0.25]))
        assert (tree.total.item(), tree.minimum.item()) == (10.0, 1.0)

    def test_zeros_are_never_drawn(self, device):
        weights = torch.zeros(5000)
        weights[[7, 64, 4100]] = torch.tensor([1e-30, 1.0, 1e30])
        tree = filled(weights, device)
        edge = torch.tensor([0.0, 1e-300, 0.5, 1 - 2.0**-53, 1.0], dtype=torch.float64, device=device)
        drawn = tree.draw(torch.cat([uniforms(5000, device), edge]))
        assert set(drawn.tolist()) <= {7, 64, 4100}
        assert drawn[-5].item() == 7
        assert drawn[-1].item() == 4100

    def test_the_last_of_several_writes_stays(self, device):
        tree = filled(torch.ones(100), device)
        index = torch.tensor([0, 0, 0, 70, 70], device=device)
        tree.set_(index, torch.tensor([3.0, 1.0, 2.0, 5.0, 6.0], device=device))
        assert tree.weight_of(index).tolist() == [2.0, 2.0, 2.0, 6.0, 6.0]
        keep = torch.tensor([True, True, False, False, False], device=device)
        tree.set_(index, torch.tensor([7.0, 8.0, 9.0, 9.0, 9.0], device=device), keep)
        assert tree.weight_of(index).tolist() == [8.0, 8.0, 8.0, 6.0, 6.0]
        assert tree.total.item() == 98 + 8 + 6

    def test_bad_rows_leave_their_slot(self, device):
        tree = filled([1.0, 2.0, 3.0], device)
        tree.set_(
            torch.tensor([0, 1, -1, 3, 10**12], device=device),
            torch.tensor([float("nan"), -1.0, 9.0, 9.0, 9.0], device=device),
        )
        assert tree.weights.tolist() == [1.0, 2.0, 3.0]
        assert tree.total.item() == 6.0

    def test_an_empty_update_changes_nothing(self, device):
        tree = filled([1.0], device)
        tree.set_(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device))
        assert tree.weights.tolist() == [1.0]

    def test_an_empty_tree(self, device):
        tree = PriorityTree(100, device)
        assert (tree.total.item(), tree.minimum.item()) == (0.0, float("inf"))
        assert (tree.draw(uniforms(9, device)) >= 0).all()

    def test_raise_and_clear(self, device):
        tree = filled([0.0, 4.0, 9.0], device)
        tree.raise_(0.5)
        torch.testing.assert_close(tree.weights.cpu(), torch.tensor([0.0, 2.0, 3.0]))
        assert tree.total.item() == pytest.approx(5.0)
        tree.clear_()
        assert (tree.total.item(), tree.minimum.item()) == (0.0, float("inf"))

    def test_forget(self, device):
        tree, ring = filled(torch.ones(12), device), Ring(4, 3, torch.device(device))
        ring.advance(6)
        ring.length.fill_(2)
        tree.forget_(ring)
        assert tree.weights.view(4, 3).sum(1).tolist() == [3.0, 3.0, 0.0, 0.0]
        assert tree.total.item() == 6.0

    def test_state_is_a_copy_and_bitwise(self, device):
        tree = filled(torch.rand(5000), device)
        for _ in range(5):
            tree.set_(torch.randint(5000, (40,), device=device), torch.rand(40, device=device))
        state = tree.state_dict()
        other = PriorityTree(5000, device)
        other.load_state_dict(state)
        assert torch.equal(other._words, tree._words)
        assert torch.equal(other._sums, tree._sums)
        assert torch.equal(other._minima, tree._minima)
        tree.clear_()
        assert state["weights"].sum() > 0
        assert tree.state_dict(10)["weights"].shape == (10,)
        with pytest.raises(ValueError, match="received those of 5000"):
            PriorityTree(4999, device).load_state_dict(state)

    def test_no_host_wait(self, device):
        tree = filled(torch.rand(5000), device)
        index, weight, uniform = torch.arange(9, device=device), torch.rand(9, device=device), uniforms(9, device)
        with no_host_sync():
            tree.set_(index, weight, weight > 0.5)
            tree.draw(uniform)
            _ = tree.total, tree.minimum


@pytest.mark.parametrize("num_slots", [0, -1, 2**28 + 1])
def test_number_of_slots_is_checked(num_slots):
    with pytest.raises(ValueError, match="num_slots"):
        PriorityTree(num_slots)


@settings(max_examples=25, deadline=None)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**20), zeros=st.sampled_from([0.0, 0.5, 0.98]))
@example(size=4095, seed=343469, zeros=0.0)  # draws a weight below the normal numbers
def test_draws_are_those_of_the_loop(size, seed, zeros):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(size, generator=generator) * torch.rand(size, generator=generator).pow(8)
    weights *= torch.rand(size, generator=generator) >= zeros
    weights[seed % size] = 1e-3
    tree = filled(weights)
    # a positive weight stays a positive normal number
    weights = torch.where(weights > 0, weights.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    uniform = torch.rand(50, dtype=torch.float64, generator=generator)
    assert tree.draw(uniform).tolist() == draw_loop(weights, uniform.tolist())
    drawn = draw_leaves(tree._words, tree._first_sums, uniform)[1]
    assert torch.equal(drawn, weights[tree.draw(uniform)])
    assert tree.minimum == weights[weights > 0].min()


@settings(max_examples=25, deadline=None)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**20), batch=st.sampled_from([1, 7, 300]))
def test_a_batch_equals_its_rows_one_by_one(size, seed, batch):
    generator = torch.Generator().manual_seed(seed)
    together, alone, loop = PriorityTree(size), PriorityTree(size), torch.zeros(size)
    for _ in range(3):
        index = torch.randint(size, (batch,), generator=generator)
        weight, keep = torch.rand(batch, generator=generator), torch.rand(batch, generator=generator) < 0.7
        together.set_(index, weight, keep)
        for row in range(min(batch, 40)):
            alone.set_(index[row : row + 1], weight[row : row + 1], keep[row : row + 1])
        for i, w, k in zip(index.tolist(), weight, keep, strict=True):
            loop[i] = w if k else loop[i]
        assert torch.equal(together.weights, loop)
        if batch <= 40:
            assert torch.equal(together._words, alone._words)
            assert torch.equal(together._sums, alone._sums)
    torch.testing.assert_close(together.total, loop.double().sum(), rtol=1e-14, atol=0)


def test_in_every_variant(variant):
    """Eager, compiled, captured: a write and a draw with everything in them."""
    device, ring = variant.device, Ring(300, 2, variant.device)
    ring.advance(300)
    tree, other = (filled(torch.ones(600), device) for _ in range(2))
    beta, largest = torch.tensor(0.5, device=device), torch.ones((2,), device=device)
    index, priority = torch.randint(600, (50,), device=device), torch.rand(50, device=device) * 4
    generation, uniform = ring.generation(index), uniforms(50, device)

    def step(tree, largest):
        tree.update_(
            index, priority, alpha=beta, eps=0.1, keep=priority > 1, max_priority=largest, ring=ring,
            generation=generation,
        )  # fmt: skip
        return tree.draw_rows(uniform, beta, ring)

    expected = step(tree, largest[0])
    run = variant(lambda: tuple(step(other, largest[1])))
    for _ in range(1 if variant.name == "compiled" else 4):
        rows = run()
    for got, want in zip(rows, expected, strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(other.total, tree.total)
    assert largest[0] == largest[1] > 1


def test_levels_agree():
    """The levels that CUDA keeps, in their torch form."""
    weights = torch.rand(20_000)
    flat, deep = filled(weights), filled(weights, largest_top=4)
    assert len(deep._levels) == 3
    torch.testing.assert_close(deep.total, flat.total, rtol=1e-14, atol=0)
    assert torch.equal(deep.minimum, flat.minimum)
    uniform = uniforms(500)
    assert torch.equal(deep.draw(uniform), flat.draw(uniform))


def test_hundred_thousand_updates_do_not_drift():
    size = 4097
    tree, weights = PriorityTree(size), torch.zeros(size)
    for _ in range(200):
        index = torch.randint(size, (500,)).unique()
        weight = (torch.rand(index.shape[0]).pow(20) * 1e6).clamp_min(1e-20)
        tree.set_(index, weight)
        weights[index] = weight
    assert torch.equal(tree.weights, weights)
    torch.testing.assert_close(tree.total, weights.double().sum(), rtol=1e-14, atol=0)
    assert tree.minimum == weights[weights > 0].min()


def test_frequencies_at_a_million_slots():
    """Chi-square over cells of slots: 2**20 slots, two million draws, weights that differ by 1000 within a node."""
    size, draws = 1 << 20, 2_000_000
    weights = torch.rand(size).pow(3) + 1e-3
    tree = filled(weights)
    counts = torch.zeros(size, dtype=torch.int64)
    for _ in range(draws // 50_000):
        counts += tree.draw(uniforms(50_000)).bincount(minlength=size)
    share = weights.double() / weights.double().sum()
    for by_cell in (lambda x: x.view(1024, -1).sum(1), lambda x: x.view(-1, 1024).sum(0)):  # neighbours, and positions
        expected = by_cell(share) * draws
        chi_square = ((by_cell(counts) - expected) ** 2 / expected).sum()
        assert abs(chi_square - 1023) < 5 * (2 * 1023) ** 0.5, chi_square
