"""Q-learning targets and losses: hand-computed numbers, a loop, TorchRL's DQNLoss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from torchrl_perf.functional.losses.dqn import action_value, q_loss, q_targets


def test_double_q_takes_the_online_action_and_the_target_value():
    online, target = torch.tensor([[3.0, 1.0]]), torch.tensor([[2.0, 5.0]])
    reward, terminated = torch.tensor([1.0]), torch.tensor([False])
    assert q_targets(reward, terminated, 0.5, target).tolist() == [3.5]
    assert q_targets(reward, terminated, 0.5, target, online_values=online).tolist() == [2.0]


def test_masked_next_action_is_masked_in_the_target():
    values, mask = torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([[True, False, True]])
    zero, no = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    assert q_targets(zero, no, 1.0, values, action_mask=mask).tolist() == [2.0]
    assert q_targets(zero, no, 1.0, values, online_values=values, action_mask=mask).tolist() == [2.0]


def test_a_terminated_step_takes_nothing_from_what_follows():
    values = torch.tensor([[torch.nan, torch.nan], [1.0, 2.0]])
    target = q_targets(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), torch.tensor([0.9, 0.5]), values)
    assert target.tolist() == [1.0, 2.0]


def test_action_values_of_indices_and_one_hot():
    values = torch.tensor([[1.0, 5.0, 2.0], [4.0, 3.0, 0.0]])
    index = torch.tensor([2, 0])
    assert action_value(values, index).tolist() == [2.0, 4.0]
    assert action_value(values, nn.functional.one_hot(index, 3)).tolist() == [2.0, 4.0]
    assert action_value(values, nn.functional.one_hot(index, 3).bool()).tolist() == [2.0, 4.0]


def test_losses_by_hand():
    prediction, target = torch.tensor([0.0, 0.0]), torch.tensor([0.5, 3.0])
    assert float(q_loss(prediction, target, "huber")) == pytest.approx((0.125 + 2.5) / 2)
    assert float(q_loss(prediction, target, "l2")) == pytest.approx((0.25 + 9) / 2)
    weight = torch.tensor([1.0, 0.25])
    assert float(q_loss(prediction, target, "huber", weight)) == pytest.approx((0.125 + 0.625) / 1.25)


@given(size=st.integers(1, 8), actions=st.integers(1, 5), double=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_targets_equal_a_loop(size, actions, double, seed):
    torch.manual_seed(seed)
    values, online = torch.randn(2, size, actions, dtype=torch.float64)
    reward, discount = torch.randn(size, dtype=torch.float64), torch.rand(size, dtype=torch.float64)
    terminated = torch.rand(size) < 0.5
    expected = []
    for row in range(size):
        chooser = (online if double else values)[row].tolist()
        best = chooser.index(max(chooser))
        following = 0.0 if terminated[row] else float(discount[row] * values[row, best])
        expected.append(float(reward[row]) + following)
    result = q_targets(reward, terminated, discount, values, online_values=online if double else None)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["huber", "l2"])
def test_equals_torchrls_loss(double, weighted, kind):
    network, target = nn.Linear(4, 3), nn.Linear(4, 3)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(
        actor,
        loss_function="smooth_l1" if kind == "huber" else "l2",
        double_dqn=double,
        delay_value=True,
        action_space="categorical",
    )
    loss.make_value_estimator(gamma=0.9)
    loss.target_value_network_params.data.update_(
        TensorDict.from_module(QValueActor(target, in_keys=["observation"], action_space="categorical")).data
    )
    sample = TensorDict(
        {
            "observation": torch.randn(16, 4),
            "action": torch.randint(3, (16,)),
            "steps_to_next_obs": torch.randint(1, 4, (16, 1)),
            "next": {
                "observation": torch.randn(16, 4),
                "reward": torch.randn(16, 1),
                "done": torch.rand(16, 1) < 0.3,
                "terminated": torch.rand(16, 1) < 0.3,
            },
        },
        [16],
    )
    if weighted:
        sample["priority_weight"] = torch.rand(16)
    expected = loss(sample)["loss"]

    with torch.no_grad():
        targets = q_targets(
            sample["next", "reward"].squeeze(-1),
            sample["next", "terminated"].squeeze(-1),
            0.9 ** sample["steps_to_next_obs"].squeeze(-1),
            target(sample["next", "observation"]),
            online_values=network(sample["next", "observation"]) if double else None,
        )
    prediction = action_value(network(sample["observation"]), sample["action"])
    ours = q_loss(prediction, targets, kind, sample.get("priority_weight", None))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close((prediction - targets).pow(2).detach(), sample["td_error"].squeeze(-1))
    grads = torch.autograd.grad(ours, list(network.parameters()))
    expected.backward()
    by_shape = {param.shape: param.grad for param in loss.value_network_params.values(True, True)}
    for grad in grads:
        torch.testing.assert_close(grad, by_shape[grad.shape])
