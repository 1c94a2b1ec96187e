"""Distributional networks with noisy layers: every sigma learns in the losses, acting differs, batches of agents."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules import CategoricalMLP, EpsilonGreedy, ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.objectives import DeviceC51Loss, QuantileDQNLoss
from torchrl_perf.runtime import no_host_sync

OBS, ACTIONS = 3, 4
NETWORKS = [(CategoricalMLP, DeviceC51Loss), (QuantileMLP, QuantileDQNLoss), (ImplicitQuantileMLP, QuantileDQNLoss)]


def make_batch(*shape):
    following = {
        "observation": torch.randn(*shape, OBS),
        "reward": torch.randn(*shape, 1),
        "terminated": torch.rand(*shape, 1) < 0.3,
    }
    action = torch.randint(0, ACTIONS, shape)
    return TensorDict({"observation": torch.randn(*shape, OBS), "action": action, "next": following}, shape)


@pytest.mark.parametrize("noisy", ["shared", "per_row"])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(("network_class", "loss_class"), NETWORKS)
def test_every_sigma_learns(network_class, loss_class, dueling, noisy):
    loss = loss_class(network_class(OBS, ACTIONS, hidden_size=16, noisy=noisy, dueling=dueling), double=True)
    td = make_batch(32)
    with no_host_sync():
        first, second = loss(td)["loss"], loss(td)["loss"]
        first.backward()
    assert first.item() != second.item()
    sigmas = [param for name, param in loss.network.named_parameters() if "sigma" in name]
    assert len(sigmas) == 4
    assert all((param.grad != 0).any() for param in sigmas)


@pytest.mark.parametrize(("network_class", "loss_class"), NETWORKS)
def test_noise_explores_and_the_mean_exploits(network_class, loss_class):
    options = {"taus": "midpoints"} if network_class is ImplicitQuantileMLP else {}
    network = network_class(OBS, ACTIONS, noisy="per_row", **options)
    policy = EpsilonGreedy(network, spec=Categorical(ACTIONS), eps_start=0.0)
    td = TensorDict({"observation": torch.ones(500, OBS)}, [500])
    with torch.no_grad():
        with set_exploration_type(ExplorationType.RANDOM), no_host_sync():
            explored = policy(td)["action"]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            exploited = policy(td)["action"]
    assert explored.unique().numel() > 1
    assert exploited.unique().numel() == 1


@pytest.mark.parametrize(("network_class", "loss_class"), NETWORKS)
def test_a_mask_of_an_env_holds_for_its_agents(network_class, loss_class):
    options = {"taus": "midpoints"} if network_class is ImplicitQuantileMLP else {}
    loss = loss_class(network_class(OBS, ACTIONS, **options), mask_key="mask")
    td = make_batch(6, 2)  # [N, A]
    mask = torch.rand(6, ACTIONS) < 0.5
    td["next", "mask"] = mask.unsqueeze(1).expand(6, 2, ACTIONS)
    expected = loss(td)["loss"]
    flat = td.reshape(12)
    torch.testing.assert_close(loss(flat)["loss"], expected)
    td = td.exclude(("next", "mask"))
    td.batch_size = [6]
    td["next"].batch_size = [6]
    td["next", "mask"] = mask
    torch.testing.assert_close(loss(td)["loss"], expected)
    td["next", "mask"] = torch.ones_like(mask)
    assert loss(td)["loss"].item() != expected.item()
