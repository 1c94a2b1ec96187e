"""n-step transitions that record themselves equal those of the plain call, shapes and names included."""

import torch
from recording_device import recording_device
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_perf.runtime.self_capture import is_recorded
from torchrl_perf.transforms import NStepTransform

device = recording_device


def batch(seed, steps=6):
    draw = {"generator": torch.Generator().manual_seed(seed)}
    shape = (4, steps)
    agents = TensorDict({"position": torch.randn(*shape, 2, 3, **draw)}, [*shape, 2], names=[None, "time", "agents"])
    done = torch.rand(*shape, 1, **draw) < 0.25
    lost = done & (torch.rand(*shape, 1, **draw) < 0.3)
    following = {
        "observation": torch.where(lost, torch.nan, torch.randn(*shape, 3, **draw)),
        "pixels": torch.randint(255, (*shape, 2, 2), dtype=torch.uint8, **draw),
        "reward": torch.randn(*shape, 1, **draw),
        "done": done,
        "terminated": done,
        "agents": agents.clone(),
    }
    root = {"observation": torch.randn(*shape, 3, **draw), "action": torch.zeros(*shape, 1), "agents": agents}
    return TensorDict(root | {"next": following}, shape, names=[None, "time"])


def assert_same(one, other):
    assert one.batch_size == other.batch_size
    assert one.names == other.names
    assert set(one.keys(True)) == set(other.keys(True))
    for key in one.keys(True):
        left, right = one.get(key), other.get(key)
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(right, left, rtol=0, atol=0, equal_nan=True, msg=str(key))
        else:
            assert_same(left, right)


def test_it_equals_the_plain_call(device):
    plain, ours = NStepTransform(3, 0.9), NStepTransform(3, 0.9)
    plain.capture = False
    for call in range(10):
        if call == 6:
            plain.n_steps = ours.n_steps = 2
        given = batch(call, steps=4 if call == 3 else 6).to(device)
        before = given.clone()
        result = ours(given)
        assert_same(plain(given.clone()), result)
        assert_same(before, given)
        assert result["action"] is given["action"]  # what stays is not copied
    assert is_recorded(ours)
    assert not is_recorded(plain)


def test_results_last(device):
    """As a replay buffer extends with them, one after the other."""
    ours, kept = NStepTransform(3, 0.9), []
    for call in range(6):
        result = ours(batch(call).to(device))
        kept.append((result, result.clone()))
    for result, copied in kept:
        assert_same(copied, result)


def test_in_a_replay_buffer(device):
    buffers = []
    for capture in (False, True):
        transform = NStepTransform(3, 0.9)
        transform.capture = capture
        buffer = ReplayBuffer(storage=LazyTensorStorage(200, device=device), transform=transform, batch_size=4)
        for call in range(6):
            buffer.extend(batch(call).to(device))
        buffers.append(buffer[:])
    assert_same(*buffers)
