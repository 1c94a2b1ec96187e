"""Minibatches: every row once an epoch, fields together, nothing waits."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import minibatches
from torchrl_perf.trainers.on_policy.minibatches import flat_rows, minibatch_indices

N, T = 6, 4


def make_batch(device="cpu", n=N, t=T):
    """Time-major memory; entries say which transition they belong to."""
    code = (torch.arange(n)[None, :] * 100 + torch.arange(t)[:, None]).to(device)  # [T, N]
    entries = {
        "observation": torch.stack([code.float(), -code.float()], -1),
        "action": code,
        ("next", "reward"): code.float().unsqueeze(-1) * 2,
    }
    return TensorDict(
        {key: value.transpose(0, 1) for key, value in entries.items()}, [n, t], device=device, names=[None, "time"]
    )


def codes(n=N, t=T):
    return sorted(100 * i + j for i in range(n) for j in range(t))


class TestFlatRows:
    def test_rows_are_views_in_time_major_order(self):
        batch = make_batch()
        rows = flat_rows(batch)
        assert rows.shape == (N * T,)
        assert rows["action"].tolist() == [100 * n + t for t in range(T) for n in range(N)]
        assert rows["observation"].data_ptr() == batch["observation"].data_ptr()

    def test_selected_keys(self):
        rows = flat_rows(make_batch(), ["action", ("next", "reward")])
        assert set(rows.keys(True, True)) == {"action", ("next", "reward")}


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("epochs", [1, 3])
def test_each_epoch_visits_every_row_once_and_fields_stay_together(parts, epochs, device):
    got = list(minibatches(make_batch(device), epochs=epochs, parts=parts))
    assert len(got) == epochs * parts
    orders = []
    for epoch in range(epochs):
        part = torch.cat(got[epoch * parts : (epoch + 1) * parts])
        assert all(minibatch.shape == (N * T // parts,) for minibatch in got)
        assert sorted(part["action"].tolist()) == codes()
        assert torch.equal(part["observation"][:, 0], part["action"].float())
        assert torch.equal(part["observation"][:, 1], -part["action"].float())
        assert torch.equal(part["next", "reward"].squeeze(-1), 2 * part["action"].float())
        orders.append(part["action"].tolist())
    assert len({tuple(order) for order in orders}) == epochs


def test_one_env_and_one_step():
    assert sorted(m["action"].item() for m in minibatches(make_batch(n=1, t=3), epochs=1, parts=3)) == [0, 1, 2]
    assert [m["action"].tolist() for m in minibatches(make_batch(n=1, t=1), epochs=2, parts=1)] == [[0], [0]]


def test_minibatches_own_their_data():
    batch = make_batch()
    (minibatch,) = minibatches(batch, epochs=1, parts=1)
    batch["action"].zero_()
    assert sorted(minibatch["action"].tolist()) == codes()


def test_only_the_named_keys_are_gathered():
    (minibatch,) = minibatches(make_batch(), epochs=1, parts=1, keys=["action"])
    assert list(minibatch.keys(True, True)) == ["action"]


@pytest.mark.parametrize("parts", [5, 7, 48])
def test_parts_that_do_not_divide_are_refused(parts):
    with pytest.raises(ValueError, match=rf"parts: expected a divisor of the 24 rows, received {parts}"):
        next(minibatches(make_batch(), epochs=1, parts=parts))


def test_no_host_read():
    batch = make_batch()
    with no_host_sync():
        for _ in minibatches(batch, epochs=2, parts=4):
            pass


def test_indices_repeat_with_the_seed():
    runs = []
    for _ in range(2):
        torch.manual_seed(11)
        runs.append(torch.cat(list(minibatch_indices(24, epochs=2, parts=2, device=torch.device("cpu")))))
    assert torch.equal(*runs)
