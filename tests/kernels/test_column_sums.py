"""Sums of columns over many rows, of which two results may share some."""

import pytest
import torch
from interpreted import kernel_device, tries_kernels

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # Triton's interpreter, of NumPy


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(kernel_device())


@tries_kernels
@pytest.mark.parametrize(
    ("rows", "width", "more", "shared"), [((3, 7), 30, 10, 20), ((40, 110), 5, 70, 0), ((1, 1), 8, 3, 8)]
)
def test_two_sums_in_one_pass(rows: tuple[int, int], width: int, more: int, shared: int):
    from torchrl_perf.kernels.column_sums import column_sums

    a, wide = drawn(*rows, width), drawn(*rows, more + 4, seed=1)
    b = wide[..., 4:]  # columns of a wider row
    first, second = column_sums(a, b, shared)
    of_a, of_b = a.double().sum((0, 1)), b.double().sum((0, 1))
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(first.double(), of_a, **close)
    torch.testing.assert_close(second.double(), torch.cat((of_a[:shared], of_b)), **close)
    again = column_sums(a, b, shared)
    assert all(map(torch.equal, (first, second), again))  # one order, whatever program is done first


@tries_kernels
def test_one_sum_twice():
    from torchrl_perf.kernels.column_sums import column_sums

    a = drawn(5, 9, 12)
    first, second = column_sums(a, None, 12)
    torch.testing.assert_close(first.double(), a.double().sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
