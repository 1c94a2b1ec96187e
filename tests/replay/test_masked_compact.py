"""A masked sampler over compact storage: rows whose final observation is lost are never drawn."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.replay import DevicePrioritizedSampler, DeviceRandomSampler, DeviceReplayBuffer, DeviceStorage


@pytest.mark.parametrize("sampler", ["random", "prioritized"])
def test_rows_that_compact_storage_has_forgotten_are_not_drawn(sampler):
    storage = DeviceStorage(16, compact=True, final_fraction=0.25)  # 4 final observations
    samplers = {
        "random": lambda: DeviceRandomSampler(mask_key="mask"),
        "prioritized": lambda: DevicePrioritizedSampler(16, 0.6, 0.4, mask_key="mask"),
    }
    buffer = DeviceReplayBuffer(storage=storage, sampler=samplers[sampler](), batch_size=256)
    observation = torch.arange(12.0).view(1, 12)
    for rows in (observation[:, :6], observation[:, 6:]):  # none is continued by the next one
        following = {"observation": rows + 100, "reward": rows, "done": rows < 0, "terminated": rows < 0}
        mask = torch.ones_like(rows, dtype=torch.bool)
        buffer.extend(TensorDict({"observation": rows, "mask": mask, "next": following}, rows.shape))
    drawn = buffer.sample()
    valid = storage.ring.valid_slots()
    assert 0 < len(valid) < 12
    assert set(drawn["index"].flatten().tolist()) == set(valid.tolist())
    assert torch.equal(drawn["next", "observation"], drawn["observation"] + 100)
