"""A flag that is no bool, or of another shape than the rows, is refused, each on its own."""

import pytest
import torch

from torchrl_perf.functional.rows.valid import fitted_rows


@pytest.mark.parametrize(
    ("flag", "received"),
    [(torch.ones(4), r"torch.float32 \[4\]"), (torch.ones(3, dtype=torch.bool), r"torch.bool \[3\]")],
    ids=["float of the right shape", "bool of another shape"],
)
def test_refused(flag, received):
    with pytest.raises(ValueError, match=rf"mask: expected bool \[4\] or \[4, 1\].*received {received}.*Remedy"):
        fitted_rows(flag, (4,), "mask")


def test_a_column_fits():
    flag = torch.tensor([[True], [False], [True]])
    assert fitted_rows(flag, (3,)).tolist() == [True, False, True]
