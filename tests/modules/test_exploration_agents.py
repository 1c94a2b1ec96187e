"""EpsilonGreedy for batches of agents: masks, agents that do not exist, rows without an allowed action."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules import EpsilonGreedy, SetEncoder
from torchrl_perf.runtime import no_host_sync

N, A, D = 5, 3, 4
TYPES = [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC]


def make(device="cpu", one_hot=False, network=None, **options):
    spec = (OneHot if one_hot else Categorical)(D, device=device)
    network = nn.Linear(2, D, device=device) if network is None else network
    return EpsilonGreedy(network, spec=spec, **options)


def rows(shape=(N, A), device="cpu", **entries):
    return TensorDict({"observation": torch.randn(*shape, 2), **entries}, shape[:1]).to(device)


def act(policy, td, kind=ExplorationType.RANDOM):
    with torch.no_grad(), set_exploration_type(kind):
        return policy(td.copy())["action"]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("trailing", [(), (1,)])
def test_agents_that_do_not_exist_take_action_zero(kind, one_hot, trailing):
    valid = torch.rand(N, A) < 0.5
    td = rows(valid=valid.view(N, A, *trailing))
    td["observation"][~valid] = torch.nan
    policy = make(one_hot=one_hot, valid_key="valid", eps_start=0.5)
    assert policy.in_keys == ["observation", "valid"]
    action = act(policy, td, kind)
    assert action.shape == ((N, A, D) if one_hot else (N, A))
    index = action.to(torch.uint8).argmax(-1) if one_hot else action
    assert (index[~valid] == 0).all()
    if kind is ExplorationType.DETERMINISTIC:
        best = policy.network(td["observation"]).argmax(-1)
        assert torch.equal(index[valid], best[valid])


@pytest.mark.parametrize("trailing", [(), (1,)])
def test_a_flag_of_an_env_holds_for_its_agents(trailing):
    valid = torch.tensor([True, False, True, False, True])
    action = act(make(valid_key="valid", eps_start=1.0), rows(valid=valid.view(N, *trailing)))
    assert (action[~valid] == 0).all()
    assert (action[valid] != 0).any()


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_without_an_allowed_action_takes_action_zero(kind):
    mask = torch.rand(200, A, D) < 0.4
    mask[::2] = False
    action = act(make(mask_key="mask", eps_start=0.7), rows((200, A), mask=mask), kind)
    none = ~mask.any(-1)
    assert (action[none] == 0).all()
    assert mask.gather(-1, action.unsqueeze(-1)).squeeze(-1)[~none].all()


def test_masks_of_single_agents_by_a_loop():
    mask = torch.rand(N, A, D) < 0.6
    policy, td = make(mask_key="mask"), rows(mask=mask)
    action = act(policy, td, ExplorationType.DETERMINISTIC)
    for n in range(N):
        for a in range(A):
            values = policy.network(td["observation"][n, a]).detach()
            allowed = [d for d in range(D) if mask[n, a, d]] or [0]
            assert int(action[n, a]) == max(allowed, key=lambda d: float(values[d]))


@pytest.mark.parametrize("shape", [(N, D), (N, 1, D)])
def test_a_mask_of_an_env_holds_for_its_agents(shape):
    mask = torch.tensor([True, False, True, False]).expand(shape)
    action = act(make(mask_key="mask", eps_start=1.0), rows(mask=mask))
    assert action.shape == (N, A)
    assert (action % 2 == 0).all()


def test_chi_square_of_masked_draws():
    mask = torch.tensor([True, True, False, True]).expand(2000, A, D)
    action = act(make(mask_key="mask", eps_start=1.0), rows((2000, A), mask=mask))
    counts = action.flatten().bincount(minlength=D).double()
    assert counts[2] == 0
    assert float(((counts[[0, 1, 3]] - 2000) ** 2 / 2000).sum()) < 13.8  # 0.1 % at 2 degrees of freedom


def test_a_set_encoder_as_network():
    class Values(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = SetEncoder(2, 3, self_size=4, object_sizes=(4,), joint_sizes=(8,))
            self.head = nn.Linear(8, D)

        def forward(self, *inputs):
            return self.head(self.trunk(*inputs))

    policy = make(network=Values(), in_keys=("observation", "objects", "present"), valid_key="valid")
    td = rows(objects=torch.randn(N, A, 6, 3), present=torch.rand(N, A, 6) < 0.5, valid=torch.ones(N, A).bool())
    with no_host_sync():
        assert act(policy, td).shape == (N, A)


def test_no_host_wait_with_masks(device):
    mask, valid = torch.rand(N, A, D) < 0.3, torch.rand(N, A) < 0.5
    td = rows(device=device, mask=mask, valid=valid)
    policy = make(device, mask_key="mask", valid_key="valid", eps_start=0.5)
    with no_host_sync(device):
        act(policy, td)


def test_compiled_and_captured_equal_eager(variant):
    mask, valid = torch.rand(N, A, D) < 0.3, torch.rand(N, A) < 0.5
    td = rows(device=variant.device, mask=mask, valid=valid)
    policy = make(variant.device, mask_key="mask", valid_key="valid")
    run = variant(lambda td: act(policy, td, ExplorationType.DETERMINISTIC))
    assert torch.equal(run(td), act(policy, td, ExplorationType.DETERMINISTIC))
