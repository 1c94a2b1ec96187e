"""Estimates and actions that record themselves equal those of the modules as they are."""

import pytest
import torch
from recording_device import recording_device
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn
from torch.distributions import Categorical
from torchrl.data import Categorical as Choice
from torchrl.modules import MLP, ValueOperator

from torchrl_perf.modules import DeviceActor, EpsilonGreedy
from torchrl_perf.runtime.self_capture import is_recorded
from torchrl_perf.transforms import GAETransform

device = recording_device


def batch(seed, steps=5):
    draw = {"generator": torch.Generator().manual_seed(seed)}
    shape = (4, steps)
    done = torch.rand(*shape, 1, **draw) < 0.2
    following = {"observation": torch.randn(*shape, 3, **draw), "reward": torch.randn(*shape, 1, **draw)}
    following |= {"done": done, "terminated": done & (torch.rand(*shape, 1, **draw) < 0.5)}
    td = {"observation": torch.randn(*shape, 3, **draw), "unread": torch.zeros(*shape, 7), "next": following}
    return TensorDict(td, shape, names=[None, "time"])


@pytest.mark.parametrize("options", [{}, {"average_gae": True}, {"chunk_size": 7}], ids=["plain", "average", "chunks"])
def test_gae(options, device):
    torch.manual_seed(0)
    critic = ValueOperator(MLP(3, 1, num_cells=[8]), in_keys=["observation"]).to(device)
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    eager, ours = (GAETransform(gamma=0.9, lmbda=0.8, value_network=critic, **options) for _ in range(2))
    eager.capture = False
    for call in range(8):
        one, other = (batch(call, steps=3 if call == 6 else 5).to(device) for _ in range(2))
        result = ours(other)
        assert result is other
        eager(one)
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key, value in one.items(True, True):
            torch.testing.assert_close(other[key], value, rtol=0, atol=0, msg=str(key))
        critic(one)["state_value"].mean().backward()
        optimizer.step()
    assert is_recorded(ours)
    assert not is_recorded(eager)


@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
def test_actor(kind, device):
    torch.manual_seed(0)
    actor = DeviceActor(nn.Linear(3, 4), distribution_class=Categorical, param_keys=["logits"]).to(device)
    for call in range(8):
        td = TensorDict({"observation": torch.randn(6, 3, device=device), "kept": torch.zeros(6, device=device)}, [6])
        found = []
        for capture in (False, True):
            actor.capture = capture
            torch.manual_seed(call)
            with torch.no_grad(), set_interaction_type(kind):
                found.append(actor(td.copy()))
        assert set(found[0].keys()) == set(found[1].keys())
        for key, value in found[0].items():
            torch.testing.assert_close(found[1][key], value, rtol=1e-6, atol=1e-6, msg=key)
    assert is_recorded(actor)


def test_epsilon_greedy_follows_its_schedule(device):
    torch.manual_seed(0)
    policy = EpsilonGreedy(nn.Linear(3, 4), spec=Choice(4), eps_init=1.0, eps_end=0.0, annealing_num_steps=8).to(device)
    td = TensorDict({"observation": torch.randn(256, 3, device=device)}, [256])
    shares = []
    for _ in range(10):
        with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
            out = policy(td.copy())
        greedy = policy.network(td["observation"]).argmax(-1)
        shares.append(float((out["action"] != greedy).float().mean()))
        policy.step(1)
    assert shares[0] > 0.6
    assert shares[4] > 0.2
    assert shares[-1] == 0.0
    assert is_recorded(policy)
