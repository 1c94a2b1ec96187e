"""A step without a final observation is terminated and keeps its own state, so that nothing is bootstrapped from it."""

import torch
from tensordict import TensorDict

from torchrl_perf.transforms.missing import end_where_missing


def make_batch(device="cpu"):
    """Two envs, three steps: the first env ends at step 1 without a final observation, the second with one."""
    own = torch.arange(12.0, device=device).view(2, 3, 2)
    done = torch.tensor([[[False], [True], [False]]] * 2, device=device)
    following = {"observation": own + 100, "reward": torch.ones(2, 3, 1, device=device), "done": done}
    following |= {"terminated": torch.zeros_like(done), "truncated": done.clone(), "extra": own.clone()}
    following["observation"][0, 1] = torch.nan
    following["extra"][:, 0] = torch.nan  # the step has no such entry of its own
    return TensorDict({"observation": own, "next": following}, [2, 3], device=device)


def test_the_step_is_terminated_and_keeps_its_own_state(device):
    batch = make_batch(device)
    before = batch.clone()
    got = end_where_missing(batch)
    assert got["next", "terminated"].squeeze(-1).tolist() == [[False, True, False], [False, False, False]]
    expected = before["next", "observation"].clone()
    expected[0, 1] = before["observation"][0, 1]
    assert torch.equal(got["next", "observation"], expected)
    for key in ("reward", "done", "truncated"):
        assert torch.equal(got["next", key], before["next", key])
    # the batch of the caller is as it was
    assert not batch["next", "terminated"].any()
    assert batch["next", "observation"].isnan().any()


def test_what_was_terminated_stays_so(device):
    batch = make_batch(device)
    batch["next", "terminated"][1, 1] = True
    assert end_where_missing(batch)["next", "terminated"][:, 1].all()


def test_a_nan_of_a_step_that_goes_on_stays(device):
    batch = make_batch(device)
    batch["next", "observation"][1, 0] = torch.nan
    got = end_where_missing(batch)
    assert got["next", "observation"][1, 0].isnan().all()
    assert not got["next", "terminated"][1].any()


def test_observations_that_cannot_be_missing(device):
    batch = make_batch(device)
    for key in ("observation", ("next", "observation")):
        batch[key] = torch.zeros(2, 3, 2, dtype=torch.uint8, device=device)
    assert end_where_missing(batch) is batch
