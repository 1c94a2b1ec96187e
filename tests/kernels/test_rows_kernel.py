"""Packed rows on CUDA against plain indexing, and the torch form against a loop."""

import pytest
import torch
from interpreted import kernel_device, tries_kernels

from torchrl_perf.functional.priority_tree import uniform_rows
from torchrl_perf.kernels import gather_rows, write_rows


@pytest.mark.parametrize("width", [7, 16, 20, 64, 3088])
def test_gather_takes_whole_rows(width: int, device: torch.device):
    source = torch.randint(0, 255, (50, width), dtype=torch.uint8, device=device)
    index = torch.randint(0, 50, (37,), device=device)
    assert torch.equal(gather_rows(source, index), source[index])


@pytest.mark.parametrize(("first", "last"), [(0, 32), (16, 48), (3, 10)])
def test_gather_takes_a_range_of_columns(first: int, last: int, device: torch.device):
    source = torch.randint(0, 255, (50, 64), dtype=torch.uint8, device=device)[:, first:last]
    index = torch.randint(0, 50, (1000,), device=device)
    assert torch.equal(gather_rows(source, index), source[index])


@pytest.mark.gpu
def test_gather_reaches_rows_beyond_two_gigabytes():
    source = torch.empty(800_000, 3088, dtype=torch.uint8, device="cuda")
    index = torch.tensor([0, 799_999, 700_000], device="cuda")
    source[index] = torch.randint(0, 255, (3, 3088), dtype=torch.uint8, device="cuda")
    assert torch.equal(gather_rows(source, index), source[index])


@pytest.mark.parametrize("cursor", [0, 5, 12, 700])
@pytest.mark.parametrize(("steps", "num_streams", "num_steps"), [(7, 3, 4), (5, 1, 5), (64, 33, 20)])
def test_write_puts_every_field_of_every_row_in_its_slot(
    cursor: int, steps: int, num_streams: int, num_steps: int, device: torch.device
):
    rows = num_steps * num_streams
    ring = torch.zeros(steps * num_streams, 64, dtype=torch.uint8, device=device)
    fields = [torch.randn(rows, 5), torch.rand(rows, 1) > 0.5, torch.arange(rows), torch.randn(rows, 2).bfloat16()]
    offsets = [16, 1, 8, 2]
    expected = ring.cpu()
    for row in range(rows):
        slot = ((cursor + row // num_streams) % steps) * num_streams + row % num_streams
        for field, offset in zip(fields, offsets, strict=True):
            packed = field[row].reshape(-1).view(torch.uint8)
            expected[slot, offset : offset + packed.numel()] = packed
    moved = [field.to(device) for field in fields]
    write_rows(ring, torch.tensor(cursor, device=device), moved, offsets, num_streams=num_streams)
    assert torch.equal(ring.cpu(), expected)


@tries_kernels
@pytest.mark.parametrize("width", [7, 16, 20, 64, 3088])
@pytest.mark.parametrize(("cursor", "length"), [(3, 3), (10, 10), (23, 7)])
def test_one_launch_draws_and_gathers(width: int, cursor: int, length: int):
    device = kernel_device()
    from torchrl_perf.kernels.rows import launch_draw_and_gather

    source = torch.randint(0, 255, (50, width), dtype=torch.uint8, device=device)
    counters = torch.tensor([cursor, length, 0], device=device)
    uniform = torch.rand(37, dtype=torch.float64, device=device)
    index, rows = launch_draw_and_gather(source, uniform, counters[0], counters[1], 10, 5)
    assert torch.equal(index, uniform_rows(uniform, counters[0], counters[1], 10, 5))
    assert torch.equal(rows, source[index])


@tries_kernels
@pytest.mark.parametrize("cursor", [0, 5, 12, 700])
@pytest.mark.parametrize(("steps", "num_streams", "num_steps"), [(7, 3, 4), (5, 1, 5), (64, 33, 20), (5000, 1, 5000)])
def test_one_launch_writes_and_counts(cursor: int, steps: int, num_streams: int, num_steps: int):
    """Rows, slots and counters; of many programs the last one counts, and leaves the zero for the next launch."""
    device = kernel_device()
    from torchrl_perf.kernels.rows import launch_write

    rows, sizes, offsets = num_steps * num_streams, (20, 1, 16), (16, 1, 40)
    fields = [torch.randn(rows, 5), torch.rand(rows, 1) > 0.5, torch.randn(rows, 2, dtype=torch.complex64)]
    moved = [field.to(device) for field in fields]
    counters = torch.tensor([cursor, min(cursor, steps), 0], device=device)
    ring = torch.zeros(steps * num_streams, 64, dtype=torch.uint8, device=device)
    for times in range(2):
        index = torch.full((rows,), -1, device=device)
        launch_write(ring, counters, moved, offsets, sizes, (rows, num_streams), index)
        row = torch.arange(rows)
        slot = (cursor + times * num_steps + row // num_streams) % steps * num_streams + row % num_streams
        assert torch.equal(index.cpu(), slot)
        for field, offset, size in zip(fields, offsets, sizes, strict=True):
            assert torch.equal(ring.cpu()[slot, offset : offset + size], field.view(torch.uint8).view(rows, size))
        written = cursor + (times + 1) * num_steps
        assert counters.tolist() == [written, min(written, steps), 0]
