"""``separate_losses`` where the batch itself carries a gradient: hidden features written by a trunk that trains."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from torchrl_perf.modules import GumbelCategorical
from torchrl_perf.objectives import DeviceClipPPOLoss


@pytest.mark.parametrize("separate", [False, True])
def test_the_critic_loss_reaches_features_of_the_batch_only_where_losses_are_not_separate(separate):
    torch.manual_seed(0)
    trunk = nn.Linear(3, 3)
    head = TensorDictModule(nn.Linear(3, 2), ["hidden"], ["logits"])
    actor = ProbabilisticActor(head, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["hidden"])
    batch = actor(TensorDict({"hidden": trunk(torch.randn(6, 3))}, [6]))
    batch["action_log_prob"] = batch["action_log_prob"].detach()
    batch["advantage"], batch["value_target"] = torch.randn(6, 1), torch.randn(6, 1)
    loss = DeviceClipPPOLoss(actor, critic, separate_losses=separate, functional=False)(batch)
    (by_critic,) = torch.autograd.grad(loss["loss_critic"], [trunk.weight], allow_unused=True, retain_graph=True)
    (by_actor,) = torch.autograd.grad(loss["loss_objective"], [trunk.weight])
    assert by_actor.any()
    assert (by_critic is None) == separate
