"""GAE with a recurrent critic: every value is that of the whole history of its episode, V(s') included."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import set_recurrent_mode

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.functional import generalized_advantage_estimate
from torchrl_perf.modules import LRU, DeviceGRU, DeviceLSTM, MinGRU
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import GAETransform

N, T, H = 4, 25, 5
KINDS = [DeviceGRU, DeviceLSTM, MinGRU, LRU]


def critic_of(kind, layers=1):
    torch.manual_seed(0)
    memory = kind(4, H, layers, in_key="observation", out_key="features").double()
    head = TensorDictModule(nn.Linear(H, 1, dtype=torch.float64), ["features"], ["state_value"])
    return TensorDictSequential(memory, head), memory


def batches(memory, count=2):
    """Batches with ends of both kinds, with the states that a rollout of the memory carries."""
    env = CartPole(N, device="cpu", dtype=torch.float64, seed=0, max_episode_steps=14)
    head = TensorDictModule(lambda y: torch.randint(2, y.shape[:-1]), ["features"], ["action"])
    policy = TensorDictSequential(memory, head)
    collector = DeviceCollector(
        env,
        policy,
        frames_per_batch=N * T,
        mode="eager",
        auto_register_policy_transforms=True,
        exclude_keys=["features"],
    )
    return [collector.collect().clone() for _ in range(count)]


def histories(data):
    """For each row and step, the observations of its episode up to it."""
    for row in range(data.shape[0]):
        first = 0
        for t in range(data.shape[1]):
            first = t if bool(data["is_init"][row, t]) else first
            yield row, t, data["observation"][row, first : t + 1]


def value_of(critic, observations):
    """V of the last one of an episode's observations, all read from its beginning."""
    flags = torch.zeros(1, len(observations), 1, dtype=torch.bool)
    flags[:, 0] = True
    td = {"observation": observations[None], "is_init": flags}
    with set_recurrent_mode(True), torch.no_grad():
        return critic(TensorDict(td, [1, len(observations)]))["state_value"][0, -1]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_whole_history(kind, layers):
    critic, memory = critic_of(kind, layers)
    data = batches(memory)
    gae = GAETransform(gamma=0.97, lmbda=0.9, value_network=critic)
    found = torch.cat([gae(batch) for batch in data], 1)
    whole = torch.cat(data, 1)
    ends = {kind: int(whole["next", kind].sum()) for kind in ("terminated", "truncated")}
    assert min(ends.values()) >= 3
    for row, t, seen in histories(whole):
        torch.testing.assert_close(found["state_value"][row, t], value_of(critic, seen))
        following = torch.cat([seen, whole["next", "observation"][row, t : t + 1]])
        torch.testing.assert_close(found["next", "state_value"][row, t], value_of(critic, following))


def test_advantages_follow_from_these_values():
    critic, memory = critic_of(DeviceGRU)
    (data,) = batches(memory, 1)
    found = GAETransform(gamma=0.97, lmbda=0.9, value_network=critic)(data.clone())
    expected, target = generalized_advantage_estimate(
        0.97,
        0.9,
        found["state_value"],
        found["next", "state_value"],
        data["next", "reward"],
        data["next", "done"],
        data["next", "terminated"],
    )
    torch.testing.assert_close(found["advantage"], expected)
    torch.testing.assert_close(found["value_target"], target)


def test_within_an_episode_the_next_value_is_the_value_of_the_next_step():
    critic, memory = critic_of(DeviceLSTM)
    (data,) = batches(memory, 1)
    found = GAETransform(gamma=0.97, lmbda=0.9, value_network=critic)(data)
    inside = ~data["next", "done"][:, :-1]
    torch.testing.assert_close(found["next", "state_value"][:, :-1][inside], found["state_value"][:, 1:][inside])


@pytest.mark.parametrize("chunk_size", [1, 2 * T, 3 * T])
def test_chunks_change_nothing(chunk_size):
    critic, memory = critic_of(DeviceGRU)
    (data,) = batches(memory, 1)
    whole = GAETransform(gamma=0.97, lmbda=0.9, value_network=critic)(data.clone())
    parts = GAETransform(gamma=0.97, lmbda=0.9, value_network=critic, chunk_size=chunk_size)(data.clone())
    torch.testing.assert_close(whole["advantage"], parts["advantage"])


def test_the_batch_keeps_its_states_and_the_host_is_not_asked():
    critic, memory = critic_of(DeviceGRU)
    (data,) = batches(memory, 1)
    before = data.clone()
    with no_host_sync():
        GAETransform(gamma=0.97, lmbda=0.9, value_network=critic)(data)
    for key in before.keys(True, True):
        assert torch.equal(data[key], before[key]), key
