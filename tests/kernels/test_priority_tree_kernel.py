"""The tree kernels against the torch functions: same leaves, sums, draws, importance weights and generations."""

import os

import pytest
import torch

from torchrl_perf.functional.priority_tree import uniform_rows
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.ring import Ring

CASES = [
    # num_slots, streams, largest top: one, two and three levels
    (1, 1, 1024),
    (65, 5, 1024),
    (4160, 64, 8),
    (70_000, 7, 1024),
    (300_000, 1, 64),
    (1 << 20, 16, 1024),
]


def make_ring(num_slots, streams, device, written, length):
    ring = Ring(num_slots // streams, streams, torch.device(device))
    ring.cursor.fill_(written)
    ring.length.fill_(length)
    return ring


def bad_numbers(priority):
    priority = priority.clone()
    for place, value in enumerate((0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38)):
        priority[place::11] = value
    return priority


def write_both(ours, reference, ring, mirror, batch, generator):
    """One update with everything in it, of the kernels' tree and of the reference's."""
    device = ours.device
    index = torch.randint(-2, ours.num_slots + 2, (batch,), generator=generator)
    index[batch // 2 :] = index[: batch - batch // 2].flip(0)  # many slots twice
    priority = bad_numbers(torch.rand(batch, generator=generator) * 10)
    keep = torch.rand(batch, generator=generator) < 0.8
    is_stale = torch.rand(batch, generator=generator) < 0.1
    generation = mirror.generation(index.clamp(0, ours.num_slots - 1)) - is_stale.long()
    largest, expected = torch.ones((), device=device), torch.ones(())
    alpha = torch.tensor(0.7)
    ours.update_(
        index.to(device), priority.to(device), alpha=alpha.to(device), eps=0.01, keep=keep.to(device),
        max_priority=largest, ring=ring, generation=generation.to(device),
    )  # fmt: skip
    reference.update_(
        index, priority, alpha=alpha, eps=0.01, keep=keep, max_priority=expected, ring=mirror, generation=generation
    )
    assert torch.equal(largest.cpu(), expected)


def check(device, num_slots, streams, top, batch=300, make_tree=PriorityTree):
    generator = torch.Generator().manual_seed(num_slots)
    steps = num_slots // streams
    num_slots = steps * streams
    written, length = 3 * steps + 1, max(1, steps - steps // 4)
    ring, mirror = (make_ring(num_slots, streams, d, written, length) for d in (device, "cpu"))
    ours = make_tree(num_slots, device, largest_top=top)
    reference = PriorityTree(num_slots)
    uniform = torch.rand(batch, dtype=torch.float64, generator=generator)
    beta = torch.tensor(0.5)

    empty, expected = (
        ours.draw_rows(uniform.to(device), beta.to(device), ring),
        reference.draw_rows(uniform, beta, mirror),
    )
    assert torch.equal(empty.index.cpu(), expected.index)
    assert torch.equal(empty.weight.cpu(), torch.ones(batch))
    for _ in range(3):
        write_both(ours, reference, ring, mirror, batch, generator)
        torch.testing.assert_close(ours.weights.cpu(), reference.weights, rtol=2e-5, atol=0)
        assert not (ours._words >> 32).any(), "tickets are cleared"
    assert torch.equal(ours.weights.cpu() > 0, reference.weights > 0)

    reference.load_state_dict({k: v.cpu() if k == "weights" else v for k, v in ours.state_dict().items()})
    torch.testing.assert_close(ours.total.cpu(), reference.total, rtol=1e-14, atol=0)
    assert torch.equal(ours.minimum.cpu(), reference.minimum)
    rows, expected = (
        ours.draw_rows(uniform.to(device), beta.to(device), ring),
        reference.draw_rows(uniform, beta, mirror),
    )
    assert torch.equal(rows.index.cpu(), expected.index)
    assert torch.equal(rows.generation.cpu(), expected.generation)
    torch.testing.assert_close(rows.weight.cpu(), expected.weight, rtol=2e-5, atol=0)
    assert torch.equal(ours.draw(uniform.to(device)).cpu(), expected.index)

    for width in (12, 20, 700, 3088) if num_slots < 100_000 else (20,):
        memory = torch.randint(0, 255, (num_slots, width), dtype=torch.uint8, generator=generator).to(device)
        together, read = ours.draw_memory(uniform.to(device), beta.to(device), ring, memory)
        assert all(torch.equal(found, alone) for found, alone in zip(together, rows, strict=True))
        assert torch.equal(read, memory[rows.index])

    spread = torch.randperm(num_slots, generator=generator)[:batch].to(device)  # no node is reached twice in the end
    ours.set_(spread, torch.rand(len(spread), generator=generator).to(device))
    ours.set_(spread[: batch // 2], torch.rand(len(spread[: batch // 2]), generator=generator).to(device))
    before = ours._sums.clone()
    ours.refresh_()
    assert not any(counts.any() for counts in ours._running[2:]), "counts are left at 0"
    assert torch.equal(ours._sums, before), "sums do not depend on how they were reached"
    ours.set_(torch.arange(num_slots, device=device), torch.ones((), device=device))
    assert torch.equal(ours.total.cpu(), torch.tensor(num_slots, dtype=torch.float64))
    last = ours.draw(torch.tensor([0.0, 1.0 - 2.0**-53, 1.0], dtype=torch.float64, device=device))
    assert last.cpu().tolist() == [0, num_slots - 1, num_slots - 1]


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("batch", [1, 300, 5000])
    def test_against_torch(self, case, batch):
        check("cuda", *case, batch=max(batch, 22))

    @pytest.mark.parametrize("streams", [1, 3, 64])
    def test_uniform_rows(self, streams):
        from torchrl_perf.kernels import tree_kernels

        ring = make_ring(streams * 50, streams, "cuda", 173, 31)
        uniform = torch.rand(1000, dtype=torch.float64, device="cuda")
        ours = tree_kernels(ring.cursor).launch_uniform(uniform, ring.cursor, ring.length, 50, streams)
        assert torch.equal(ours, uniform_rows(uniform, ring.cursor, ring.length, 50, streams))

    def test_one_slot_written_by_everyone(self):
        """The last write of 100,000 to one slot stays, each time."""
        tree = PriorityTree(1 << 20, "cuda")
        for _ in range(5):
            weight = torch.rand(100_000, device="cuda")
            tree.set_(torch.full((100_000,), 77, device="cuda"), weight)
            assert torch.equal(tree.weight_of(torch.tensor([77], device="cuda")), weight[-1:])

    def test_many_updates_do_not_drift(self):
        tree = PriorityTree(1 << 16, "cuda")
        for _ in range(300):
            tree.set_(torch.randint(1 << 16, (4096,), device="cuda"), torch.rand(4096, device="cuda").pow(20) * 1e6)
        torch.testing.assert_close(tree.total, tree.weights.double().sum(), rtol=1e-13, atol=0)

    def test_in_a_graph(self):
        """Replays draw new rows, follow beta and the ring, and write the rows drawn."""
        from torchrl_perf.runtime import capture

        tree, ring = PriorityTree(4096, "cuda"), make_ring(4096, 1, "cuda", 4096, 4096)
        tree.set_(torch.arange(4096, device="cuda"), torch.ones((), device="cuda"))
        beta = torch.zeros((), device="cuda")

        def step():
            rows = tree.draw_rows(torch.rand(256, dtype=torch.float64, device="cuda"), beta, ring)
            tree.set_(rows.index, torch.full((), 2.0, device="cuda"))
            return rows.index, rows.weight

        captured = capture(step, compile=False)
        draws = [captured()[0].clone() for _ in range(6)]
        assert not any(torch.equal(draws[-1], other) for other in draws[:-1])
        assert (tree.weights[torch.cat(draws)] == 2).all()
        beta.fill_(1.0)
        weight = captured()[1]
        assert set(weight.cpu().tolist()) == {0.5, 1.0}


@pytest.mark.parametrize("case", [(1, 1, 1024), (65, 5, 1024), (4160, 64, 8), (70_000, 7, 1024), (9000, 3, 2)], ids=str)
def test_kernels_in_the_interpreter(monkeypatch, case):
    """The same kernels on CPU tensors, with TRITON_INTERPRET=1 in the environment (Triton reads it at its import)."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves run on this machine")
    from torchrl_perf.kernels import priority_tree as kernels
    from torchrl_perf.kernels import rows
    from torchrl_perf.replay import priority_tree as module

    def make_tree(*args, **options):
        tree = PriorityTree(*args, **options)
        tree._words.is_interpreted = True
        tree._running = tree._make_running()
        return tree

    monkeypatch.setattr(module, "tree_kernels", lambda words: kernels if hasattr(words, "is_interpreted") else None)
    monkeypatch.setattr(module, "row_kernels", lambda memory: rows)
    check("cpu", *case, batch=40, make_tree=make_tree)
