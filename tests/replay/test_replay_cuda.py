"""The buffer on CUDA: eager equals the CPU, recorded extends and samples go on with each replay, no host wait."""

import gc

import pytest
import torch
from ring_oracle import Stream

from torchrl_perf.replay import DeviceStorage, make_replay_buffer
from torchrl_perf.runtime import capture, no_host_sync

pytestmark = pytest.mark.gpu

OPTIONS = [{}, {"compact": True}, {"n_step": 3}, {"compact": True, "n_step": 3}]


def dict_of(td):
    return td.flatten_keys(".").to_dict()


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_cpu(options):
    cpu, cuda = (DeviceStorage(26, device=device, final_fraction=0.2, **options) for device in ("cpu", "cuda"))
    stream = Stream(2, torch.Generator().manual_seed(0))
    for T in (3, 1, 7, 20, 2, 13, 5):
        _, td = stream.batch(T)
        assert torch.equal(cpu.write(td), cuda.write(td.to("cuda")).cpu())
        slots = cpu.ring.valid_slots()
        assert torch.equal(slots, cuda.ring.valid_slots().cpu())
        # sums and powers of an n-step window differ in the last bit
        torch.testing.assert_close(dict_of(cuda.get(slots.cuda())), dict_of(cpu.get(slots)), check_device=False)
        assert torch.equal(cpu.ring.generation(slots), cuda.ring.generation(slots.cuda()).cpu())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("T", [1, 4])
def test_recorded_extends_go_on(options, T):
    eager, graph = (DeviceStorage(30, device="cuda", final_fraction=0.3, **options) for _ in range(2))
    stream = Stream(3, torch.Generator().manual_seed(0))
    write = capture(graph.write)
    for count in range(1, 13):
        td = stream.batch(T)[1].to("cuda")
        expected = eager.write(td)
        received = write(td)
        assert torch.equal(expected, received)
        assert int(graph.ring.cursor) == count * T
        assert len(eager) == len(graph)
        slots = eager.ring.valid_slots()
        assert torch.equal(slots, graph.ring.valid_slots())
        assert (eager.get(slots) == graph.get(slots)).all()
    assert write.captured
    assert graph.ring.recorded


@pytest.mark.parametrize("options", OPTIONS)
def test_a_recorded_sample_sees_what_is_written(options):
    rb = make_replay_buffer(12, batch_size=12, device="cuda", **options)
    stream = Stream(3, torch.Generator().manual_seed(0), p_done=0.0, p_gap=0.0)
    rb.extend(stream.batch(1)[1].to("cuda"))
    for _ in range(30):
        rb.extend(stream.batch(1)[1].to("cuda"))
    sample = capture(rb.sample)
    first = stream.count
    seen = set()
    for _ in range(16):
        drawn = set(sample()["action"].tolist())
        assert drawn <= set(range(stream.count - 11, stream.count + 1))  # what is stored now
        seen |= drawn
        rb.extend(stream.batch(1)[1].to("cuda"))
    assert sample.captured
    assert len(seen & set(range(first + 1, stream.count))) > 24  # of 45 rows, each drawn with probability 0.98


@pytest.mark.parametrize("sampler", ["random", "prioritized"])
@pytest.mark.parametrize("options", OPTIONS)
def test_no_host_wait(sampler, options):
    rb = make_replay_buffer(300, batch_size=8, device="cuda", sampler=sampler, **options)
    td = Stream(3, torch.Generator().manual_seed(0)).batch(7)[1].to("cuda")

    def update():
        rb.extend(td)
        sample = rb.sample()
        sample["td_error"] = sample["observation"][:, 1].abs()
        rb.update_tensordict_priority(sample)

    update()
    with no_host_sync():
        for _ in range(3):
            update()


def test_the_first_extend_is_not_recorded():
    storage = DeviceStorage(8, device="cuda")
    td = Stream(2, torch.Generator().manual_seed(0)).batch(2)[1].to("cuda")
    with pytest.raises(RuntimeError, match="extend once before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        td["action"].add(1)  # an empty graph would warn
        storage.write(td)


def test_too_much_memory_is_refused():
    td = Stream(2, torch.Generator().manual_seed(0)).batch(2)[1].to("cuda")
    gc.collect()  # what other tests have left
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match="cuda"):
        DeviceStorage(10**11, device="cuda").write(td)
    assert torch.cuda.memory_allocated() <= before + 2 * 512  # two counters at most, no rows


def test_memory_is_flat():
    rb = make_replay_buffer(3000, batch_size=15, device="cuda", compact=True, n_step=3)
    td = Stream(3, torch.Generator().manual_seed(0)).batch(5)[1].to("cuda")

    def update():
        rb.extend(td)
        return rb.sample()

    step = capture(update)
    for _ in range(4):
        step()
    before = torch.cuda.memory_allocated()
    for _ in range(2000):
        step()
    assert torch.cuda.memory_allocated() == before


def test_state_moves_between_devices(tmp_path):
    rb = make_replay_buffer(20, batch_size=4, device="cuda", sampler="prioritized", compact=True)
    rb.set_rng(torch.Generator(device="cuda").manual_seed(3))
    rb.extend(Stream(2, torch.Generator().manual_seed(0)).batch(7)[1].to("cuda"))
    rb.dumps(tmp_path)
    other = make_replay_buffer(20, batch_size=4, device="cuda", sampler="prioritized", compact=True)
    other.loads(tmp_path)
    assert torch.equal(rb.sample()["index"], other.sample()["index"])
    on_cpu = DeviceStorage(20, compact=True)
    on_cpu.load_state_dict(rb.storage.state_dict())
    assert (on_cpu.get(slice(None)) == rb[:].cpu()).all()
