"""Micro-batches with weights: those that count nothing add nothing, whatever the loss makes of them."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_perf.functional.losses.dqn import q_loss
from torchrl_perf.functional.losses.sac import weighted_mean
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.runtime.oom import MicroBatches, parts_of

WEIGHTS = {
    "none at all": [0.0] * 8,
    "the first part": [0.0] * 4 + [1.0, 2.0, 0.0, 3.0],
    "the last part": [1.0, 2.0, 0.0, 3.0] + [0.0] * 4,
    "but one row": [0.0] * 7 + [2.0],
    "nothing": [1.0, 2.0, 3.0, 4.0, 0.5, 0.25, 2.0, 1.0],
}


def make(dtype=torch.float64):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return net, torch.randn(8, 3).to(dtype)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_parts_of_weight_0_add_nothing(name, parts, shape):
    net, x = make()
    weights = torch.tensor(WEIGHTS[name], dtype=torch.float64).view(shape)
    batch = TensorDict({"x": x, "w": weights}, [8])

    def loss_fn(part):
        # 0 / 0 where no row counts
        return (part["w"].view(-1) * net(part["x"]).squeeze(-1).square()).sum() / part["w"].sum()

    params = list(net.parameters())
    if weights.any():
        expected_loss = loss_fn(batch)
        expected = torch.autograd.grad(expected_loss, params)
    else:
        expected_loss, expected = torch.zeros((), dtype=torch.float64), [torch.zeros_like(p) for p in params]
    micro = MicroBatches("cpu")
    micro.parts = parts
    loss = micro.backward(loss_fn, batch, params, weights=weights)
    torch.testing.assert_close(loss, expected_loss.detach())
    for param, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_no_host_waits():
    net, x = make()
    micro, weights = MicroBatches("cpu"), torch.zeros(8, dtype=torch.float64)
    micro.parts = 2
    with no_host_sync():
        micro.backward(lambda part: net(part).mean(), x, net.parameters(), weights=weights)


def test_a_bad_number_in_a_part_that_counts_is_kept():
    net, x = make()
    x[1, 0] = torch.nan
    micro = MicroBatches("cpu")
    micro.parts = 2
    loss = micro.backward(lambda part: net(part).mean(), x, net.parameters(), weights=torch.ones(8))
    assert loss.isnan()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float16])
def test_weights_of_any_dtype_sum_to_one(dtype):
    pieces = parts_of(torch.arange(3000), 3, torch.ones(3000, dtype=dtype))
    assert [float(part.weight) for part in pieces] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("parts", [0, -1, 5])
def test_parts_without_a_row_are_refused(parts):
    with pytest.raises(ValueError, match=r"parts: expected 1 to 4, .*received .*Remedy"):
        parts_of(torch.arange(4), parts)
    with pytest.raises(ValueError, match=r"parts: expected 1 to 0, .*Remedy"):
        parts_of(torch.arange(0), 1)


@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_a_number_of_parts_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="parts: expected a positive integer, received"):
        MicroBatches("cpu").parts = value


def test_weights_of_other_rows_are_refused():
    with pytest.raises(ValueError, match=r"weights: expected one for each of the 4 rows, received shape \(3,\)"):
        parts_of(torch.arange(4), 2, torch.ones(3))


@pytest.mark.parametrize("mean", [lambda x, w: weighted_mean(x.square(), w), lambda x, w: q_loss(x, x * 0, "l2", w)])
def test_means_of_rows_that_count_nothing_are_0_with_gradient_0(mean):
    x = torch.ones(4, requires_grad=True)
    loss = mean(x, torch.zeros(4))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(x.grad, torch.zeros(4))
    weights = torch.tensor([1.0, 0.0, 0.0, 3.0])
    assert mean(torch.tensor([1.0, 9.0, 9.0, 2.0]), weights).item() == pytest.approx(13 / 4)
