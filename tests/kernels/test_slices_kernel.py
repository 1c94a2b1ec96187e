"""The kernel of slices against the torch operations, bit for bit."""

from typing import Any

import pytest
import torch
from interpreted import kernel_device, tries_kernels
from tensordict import TensorDict

from torchrl_perf.replay import DeviceStorage, PriorityTree
from torchrl_perf.replay import slice_rows as module
from torchrl_perf.replay.slice_rows import SliceRows

STREAMS, STEPS = 3, 20


def filled(device: str, written: int, *, keys: tuple[str, ...], p_end: float) -> DeviceStorage:
    """A storage of 3 streams of 20 rows, of which ``written`` rows were written, with flags at random."""
    storage = DeviceStorage(STREAMS * STEPS, device=device)
    for _ in range(written):
        flags = {key: torch.rand(STREAMS, 1, 1, device=device) < p_end for key in keys}
        following = {key: flags.pop(key) for key in ("done", "terminated", "truncated") if key in flags}
        storage.write(TensorDict({**flags, "next": following}, [STREAMS, 1], device=device))
    return storage


@tries_kernels
@pytest.mark.parametrize("written", [2, 5, 20, 33])
@pytest.mark.parametrize("weights", ["none", "zero", "some", "priorities"])
@pytest.mark.parametrize(
    ("keys", "truncated_key", "mask_key"),
    [
        (("done",), ("next", "truncated"), None),
        (("done", "truncated", "is_init"), ("next", "truncated"), None),
        (("done",), None, None),
        (("done", "active"), ("next", "truncated"), "active"),
        (("done", "truncated", "terminated", "active", "is_init"), ("next", "truncated"), "active"),
    ],
    ids=["ends", "all", "unmarked", "mask", "all with a mask"],
)
@pytest.mark.parametrize("length", [1, 5])
def test_equals_the_operations(
    monkeypatch: pytest.MonkeyPatch,
    written: int,
    weights: str,
    keys: Any,
    truncated_key: Any,
    mask_key: Any,
    length: int,
):
    device = kernel_device()
    from torchrl_perf.kernels import slices as kernels

    torch.manual_seed(written)
    storage = filled(device, written, keys=keys, p_end=0.3)
    ring, count = storage.ring, 37
    tree, drawn, info = None, None, {}
    uniform = torch.rand(count, dtype=torch.float64, device=device)
    if weights != "none":
        tree = PriorityTree(ring.capacity, device)
        if weights != "zero":
            tree.set_(torch.arange(0, ring.capacity, 3, device=device), torch.rand(ring.capacity // 3, device=device))
        drawn = tree.draw(torch.rand(count, dtype=torch.float64, device=device))
    if weights == "priorities":
        info = {"priority_weight": torch.rand(count, device=device)}
    answers = []
    for answer in (None, kernels):
        monkeypatch.setattr(module, "slice_kernels", lambda _, answer=answer: answer)
        rows = SliceRows(storage, length, ("next", "done"), truncated_key, mask_key)
        answers.append(rows.read(uniform, drawn, tree, dict(info)))
    (index, expected), (kernel_index, received) = answers
    assert torch.equal(index, kernel_index)
    assert expected.keys() == received.keys()
    for key, value in expected.items():
        assert received[key].dtype == value.dtype
        assert torch.equal(received[key], value), key


@tries_kernels
@pytest.mark.parametrize("written", [1, 5, 20, 33])
@pytest.mark.parametrize("within_episode", [True, False])
@pytest.mark.parametrize(
    ("keys", "mask_key"),
    [(("done",), None), (("done", "active"), "active"), (("done", "active", "terminated"), "active")],
    ids=["ends", "mask", "terminal rows"],
)
@pytest.mark.parametrize("length", [1, 5, 20])
def test_starts_equal_the_operations(
    monkeypatch: pytest.MonkeyPatch,
    written: int,
    within_episode: bool,
    keys: tuple[str, ...],
    mask_key: str | None,
    length: int,
):
    device = kernel_device()
    from torchrl_perf.kernels import slices as kernels

    torch.manual_seed(written)
    storage = filled(device, written, keys=keys, p_end=0.2)
    for time_rows in (1, 3, 18, 20):
        run = torch.randint(0, 8, (STREAMS,), device=device)
        answers = []
        for answer in (None, kernels):
            monkeypatch.setattr(module, "slice_kernels", lambda _, answer=answer: answer)
            carried = run.clone()
            rows = SliceRows(storage, length, ("next", "done"), None, mask_key)
            answers.append((*rows.starts(carried, time_rows, within_episode), carried))
        for expected, received in zip(*answers, strict=True):
            assert torch.equal(expected, received)
