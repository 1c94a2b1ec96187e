"""The numbers of curiosity, by hand."""

import math

import pytest
import torch

from torchrl_perf.functional.losses.icm import forward_error, intrinsic_reward, inverse_accuracy, inverse_error


def test_forward_error_and_reward_by_hand():
    predicted, features = (
        torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True),
        torch.tensor([[1.0, 5.0], [3.0, 4.0]]),
    )
    assert forward_error(predicted, features).tolist() == [4.5, 12.5]
    reward = intrinsic_reward(predicted, features, 0.01)
    torch.testing.assert_close(reward, torch.tensor([[0.045], [0.125]]))
    assert not reward.requires_grad


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_inverse_error_of_discrete_actions(shape):
    logits = torch.randn(*shape, 3, dtype=torch.float64)
    action = torch.randint(0, 3, shape)
    got = inverse_error(logits, action, discrete=True)
    assert got.shape == shape
    rows = zip(logits.reshape(-1, 3), action.reshape(-1), strict=True)
    expected = [math.log(sum(math.exp(value) for value in row)) - float(row[a]) for row, a in rows]
    torch.testing.assert_close(got.reshape(-1), torch.tensor(expected, dtype=torch.float64))


def test_inverse_error_of_continuous_actions():
    got = inverse_error(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), discrete=False)
    assert got.tolist() == [2.5]


def test_inverse_accuracy():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert float(inverse_accuracy(logits, torch.tensor([0, 1, 0, 0]))) == 0.75
