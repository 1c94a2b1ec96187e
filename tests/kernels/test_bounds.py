"""The check of interpreted kernels' accesses itself."""

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.kernels.interpreted import tries_kernels


@triton.jit
def _copy(source_ptr, target_ptr, count, start, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count, other=0.0), mask=at < count)
    else:
        tl.store(target_ptr + at, tl.load(source_ptr + at))


@tries_kernels
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="it checks the interpreter's accesses")
@pytest.mark.parametrize(("count", "start", "masked", "is_inside"), [
    (5, 0, True, True), (8, 0, False, True), (5, 0, False, False), (8, -1, False, False), (9, 1, True, False),
])  # fmt: skip
def test_an_access_outside_is_an_error(count, start, masked, is_inside):
    source, target = torch.arange(min(count, 8), dtype=torch.float32), torch.zeros(min(count, 8))
    if is_inside:
        _copy[(1,)](source, target, count, start, MASKED=masked, BLOCK=8)
        assert torch.equal(source, target)
        return
    with pytest.raises(Exception, match=r"_copy, test_bounds\.py:\d+: masked_load of 1 of|_copy, .*load of 3 of 8"):
        _copy[(1,)](source, target, count, start, MASKED=masked, BLOCK=8)


@tries_kernels
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="it checks the interpreter's accesses")
def test_a_slice_reaches_its_whole_storage():
    whole, target = torch.arange(16.0), torch.zeros(8)
    _copy[(1,)](whole[4:8], target, 8, 0, MASKED=False, BLOCK=8)
    assert torch.equal(target, whole[4:12])
