"""Uniform sampling: even, valid rows alone, masks, refusals."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from torchrl_perf.replay import DeviceRandomSampler, DeviceStorage, DeviceWriter
from torchrl_perf.runtime import no_host_sync

pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make_buffer(device, capacity=12, mask_key=None, shell=TensorDictReplayBuffer):
    storage = DeviceStorage(capacity, device=device)
    return shell(storage=storage, sampler=DeviceRandomSampler(mask_key), writer=DeviceWriter(), batch_size=3)


def rows(start, envs, time, device, **entries):
    value = torch.arange(start, start + envs * time).view(time, envs).t()
    return TensorDict({"value": value, **entries}, [envs, time]).to(device)


@pytest.mark.parametrize("shell", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("writes", [1, 2, 5])
def test_even_over_the_valid_rows(device, writes, shell):
    buffer = make_buffer(device, shell=shell)
    for write in range(writes):
        buffer.extend(rows(9 * write, 3, 3, device))
    newest = range(max(0, 9 * writes - 12), 9 * writes)
    drawn = torch.cat([buffer.sample()["value"] for _ in range(400)]).cpu()
    counts = drawn.bincount(minlength=newest.stop)[newest.start :].double()
    assert drawn.min() >= newest.start
    expected = 1200 / len(newest)
    assert ((counts - expected) ** 2 / expected).sum() < 40


def test_follows_the_generator_of_the_buffer(device):
    buffer = make_buffer(device)
    buffer.extend(rows(0, 3, 4, device))
    draws = []
    for _ in range(2):
        generator = torch.Generator(device=device)
        generator.manual_seed(5)
        buffer.set_rng(generator)
        draws.append(buffer.sample()["index"])
    assert torch.equal(*draws)


def test_masked_rows_are_never_drawn_and_terminal_ones_are(device):
    buffer = make_buffer(device, mask_key="active")
    active = torch.arange(12).view(4, 3).t().unsqueeze(-1) % 3 == 0
    terminated = torch.zeros(3, 4, 1, dtype=torch.bool)
    terminated[1, 2] = True  # value 7
    more = {"active": active, "next": TensorDict({"terminated": terminated}, [3, 4])}
    buffer.extend(rows(0, 3, 4, device, **more))
    drawn = torch.cat([buffer.sample()["value"] for _ in range(60)])
    assert set(drawn.tolist()) == {0, 3, 6, 9, 7}
    buffer.sampler.load_state_dict(buffer.sampler.state_dict())
    assert set(buffer.sample()["value"].tolist()) <= {0, 3, 6, 9, 7}
    buffer.extend(rows(12, 3, 1, device, active=~active[:, :1], next=more["next"][:, :1]))
    drawn = torch.cat([buffer.sample()["value"] for _ in range(60)])
    assert set(drawn.tolist()) == {13, 14, 3, 6, 9, 7}


def test_refusals(device):
    buffer = make_buffer(device)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample()
    buffer.extend(rows(0, 2, 1, device))
    index, _ = buffer.sampler.sample(buffer.storage, 200)  # with replacement: more than are filled
    assert set(index.tolist()) == {0, 1}
    with pytest.raises(TypeError, match="DeviceStorage"):
        DeviceRandomSampler().sample(object(), 1)


def test_no_host_wait(device):
    buffer = make_buffer(device)
    batch = rows(0, 3, 4, device)
    buffer.extend(batch)
    sampler, storage = buffer.sampler, buffer.storage
    with no_host_sync():
        sampler.sample(storage, 3)
