"""Compiled kernels that are placed before the one before them has ended."""

import pytest
import torch

from torchrl_perf.runtime.compile import compiled


@pytest.mark.gpu
def test_kernels_that_read_nothing_do_not_let_others_pass():
    """A long kernel, a fill, and a kernel that reads what the first one writes, many times over."""

    def chain(x, out):
        for number in range(8):
            x = torch.sin(x) * (1.0 + x.mean())
            out[number] = torch.full_like(out[number], number + 1.0)
            x = x * out[number].mean() / (number + 1.0)
        return x

    x, out = torch.rand(1 << 20, device="cuda"), torch.zeros(8, 256, device="cuda")
    expected = chain(x.double(), out.double())
    fn = compiled(chain)
    first = fn(x, out)
    torch.testing.assert_close(first, expected.float(), rtol=1e-4, atol=1e-4)
    for _ in range(20):
        assert torch.equal(fn(x, out), first)
