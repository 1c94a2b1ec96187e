"""Minibatches of every kind of batch: without a device, of any dims, nested, lazy, with entries that are no tensors."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass

from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import minibatches
from torchrl_perf.trainers.on_policy.minibatches import flat_rows, minibatch_indices


@tensorclass
class Rows:
    x: torch.Tensor
    y: torch.Tensor


def entries(shape):
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    return {"x": x, "next": {"y": torch.stack([x, -x], -1).float()}}


def columns(size):
    return [
        TensorDict({"x": torch.arange(size) + 100 * k, "z": {"y": torch.full((size, 2), k)}}, [size]) for k in (0, 1, 2)
    ]


BATCHES = {
    **{
        str(shape): TensorDict(entries(shape), shape)
        for shape in ([12], [3, 4], [12, 1], [1, 12], [3, 2, 2], [2, 1, 3, 2])
    },
    "named": TensorDict(entries([3, 4]), [3, 4], names=["env", "time"]),
    "named [T]": TensorDict(entries([12]), [12], names=["time"], device="cpu"),
    "device": TensorDict(entries([3, 4]), [3, 4], device="cpu"),
    "lazy": lazy_stack(columns(4), 0),
    "lazy in time": lazy_stack(columns(4), 1),
    "nested lazy": TensorDict({"x": torch.arange(12).view(3, 4), "q": lazy_stack(columns(4), 0)}, [3, 4]),
    "no tensors": TensorDict({**entries([3, 4]), "name": "a run"}, [3, 4]),
    "lazy without tensors": lazy_stack([td.set("name", NonTensorData(str(k))) for k, td in enumerate(columns(4))], 0),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("parts", [1, 3])
def test_each_epoch_has_every_row_once(name, parts):
    batch = BATCHES[name]
    names = list(batch.names)
    got = list(minibatches(batch, epochs=2, parts=parts))
    assert [minibatch.shape for minibatch in got] == [(12 // parts,)] * 2 * parts
    expected = sorted(batch["x"].flatten().tolist())
    for epoch in range(2):
        rows = torch.cat([minibatch["x"] for minibatch in got[epoch * parts : (epoch + 1) * parts]])
        assert sorted(rows.tolist()) == expected
    for minibatch in got:
        if ("next", "y") in minibatch.keys(True):
            assert torch.equal(minibatch["next", "y"][:, 0], minibatch["x"].float())
        assert minibatch.names == [None]
    if name == "lazy without tensors":
        assert all(m.get("name").tolist() == [str(int(x) // 100) for x in m["x"]] for m in got)
    assert list(batch.names) == names


@pytest.mark.parametrize("name", ["[12]", "[3, 4]", "[3, 2, 2]", "lazy", "nested lazy", "device"])
def test_no_host_waits(name):
    with no_host_sync():
        for _ in minibatches(BATCHES[name], epochs=2, parts=3):
            pass


def test_a_tensorclass():
    batch = Rows(x=torch.arange(12).view(3, 4), y=torch.arange(12).view(3, 4) * 2, batch_size=[3, 4])
    got = list(minibatches(batch, epochs=1, parts=4))
    assert all(isinstance(rows, Rows) and torch.equal(rows.y, 2 * rows.x) for rows in got)
    assert sorted(torch.cat([rows.x for rows in got]).tolist()) == list(range(12))


def test_nested_keys():
    (rows,) = minibatches(BATCHES["[3, 4]"], epochs=1, parts=1, keys=[("next", "y")])
    assert list(rows.keys(True, True)) == [("next", "y")]
    with pytest.raises(KeyError, match="absent"):
        minibatches(BATCHES["[3, 4]"], epochs=1, parts=1, keys=["absent"])


RAGGED = {
    "sizes": lazy_stack([TensorDict({"x": torch.zeros(k)}, [k]) for k in (2, 3)], 0),
    "entries": lazy_stack([TensorDict({"x": torch.zeros(4, k)}, [4]) for k in (2, 3)], 0),
    "nested entries": TensorDict(
        {"q": lazy_stack([TensorDict({"x": torch.zeros(4, k)}, [4]) for k in (2, 3)])}, [2, 4]
    ),
    "no dims": TensorDict({"x": torch.zeros(())}, []),
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_batches_are_refused_at_once(name):
    with pytest.raises(ValueError, match=r"batch: expected .* one s.*received .*Remedy: "):
        minibatches(RAGGED[name], epochs=1, parts=1)
    with pytest.raises(ValueError, match=r"batch: expected"):
        flat_rows(RAGGED[name])


@pytest.mark.parametrize(
    ("epochs", "parts", "name"), [(0, 1, "epochs"), (1, 0, "parts"), (1, 5, "parts"), (1.5, 1, "epochs")]
)
def test_numbers_that_do_not_fit_are_refused_at_once(epochs, parts, name):
    with pytest.raises(
        ValueError, match=f"{name}: expected .*received {epochs if name == 'epochs' else parts}. Remedy"
    ):
        minibatches(BATCHES["[3, 4]"], epochs=epochs, parts=parts)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_indices_of_any_form_of_device(device):
    assert sorted(torch.cat(list(minibatch_indices(6, epochs=1, parts=2, device=device))).tolist()) == list(range(6))
    with pytest.raises(ValueError, match="parts: expected a divisor of the 0 rows"):
        minibatch_indices(0, epochs=1, parts=1, device=device)
