"""Targets have the rows that they are asked for, and those of the batch where none are named."""

import pytest
import torch
from loss_parts import make


@pytest.mark.parametrize("name", ["dqn", "dqn-tensors", "c51", "quantile"])
@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_the_rows_of_the_batch_by_default(name, shape):
    loss, td = make(name, shape)
    got = loss.targets(td)
    assert got.shape[: len(shape)] == torch.Size(shape)
    assert torch.equal(got, loss.targets(td, shape))
    assert not got.requires_grad
