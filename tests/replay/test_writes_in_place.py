"""Masks and ends that are written in place: samplers see them, however they are written."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, SliceSampler, TensorDictReplayBuffer

from torchrl_perf.replay import (
    DevicePrioritizedSampler,
    DeviceRandomSampler,
    DeviceReplayBuffer,
    DeviceSamplerWithoutReplacement,
    DeviceSliceSampler,
    DeviceStorage,
    DeviceWriter,
    make_replay_buffer,
)

BUFFERS = (ReplayBuffer, TensorDictReplayBuffer, DeviceReplayBuffer)
N, T, L = 2, 10, 3
SLOT = 9  # env 1 at time 4

SAMPLERS = {
    "random": lambda: DeviceRandomSampler(mask_key="mask"),
    "prioritized": lambda: DevicePrioritizedSampler(1.0, 0.5, mask_key="mask"),
    "slice": lambda: DeviceSliceSampler(L, mask_key="mask"),
    "prioritized slice": lambda: DeviceSliceSampler(L, alpha=1.0, mask_key="mask"),
}
WRITES = {
    "set_at_": lambda rb, key, values: rb.set_at_(key, values[SLOT], SLOT),
    "set_at_ with slots": lambda rb, key, values: rb.set_at_(key, values[[SLOT]], torch.tensor([SLOT])),
    "set_": lambda rb, key, values: rb.set_(key, values),
    "update_": lambda rb, key, values: rb.update_(TensorDict({key: values}, [N * T])),
    "buffer[i] = row": lambda rb, key, values: rb.__setitem__(SLOT, TensorDict({key: values[SLOT]}, [])),
    "storage[i] = row": lambda rb, key, values: rb.storage.__setitem__(SLOT, TensorDict({key: values[SLOT]}, [])),
    "storage.set": lambda rb, key, values: rb.storage.set([SLOT], TensorDict({key: values[[SLOT]]}, [1])),
    "buffer[:].set_at_": lambda rb, key, values: rb[:].set_at_(key, values[SLOT], SLOT),
    "buffer[:].set_": lambda rb, key, values: rb[:].set_(key, values),
}
VIEWS = {
    "buffer[:].update_at_": lambda rb, key, values: rb[:].update_at_(TensorDict({key: values[SLOT]}, []), SLOT),
    "buffer[:].fill_": lambda rb, key, values: rb[SLOT : SLOT + 1].fill_(key, bool(values[SLOT])),
    "a tensor of buffer[:]": lambda rb, key, values: rb[:].get(key).__setitem__(SLOT, values[SLOT]),
    "buffer[key]": lambda rb, key, values: rb[key].__setitem__(SLOT, values[SLOT]),
    "storage.field": lambda rb, key, values: rb.storage.field(key).__setitem__(divmod(SLOT, N), values[SLOT]),
    "a row of buffer[:]": lambda rb, key, values: rb[:][SLOT].fill_(key, bool(values[SLOT])),
}
COPIES = ("set_at_", "set_", "update_", "storage[i] = row", "buffer[:].set_at_")
STORAGES = {"plain": {}, "compact": {"compact": True}, "n_step": {"n_step": 2}}
CASES = [
    (storage, sampler, write)
    for storage in STORAGES
    for sampler in SAMPLERS
    for write in (WRITES | VIEWS if storage == "plain" else COPIES)
    if not (storage == "n_step" and "slice" in sampler)
]


def batch(td_error=False, mask=True):
    number = torch.arange(T).repeat(N, 1) + 100.0 * torch.arange(N)[:, None]
    no = torch.zeros(N, T, 1, dtype=torch.bool)
    following = {"observation": number.unsqueeze(-1) + 1, "reward": torch.ones(N, T, 1), "done": no.clone()}
    td = TensorDict({"observation": number.unsqueeze(-1), "next": {**following, "terminated": no.clone()}}, [N, T])
    td["next", "truncated"] = no.clone()
    td["mask"] = torch.full((N, T, 1), mask)
    return td.set("td_error", torch.ones(N, T, 1)) if td_error else td


def make(kind, sampler, **options):
    storage = DeviceStorage(N * T, **options)
    rb = kind(storage=storage, sampler=SAMPLERS[sampler](), writer=DeviceWriter(), batch_size=60)
    rb.extend(batch())
    rb.sample()  # what the sampler keeps is made
    return rb


def drawn(rb, times=3):
    return torch.cat([rb.sample(return_info=True)[1]["index"] for _ in range(times)])


# TorchRL's two buffers write in the same way: one of them goes with each case
PAIRS = [(kind, *case) for number, case in enumerate(CASES) for kind in (BUFFERS[number % 2], DeviceReplayBuffer)]


@pytest.mark.parametrize(("kind", "storage", "sampler", "write"), PAIRS)
def test_a_mask_written_in_place(kind, storage, sampler, write):
    torch.manual_seed(0)
    rb = make(kind, sampler, **STORAGES[storage])
    values, write = torch.ones(N * T, 1, dtype=torch.bool), (WRITES | VIEWS)[write]
    assert SLOT in drawn(rb)
    values[SLOT] = False
    write(rb, "mask", values)
    assert not rb.storage.get(torch.tensor(SLOT))["mask"]
    assert SLOT not in drawn(rb)
    values[SLOT] = True  # and back
    write(rb, "mask", values)
    assert SLOT in drawn(rb)


@pytest.mark.parametrize("kind", BUFFERS[1:])
@pytest.mark.parametrize("write", WRITES | VIEWS)
@pytest.mark.parametrize("alpha", [None, 1.0])
def test_an_end_written_in_place(kind, write, alpha):
    torch.manual_seed(0)
    rb = kind(
        storage=DeviceStorage(N * T), sampler=DeviceSliceSampler(L, alpha=alpha), writer=DeviceWriter(), batch_size=60
    )
    rb.extend(batch())
    rb.sample()
    ends = torch.zeros(N * T, 1, dtype=torch.bool)
    ends[SLOT] = True
    (WRITES | VIEWS)[write](rb, ("next", "done"), ends)
    slices = drawn(rb).view(-1, L)
    assert not (slices[:, :-1] == SLOT).any()
    assert (slices[:, -1] == SLOT).any()
    rb.extend(batch()[:, :2])  # the next rows are learned on top of that
    slices = drawn(rb).view(-1, L)
    assert not (slices[:, :-1] == SLOT).any()


@pytest.mark.parametrize("write", ["set_at_", "buffer[key]", "storage[i] = row"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_slices_of_torchrl_that_keep_what_they_read(kind, write):
    """With ``cache_values`` TorchRL's slice sampler reads the ends again where the storage says that rows changed."""
    sampler = SliceSampler(slice_len=L, end_key=("next", "done"), cache_values=True)
    rb = kind(storage=DeviceStorage(T * N), sampler=sampler, writer=DeviceWriter(), batch_size=60)
    rb.extend(batch().reshape(-1))
    rb.sample()
    ends = torch.zeros(N * T, 1, dtype=torch.bool)
    ends[SLOT] = True
    (WRITES | VIEWS)[write](rb, ("next", "done"), ends)
    index = torch.cat([rb.sample(return_info=True)[1]["index"][0] for _ in range(6)]).view(-1, L)
    assert not (index[:, :-1] == SLOT).any()


class TestPriorities:
    """What is not written keeps its priority; what comes back counts as new."""

    def weights(self, write, **options):
        rb = make_replay_buffer(N * T, batch_size=18, sampler="prioritized", alpha=1.0, mask_key="mask", **options)
        rb.extend(batch())
        rb.update_priority(torch.arange(N * T), torch.arange(N * T) + 0.0)  # row 0 is never drawn
        values = torch.ones(N * T, 1, dtype=torch.bool)
        values[SLOT] = False
        write(rb, "mask", values)
        rb.sample()
        without = rb.sampler.tree.weights.clone()
        values[SLOT] = True
        write(rb, "mask", values)
        rb.sample()
        return without, rb.sampler.tree.weights.clone()

    @pytest.mark.parametrize("write", WRITES | VIEWS)
    def test_of_rows(self, write):
        without, back = self.weights((WRITES | VIEWS)[write])
        expected = torch.arange(N * T) + 0.0
        expected[SLOT] = 0.0
        assert without.equal(expected)
        expected[SLOT] = N * T - 1  # the largest seen
        assert back.equal(expected)

    @pytest.mark.parametrize("write", ["set_at_", "buffer[key]"])
    def test_of_slices(self, write):
        rb = make_replay_buffer(N * T, batch_size=18, sampler="slice", slice_len=L, alpha=1.0)
        rb.extend(batch())
        starts = torch.arange(N * (T - L + 1))
        rb.update_priority(starts.view(-1, 1), starts + 0.0)
        values = torch.zeros(N * T, 1, dtype=torch.bool)
        values[SLOT] = True
        (WRITES | VIEWS)[write](rb, ("next", "done"), values)
        rb.sample()
        expected = torch.zeros(N * T)
        expected[: starts.numel()] = starts
        expected[[SLOT, SLOT - N]] = 0  # slices that would cross the end
        assert rb.sampler.tree.weights.equal(expected)

    def test_other_entries_change_no_priority(self):
        rb = make_replay_buffer(N * T, batch_size=18, sampler="prioritized", alpha=1.0, mask_key="mask")
        rb.extend(batch())
        rb.update_priority(torch.arange(N * T), torch.arange(N * T) + 0.0)
        rb[:].get(("next", "reward")).mul_(3)
        rb.set_at_(("next", "reward"), 7.0, 3)
        assert not (drawn(rb) == 0).any()  # priority 0 stays 0
        assert rb.sampler.tree.weights.equal(torch.arange(N * T) + 0.0)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_write_before_a_save_is_in_the_state(sampler, tmp_path):
    rb = make(DeviceReplayBuffer, sampler)
    rb[:].get("mask")[SLOT] = False
    rb.dumps(tmp_path)
    again = DeviceReplayBuffer(storage=DeviceStorage(N * T), sampler=SAMPLERS[sampler](), batch_size=60)
    again.loads(tmp_path)
    assert SLOT not in drawn(again)
    again.set_at_("mask", True, SLOT)
    assert SLOT in drawn(again)


COPY_WRITES = {
    **{name: VIEWS[name] for name in VIEWS if name != "storage.field"},
    "a nested tensor": lambda rb, key, values: rb[:].get(("next", "done")).fill_(True),
    "a nested TensorDict": lambda rb, key, values: rb[:]["next"].set_at_("done", True, SLOT),
    "a nested key": lambda rb, key, values: rb["next", "done"].__setitem__(SLOT, True),
    "rows.set_": lambda rb, key, values: rb[:][SLOT].set_(key, values[SLOT]),
    "rows[i] = row": lambda rb, key, values: rb[:].__setitem__(SLOT, rb[:][0].clone()),
    "a view of a tensor": lambda rb, key, values: rb[:]["observation"].detach().reshape(N, T)[0].mul_(2),
    "one of unbind": lambda rb, key, values: rb[:][key].unbind(0)[SLOT].zero_(),
    "+=": lambda rb, key, values: rb[:]["observation"].__iadd__(1),
    "out=": lambda rb, key, values: torch.mul(torch.ones(N * T, 1), 2, out=rb[:]["observation"]),
    "an initialiser": lambda rb, key, values: torch.nn.init.zeros_(rb[:]["observation"]),
    "many at once": lambda rb, key, values: rb[:].select("observation").mul_(2),
}


@pytest.mark.parametrize("options", [{"compact": True}, {"n_step": 2}], ids=["compact", "n_step"])
@pytest.mark.parametrize("write", COPY_WRITES)
def test_writes_into_a_copy_are_refused(options, write):
    rb = make(TensorDictReplayBuffer, "random", **options)
    before = rb[:].clone()
    with pytest.raises((RuntimeError, ValueError), match=r"which are a copy.*Remedy: buffer\.set_at_|Failed to update"):
        COPY_WRITES[write](rb, "mask", torch.zeros(N * T, 1, dtype=torch.bool))
    assert (rb[:] == before).all()


@pytest.mark.parametrize("options", [{"compact": True}, {"n_step": 2}], ids=["compact", "n_step"])
def test_a_copy_reads_like_any_tensor(options):
    rb = make(TensorDictReplayBuffer, "random", **options)
    rows, into = rb[:], torch.zeros(N * T, 1)
    assert into.copy_(rows["observation"]).equal(rows["observation"])
    assert rows["observation"].sort(0).values.equal(into.sort(0).values)
    torch.nn.Linear(1, 1)(rows["observation"]).sum().backward()
    assert type(rows["observation"] * 2) is type(rows.clone()["mask"]) is torch.Tensor
    for copy in (rows.clone(), pickle.loads(pickle.dumps(rows.clone())), torch.stack([rows, rows])[0]):
        copy.fill_("mask", False)
        copy["next", "done"][SLOT] = True
    assert rb[:]["mask"].all()
    assert type(pickle.loads(pickle.dumps(rows["mask"]))) is torch.Tensor


def test_a_masked_write_makes_no_host_wait_on_the_way():
    from torchrl_perf.runtime import no_host_sync

    rb, slots = make(DeviceReplayBuffer, "slice"), torch.tensor([SLOT])
    off = torch.zeros(1, 1, dtype=torch.bool)
    slots = rb.storage.ring.vouch(slots)
    with no_host_sync():
        rb.set_at_("mask", off, slots)
        rb.sample()


class TestRowsThatAreNotFilled:
    """An IndexError wherever the host knows the index."""

    INDICES = (
        5,
        -6,
        [5],
        [0, 7],
        range(3, 7),
        torch.tensor([2, 5]),
        torch.tensor(11),
        torch.tensor([-6]),
        (torch.tensor([6]),),
    )

    @pytest.mark.parametrize("kind", BUFFERS)
    @pytest.mark.parametrize("index", INDICES, ids=str)
    @pytest.mark.parametrize("options", [{}, {"compact": True}], ids=str)
    def test_reading_and_writing(self, kind, index, options):
        rb = kind(storage=DeviceStorage(12, **options), writer=DeviceWriter())
        rb.extend(batch()[:1, :5])
        before = rb[:].clone()
        row = TensorDict({"mask": torch.zeros(1, dtype=torch.bool)}, [])
        tries = [lambda: rb.storage[index], lambda: rb.storage.get(index), lambda: rb.storage.__setitem__(index, row)]
        if not isinstance(index, tuple):
            tries += [lambda: rb[index], lambda: rb.__setitem__(index, row)]
        if kind is DeviceReplayBuffer:  # TorchRL's own goes through a view, and may write some rows before it fails
            tries.append(lambda: rb.set_at_("mask", False, index))
        for attempt in tries:
            with pytest.raises(IndexError):
                attempt()
        assert (rb[:] == before).all()

    @pytest.mark.parametrize("kind", BUFFERS)
    def test_those_that_are(self, kind):
        rb = kind(storage=DeviceStorage(12), writer=DeviceWriter())
        rb.extend(batch()[:1, :5])
        for index, expected in ((-1, [4]), ([-1, 0], [4, 0]), (torch.tensor([-5, 4]), [0, 4]), (slice(3, 99), [3, 4])):
            assert rb.storage[index]["observation"].flatten().tolist() == expected
            assert rb[index]["observation"].flatten().tolist() == expected

    def test_samples_of_the_epoch_sampler_see_every_write(self):
        rb = DeviceReplayBuffer(
            storage=DeviceStorage(N * T), sampler=DeviceSamplerWithoutReplacement(), batch_size=N * T
        )
        rb.extend(batch())
        rb[:].get("mask")[SLOT] = False
        assert rb.sample()["mask"].sum() == N * T - 1
