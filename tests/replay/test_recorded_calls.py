"""A buffer whose calls record themselves gives what it gives without, call by call, for as long as a result is held."""

import copy
import gc
import threading
import warnings
from collections import deque

import pytest
import torch
from recording_device import emulated_graphs, recording_device
from tensordict import TensorDict
from test_host_cost import Kernels
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.envs.transforms import Compose, RenameTransform, Transform

from torchrl_perf.replay import (
    DeviceRandomSampler,
    DeviceSamplerWithoutReplacement,
    DeviceStorage,
    DeviceWriter,
    make_replay_buffer,
)
from torchrl_perf.replay import rows as rows_module
from torchrl_perf.replay.buffer import DeviceReplayBuffer
from torchrl_perf.runtime import capture
from torchrl_perf.runtime.self_capture import HELD, SelfCaptureWarning, held, in_place

device = recording_device


def batch(*shape, device="cpu"):
    """Transitions of ``[N, T]`` or ``[B]``, of several dtypes, with ends and a mask."""
    done = torch.rand(*shape, 1) < 0.2
    following = {"observation": torch.randn(*shape, 3), "reward": torch.randn(*shape, 1), "done": done}
    following |= {"terminated": done & (torch.rand(*shape, 1) < 0.5), "truncated": torch.zeros_like(done)}
    data = {"observation": torch.randn(*shape, 3), "action": torch.randint(5, shape), "next": following}
    data |= {"active": torch.rand(*shape) < 0.8, "is_init": torch.zeros_like(done)}
    return TensorDict(data, shape).to(device)


def make(device, *, captured, **options):
    """A buffer of 96 rows of 3 streams that has some already, from the same random numbers."""
    torch.manual_seed(0)
    buffer = make_replay_buffer(96, batch_size=16, device=device, capture=captured, **options)
    buffer.extend(batch(3, 4, device=device))
    return buffer


def both(device, run, **options):
    """What ``run(buffer)`` gives with graphs and without, and the buffer with graphs."""
    found = []
    for captured in (False, True):
        buffer = make(device, captured=captured, **options)
        found.append(run(buffer))
    for number, (expected, received) in enumerate(zip(*found, strict=True)):
        if isinstance(expected, int):
            assert expected == received, number
        else:
            assert (expected == received).all(), number  # raises for other keys
    return buffer


def written(buffer, *shape):
    return buffer.extend(batch(*shape, device=buffer.storage.device)).clone()


def learned(buffer, sample):
    """Priorities for a sample, as a loss writes them; from the host, so that both devices have the same."""
    sample["td_error"] = torch.rand(sample.shape[0]).to(sample.device)
    buffer.update_tensordict_priority(sample)
    return sample.clone()


SLICES = {"sampler": "slice", "slice_len": 4}
KINDS = {
    "uniform": {},
    "uniform with a mask": {"mask_key": "active"},
    "prioritized": {"sampler": "prioritized"},
    "prioritized with a mask": {"sampler": "prioritized", "mask_key": "active"},
    "slices": SLICES,
    "slices by priority": {**SLICES, "alpha": 0.6},
    "slices across ends": {**SLICES, "within_episode": False},
    "n-step": {"n_step": 3},
    "compact": {"compact": True},
    "compact by priority, n-step": {"compact": True, "n_step": 3, "sampler": "prioritized"},
}


@pytest.mark.parametrize("name", list(KINDS))
def test_it_equals_the_plain_buffer(name, device):
    """Over several rounds of the ring, with two sizes of samples and of batches, and a checkpoint in between."""

    def run(buffer):
        found, state = [], None
        for count in range(40):
            found += [written(buffer, 3, 2 + (count % 3 == 2)), len(buffer)]
            found += [learned(buffer, buffer.sample()), learned(buffer, buffer.sample(8))]
            if count == 15:
                state = buffer.state_dict()
            if count == 25:
                buffer.load_state_dict(state)
            if count == 30 and "mask_key" in KINDS[name]:
                buffer[:]["active"].logical_not_()
        return found

    buffer = both(device, run, **KINDS[name])
    assert buffer._recorded.samples == 2  # one for each size
    assert not buffer.storage.ring.recorded or buffer.storage.compact  # the host still knows how many rows there are


@pytest.mark.parametrize("name", ["uniform", "uniform with a mask", "prioritized", "slices by priority"])
def test_it_equals_the_plain_buffer_where_writes_are_one_launch(name, monkeypatch):
    """The path of CUDA on a CPU: a write stays what it is, what samplers learn is a graph."""
    kernels = Kernels()
    monkeypatch.setattr(rows_module, "row_kernels", lambda _: kernels)

    def run(buffer):
        found = []
        for _ in range(45):
            found += [written(buffer, 3, 2), len(buffer), learned(buffer, buffer.sample())]
        return found

    with emulated_graphs(monkeypatch):
        buffer = both("cpu", run, **KINDS[name])
    assert buffer._recorded.samples == 1
    assert buffer._recorded._lessons.recorded is (name != "uniform")
    assert not buffer.storage._writes.recorded
    assert not buffer.storage.ring.recorded


def test_rows_without_streams_and_generations(device):
    def run(buffer):
        return [each for _ in range(12) for each in (buffer.extend(batch(7, device=device)).clone(), take(buffer))]

    def take(buffer):
        data, info = buffer.sample(return_info=True)
        assert all((data[key] == info[key]).all() for key in ("index", "index_generation"))
        return data.clone()

    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        writer = DeviceWriter(track_generations=True)
        storage = DeviceStorage(20, device=device)
        found.append(run(DeviceReplayBuffer(storage=storage, writer=writer, batch_size=9, capture=captured)))
    assert all((expected == received).all() for expected, received in zip(*found, strict=True))


def test_random_numbers_of_a_generator(device):
    """Drawn anew by each replay; a buffer that is restored, and one that is seeded again, repeat them."""
    generator = torch.Generator(device)
    buffer = make(device, captured=True, generator=generator)
    runs = []
    for _ in range(3):
        generator.manual_seed(3)
        runs.append([buffer.sample()["index"].clone() for _ in range(6)])
    assert len({tuple(index.tolist()) for index in runs[0]}) == 6
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[2]))
    state = buffer.state_dict()
    ahead = [buffer.sample()["index"].clone() for _ in range(3)]
    buffer.load_state_dict(state)
    assert all(torch.equal(index, buffer.sample()["index"]) for index in ahead)
    plain = make(device, captured=False, generator=torch.Generator(device))
    plain.load_state_dict(state)
    assert all(torch.equal(index, plain.sample()["index"]) for index in ahead)


def test_annealed_exponents(device):
    def run(buffer):
        found = []
        for count in range(12):
            found.append(learned(buffer, buffer.sample()))
            buffer._sampler.step()
            if count == 8:
                buffer._sampler.alpha = 0.3
        return found

    options = {"sampler": "prioritized", "beta_end": 1.0, "alpha_end": 0.2, "anneal_steps": 10}
    assert both(device, run, **options)._recorded.samples == 1


def test_held_samples_stay_as_they_are(device):
    """More than there is memory for: those that find none are drawn without a graph, and it is said once."""
    buffer = make(device, captured=True)
    drawn, copies = [], []
    with pytest.warns(SelfCaptureWarning, match=r"at most 4 results to be held.*Remedy: let go.*result.clone") as said:
        for _ in range(15):
            drawn.append(buffer.sample())
            copies.append(drawn[-1].clone())
            written(buffer, 3, 2)
    assert len(said) == 1
    assert buffer._recorded.samples == HELD
    assert all((sample == kept).all() for sample, kept in zip(drawn, copies, strict=True))
    memory = {sample["observation"].untyped_storage().data_ptr() for sample in drawn}
    assert len(memory) == len(drawn)
    drawn.clear()
    assert buffer.sample()["observation"].untyped_storage().data_ptr() in memory
    assert buffer._recorded.samples == HELD


@pytest.mark.parametrize("keep", ["a tensor", "a view", "the graph of autograd", "info"])
def test_whatever_is_held_of_a_sample_keeps_it(keep, device):
    buffer = make(device, captured=True)
    weight = torch.ones(3, 3, device=device, requires_grad=True)
    for _ in range(3):
        buffer.sample()
    sample, info = buffer.sample(return_info=True)
    expected = sample.clone()
    if keep == "a tensor":
        kept = sample["next", "observation"]
    elif keep == "a view":
        kept = sample["next", "observation"][2:, 1]
    elif keep == "info":
        kept = info["index"]
    else:
        kept = (sample["observation"] @ weight).sum()
    del sample, info
    for _ in range(2 * HELD):
        buffer.sample()
    if keep == "the graph of autograd":
        kept.backward()
        torch.testing.assert_close(weight.grad[:, 0], expected["observation"].sum(0))
    else:
        wanted = expected["next", "observation"]
        wanted = expected["index"] if keep == "info" else wanted if keep == "a tensor" else wanted[2:, 1]
        assert torch.equal(kept, wanted)


def test_a_sample_may_be_written_reshaped_and_differentiated(device):
    """What is done to the tensors of one sample does not reach the next one."""
    found = []
    for captured in (False, True):
        buffer = make(device, captured=captured)
        for _ in range(6):
            sample = buffer.sample()
            found.append(sample.clone())
            sample["observation"].requires_grad_().square().sum().backward()
            sample["next", "reward"].squeeze_(-1).zero_()
            sample["extra"] = sample["action"] + 1
            sample.get(("next", "done")).logical_not_()
    for expected, received in zip(found[:6], found[6:], strict=True):
        assert (expected == received).all()
        assert not received["observation"].requires_grad


def test_an_emptied_buffer_and_one_that_fills_again(device):
    def run(buffer):
        found = [buffer.sample().clone() for _ in range(5)]
        buffer.empty()
        with pytest.raises(ValueError, match="filled"):
            buffer.sample()
        for _ in range(6):
            found += [written(buffer, 3, 2), len(buffer), learned(buffer, buffer.sample())]
        return found

    both(device, run, sampler="prioritized")
    both(device, run)


def test_two_buffers_of_one_storage(device):
    """Both samplers learn of what either writes."""
    found = []
    for captured in (False, True):
        one = make(device, captured=captured, sampler="prioritized")
        other = DeviceReplayBuffer(
            storage=one.storage, sampler=DeviceRandomSampler("active"), batch_size=8, capture=captured
        )
        found.append([])
        for count in range(10):
            index = written(one if count % 2 else other, 3, 2)
            found[-1] += [index, learned(one, one.sample()), other.sample().clone()]
    assert all((expected == received).all() for expected, received in zip(*found, strict=True))


def test_two_threads(device):
    """One writes, one samples: every row of every sample, held for some while, is one that was written."""
    buffer = make(device, captured=True, sampler="prioritized", compact=True)
    buffer.empty()
    wrong, writes, done = [], [], threading.Event()

    def rows(number):
        data = batch(3, 2, device=device)
        data["action"].fill_(number)
        data["observation"].copy_(data["action"].unsqueeze(-1).expand_as(data["observation"]))
        return data

    def write():
        try:
            for number in range(1, 60):
                buffer.extend(rows(number))
                writes.append(number)
        finally:
            done.set()

    buffer.extend(rows(0))
    thread = threading.Thread(target=write)
    thread.start()
    held_samples = deque(maxlen=3)
    while not done.is_set() or len(held_samples) < 3:
        held_samples.append(buffer.sample())
        for sample in held_samples:
            wrong += (sample["observation"] != sample["action"].unsqueeze(-1)).flatten().tolist()
    thread.join()
    assert len(writes) == 59
    assert not any(wrong)
    assert 1 <= buffer._recorded.samples <= HELD


def test_parts_that_are_replaced(device):
    """Another sampler, and another generator, are taken from the next call on."""
    buffer = make(device, captured=True)
    for _ in range(4):
        buffer.sample()
    buffer.set_rng(torch.Generator(device).manual_seed(1))
    plain = make(device, captured=False, generator=torch.Generator(device).manual_seed(1))
    assert all(torch.equal(plain.sample()["index"], buffer.sample()["index"]) for _ in range(5))
    buffer.set_sampler(RandomSampler())
    assert buffer.sample()["index"].shape == (16,)


@pytest.mark.parametrize(
    "options",
    [{"sampler": "epoch"}, {"prefetch": 2}, {"sampler": RandomSampler()}],
    ids=["epoch", "prefetch", "torchrl"],
)
def test_what_the_host_has_a_part_in_runs_plainly(options, device):
    buffer = make(device, captured=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SelfCaptureWarning)
        samples = [buffer.sample() for _ in range(8)]
    assert buffer._recorded.samples == 0
    assert len({sample["observation"].data_ptr() for sample in samples}) == 8


class Doubled(Transform):
    """Code of a user that asks the host, and writes into the rows in place."""

    def forward(self, tensordict):
        tensordict["seen"] = torch.full_like(tensordict["action"], int(tensordict["action"].max()))
        tensordict["observation"].mul_(2)
        return tensordict.exclude("active")


@pytest.mark.parametrize("kind", ["uniform", "slices by priority", "compact by priority, n-step"])
def test_transforms_follow_the_recorded_part(kind, device):
    def run(buffer):
        found = []
        for _ in range(8):
            written(buffer, 3, 2)
            sample, info = buffer.sample(return_info=True)
            assert (sample["index"] == info["index"]).all()
            found.append(learned(buffer, sample))
        return found

    options = {"transform": Compose(Doubled(), RenameTransform(["action"], ["act"]))}
    options |= {"collate_fn": lambda rows: rows.set("collated", rows["action"] + 1)}
    assert both(device, run, **KINDS[kind], **options)._recorded.samples == 2


def test_a_sampler_of_a_subclass_runs_plainly(device):
    class Counting(DeviceRandomSampler):
        draws = 0

        def sample(self, storage, batch_size):
            self.draws += 1
            return super().sample(storage, batch_size)

    buffer = make(device, captured=True, sampler=Counting())
    for _ in range(6):
        buffer.sample()
    assert buffer._sampler.draws == 6


def test_inside_captured_functions_calls_are_plain(device):
    buffer = make(device, captured=True)
    sample = capture(buffer.sample, device=device)
    for _ in range(5):
        assert sample().shape == (16,)
    assert buffer._recorded.samples == 0


def test_without_capture_nothing_is_recorded(device):
    buffer = make(device, captured=False, sampler="prioritized", compact=True)
    for _ in range(5):
        written(buffer, 3, 2)
        learned(buffer, buffer.sample())
    assert buffer._recorded.samples == 0
    assert not buffer.storage._writes.recorded


def test_what_cannot_be_recorded_runs_plainly_and_says_so(device, monkeypatch):
    def refuse(*args):
        raise RuntimeError("operation not permitted")

    for module in (held, in_place):
        monkeypatch.setattr(module, "record", refuse)

    def run(buffer):
        return [each for _ in range(6) for each in (written(buffer, 3, 2), learned(buffer, buffer.sample()))]

    with pytest.warns(SelfCaptureWarning) as said:
        both(device, run, sampler="prioritized", n_step=2)
    names = sorted(str(warning.message).split(" runs eagerly")[0] for warning in said)
    parts = [f"DeviceReplayBuffer.{name}" for name in ("extend", "sample", "update_priority")]
    assert names == [*parts, "DeviceStorage.write"]


def test_copies_know_nothing_of_graphs(device):
    buffer = make(device, captured=True)
    for _ in range(4):
        buffer.sample()
    other = copy.deepcopy(buffer._recorded)
    assert (buffer._recorded.samples, other.samples) == (1, 0)


class TestDebug:
    @pytest.mark.parametrize("options", [{}, SLICES], ids=["uniform", "slices"])
    def test_a_sample_that_is_read_late_is_named(self, options, device):
        buffer = make(device, captured=True, debug=True, **options)
        buffer.sample()
        sample = buffer.sample()
        following, kept, observation = sample["next"], sample.clone(), sample["observation"]
        for _ in range(HELD):
            buffer.sample()
        assert (sample == kept).all()
        buffer.sample()
        words = rf"number 2 \(drawn at .*test_recorded_calls.py:\d+\).*{HELD} others.*{HELD + 1} samples later. Remedy"
        reads = [lambda: sample["action"], lambda: sample.get(("next", "done")), lambda: sample[:2], sample.clone]
        reads += [lambda: following["reward"], lambda: dict(sample.items()), lambda: sample.select("action")]
        reads += [lambda: buffer.update_tensordict_priority(sample)] if "alpha" in options else []
        for read in reads:
            with pytest.raises(RuntimeError, match=words):
                read()
        assert torch.equal(observation, kept["observation"])  # a tensor that was taken out keeps its memory
        assert kept["next", "reward"].shape == (16, 1)

    def test_it_needs_no_graph(self):
        buffer = make("cpu", captured=False, debug=True)
        sample = buffer.sample()
        for _ in range(HELD + 1):
            buffer.sample()
        with pytest.raises(RuntimeError, match="sample: expected number 1"):
            sample["action"]

    def test_samples_are_those_of_a_buffer_without_it(self, device):
        found = []
        for debug in (False, True):
            buffer = make(device, captured=True, debug=debug, sampler="prioritized")
            found.append([learned(buffer, buffer.sample()) for _ in range(8)])
        assert all((expected == received).all() for expected, received in zip(*found, strict=True))


def test_memory_and_graphs_are_flat(device):
    buffer = make(device, captured=True, sampler="prioritized", compact=True, n_step=3)
    data, graphs = batch(3, 2, device=device), []
    for count in range(1000 if device == "cuda" else 30):
        buffer.extend(data)
        sample = buffer.sample()
        sample["td_error"] = sample["next", "reward"].abs()
        buffer.update_tensordict_priority(sample)
        if count % 10 == 9:
            gc.collect()
            graphs.append((buffer._recorded.samples, torch.cuda.memory_allocated() if device == "cuda" else 0))
    assert set(graphs) == {graphs[0]}


def _epochs(buffer):
    """Slots of seven epochs, with more rows from the fifth on, and of one after a checkpoint."""
    orders = [written(buffer, 3, 8)]
    for epoch in range(7):
        if epoch == 4:
            written(buffer, 3, 4)
        orders += [sample["index"].clone() for sample in buffer]
    buffer.load_state_dict(buffer.state_dict())
    return orders + [sample["index"].clone() for sample in buffer]


def test_orders_of_epochs(device, monkeypatch):
    made, record = [], held.record
    monkeypatch.setattr(held, "record", lambda *a, **k: made.append(1) or record(*a, **k))
    both(device, _epochs, sampler="epoch", drop_last=True)
    assert made
    orders = _epochs(make(device, captured=True, sampler="epoch"))[1:]
    assert [order.numel() for order in orders[:6]] == [16, 16, 4, 16, 16, 4]
    epochs = [torch.cat(orders[start : start + 3]) for start in range(0, 24, 3)]
    for number, order in enumerate(epochs):
        rows = 36 if number < 4 else 48
        assert torch.equal(order.sort().values, torch.arange(rows, device=order.device))
    assert len({tuple(order.tolist()) for order in epochs}) == 8


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}], ids=["plain", "prefetch"])
def test_an_order_is_no_graph_where_the_buffer_records_nothing(options, device):
    sampler = DeviceSamplerWithoutReplacement()
    buffer = make(device, captured=False, sampler=sampler, **options)
    for _ in range(8):
        buffer.sample()
    assert sampler._orders.recorded == 0


def test_an_order_is_kept_for_as_long_as_its_slots_are_held(device):
    buffer = make(device, captured=True, sampler="epoch")
    kept, copies = [], []
    for _ in range(8):
        for sample in buffer:
            kept.append(sample["index"])
            copies.append(sample["index"].clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
