"""PackedRecord: fields of any dtype in one copy, and blocks that take turns."""

import numpy as np
import pytest
import torch

from torchrl_perf.runtime.transfer import PackedRecord

FIELDS = [((3,), torch.bool), ((2, 5), torch.float32), ((), torch.int64), ((3, 1), torch.uint8), ((2,), torch.float16)]


def test_fields_go_up_and_down_unchanged(device):
    record = PackedRecord(FIELDS, device)
    values = [np.array([True, False, True]), np.arange(10.0).reshape(2, 5), 7, np.ones((3, 1)), np.array([0.5, -2])]
    for field, value in zip(record.write(), values, strict=True):
        field[...] = value
    record.upload()
    for (shape, dtype), field, value in zip(FIELDS, record.device_fields, values, strict=True):
        assert (tuple(field.shape), field.dtype) == (shape, dtype)
        assert field.is_contiguous()
        assert torch.equal(field.cpu(), torch.as_tensor(value).to(dtype).view(shape))
    record.device_fields[1].mul_(2)
    record.download()
    assert (record.wait()[1] == 2 * values[1]).all()
    assert record.wait()[2] == 7


def test_a_block_is_not_the_one_that_was_sent_last(device):
    record = PackedRecord([((4,), torch.float32)], device)
    first = record.write()[0]
    first[:] = 1
    record.upload()
    second = record.write()[0]
    assert not np.shares_memory(first, second)
    second[:] = 2
    assert (record.device_fields[0] == 1).all()
    record.upload()
    assert (record.device_fields[0] == 2).all()
    assert np.shares_memory(record.write()[0], first)


def test_the_current_block_can_be_amended(device):
    record = PackedRecord([((2,), torch.int64), ((2,), torch.int64)], device)
    for field in record.write():
        field[:] = 5
    record.upload()
    record.write(advance=False)[0][:] = 6
    record.upload()
    assert record.device_fields[0].tolist() == [6, 6]
    assert record.device_fields[1].tolist() == [5, 5]


@pytest.mark.gpu
def test_host_memory_is_page_locked():
    record = PackedRecord(FIELDS, torch.device("cuda"))
    assert all(flight.host.is_pinned() for flight in record._flights)
