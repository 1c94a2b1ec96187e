"""Only losses carry a gradient: priorities and statistics would keep the graph of each update alive."""

import pytest
import torch
from loss_parts import LOSSES, make


@pytest.mark.parametrize("name", LOSSES)
def test_priorities_and_statistics_have_no_gradient(name):
    loss, td = make(name)
    out = loss(td)
    assert all(value.requires_grad == key.startswith("loss") for key, value in out.items()), dict(out)
    assert not td[loss.tensor_keys.priority].requires_grad


@pytest.mark.parametrize("name", ["td3", "ac-iqn", "dqn", "dqn-tensors", "c51", "quantile"])
def test_parts_of_the_critics_loss_have_none_but_the_first(name):
    loss, td = make(name)
    parts = loss.rows(td) if hasattr(loss, "rows") else loss.critic_losses(td)
    assert parts[0].requires_grad
    assert not any(part.requires_grad for part in parts[1:] if isinstance(part, torch.Tensor))
