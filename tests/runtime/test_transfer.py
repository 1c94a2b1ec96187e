"""Upload and Download: values, what is refused, and no torn read in any order that the streams allow."""

from functools import partial

import numpy as np
import pytest
import torch
from slow_lane import SlowDevice, SlowLane

from torchrl_perf.runtime import Download, PackedRecord, Upload, no_host_sync, transfer

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.uint16]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers of any dtype, no two neighbours alike."""
    numel = int(np.prod(shape))
    return (torch.arange(numel) % 2 if dtype == torch.bool else torch.arange(numel) % 251).to(dtype).view(shape)


class TestDownload:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(3, 5), (), (0,), (4, 0, 2)], ids=str)
    @pytest.mark.parametrize("side_stream", [False, True])
    def test_arrives_unchanged(self, device, dtype, shape, side_stream):
        source = values(shape, dtype).to(device)
        download = Download(source, side_stream=side_stream)
        download.start(source)
        host = download.wait()
        assert (host.shape, host.dtype, host.device.type) == (source.shape, dtype, "cpu")
        assert torch.equal(host, values(shape, dtype))

    def test_the_oldest_comes_first_and_is_kept_until_its_slot_is_needed(self, device):
        download = Download(torch.zeros(2, device=device), slots=2)
        assert download.pending == 0
        for number in (1.0, 2.0):
            download.start(torch.full((2,), number, device=device))
        assert download.pending == 2
        first = download.wait()
        assert first.tolist() == [1.0, 1.0]
        second = download.wait()
        assert (second.tolist(), download.pending) == ([2.0, 2.0], 0)
        download.start(torch.full((2,), 3.0, device=device))
        assert download.wait().data_ptr() == first.data_ptr()
        assert second.tolist() == [2.0, 2.0]

    def test_later_writes_do_not_reach_the_copy(self, device):
        source = torch.ones(4, device=device)
        download = Download(source)
        download.start(source)
        source.zero_()
        assert download.wait().tolist() == [1.0] * 4

    @pytest.mark.parametrize("side_stream", [False, True])
    def test_views_of_any_kind(self, device, side_stream):
        base = torch.arange(12.0, device=device).view(3, 4)
        phase = torch.complex(base, base + 1)
        for source in (
            base.T,
            base[:, ::2],
            base[1].expand(3, 4),
            phase.conj(),
            phase.conj().imag,
            base.requires_grad_(),
        ):
            download = Download(source.detach(), side_stream=side_stream)
            download.start(source)
            host = download.wait()
            assert torch.equal(host, source.detach().cpu())
            assert not host.requires_grad
            assert not host.is_conj()
            assert not host.is_neg()

    def test_refusals(self, device):
        download = Download(torch.zeros(3, device=device), slots=1)
        with pytest.raises(RuntimeError, match="expected a copy under way, received none"):
            download.wait()
        with pytest.raises(ValueError, match=r"expected shape \(3,\), torch.float32 on .*, received shape \(2,\)"):
            download.start(torch.zeros(2, device=device))
        with pytest.raises(ValueError, match=r"received shape \(3,\), torch.int64"):
            download.start(torch.zeros(3, dtype=torch.int64, device=device))
        with pytest.raises(ValueError, match="on meta"):
            download.start(torch.zeros(3, device="meta"))
        download.start(torch.zeros(3, device=device))
        with pytest.raises(RuntimeError, match="expected a free slot, received a start with all 1 in flight"):
            download.start(torch.zeros(3, device=device))
        with pytest.raises(ValueError, match="Download: expected slots >= 1, received 0"):
            Download(torch.zeros(3, device=device), slots=0)

    def test_start_makes_nobody_wait(self, device):
        source = torch.ones(1000, device=device)
        download = Download(source)
        with no_host_sync():
            download.start(source)
            download.start(source.view(10, 100).T.reshape(1000))
        assert download.wait().sum() == 1000


class TestUpload:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(3, 5), (), (0,), (4, 0, 2)], ids=str)
    @pytest.mark.parametrize("side_stream", [False, True])
    def test_tensors_arrive_unchanged(self, device, dtype, shape, side_stream):
        staged = Upload(device, side_stream=side_stream).stage(values(shape, dtype))
        assert (staged.shape, staged.dtype, staged.device.type) == (torch.Size(shape), dtype, device.type)
        assert torch.equal(staged.cpu(), values(shape, dtype))

    @pytest.mark.parametrize(
        "array",
        [
            np.arange(12.0).reshape(3, 4).T,
            np.arange(12)[::-2],
            np.arange(3, dtype=">i4"),
            np.broadcast_to(np.float32(2), (2, 3)),  # read-only
            np.asfortranarray(np.ones((2, 3), bool)),
            np.array(5, np.uint8),
            np.zeros((2, 0), np.int16),
            np.array([1 + 2j], np.complex64),
        ],
        ids=lambda array: f"{array.dtype}{array.shape}",
    )
    def test_arrays_of_any_layout(self, device, array):
        staged = Upload(device).stage(array)
        assert staged.cpu().numpy().tolist() == array.tolist()
        assert staged.cpu().numpy().dtype == array.dtype.newbyteorder("=")

    def test_the_input_may_change_at_once_and_results_are_the_callers(self, device):
        upload, array, staged = Upload(device), np.zeros(100, np.float32), []
        for number in range(7):
            array[:] = number
            staged.append(upload.stage(array))
            array[:] = -1
        assert [tensor.unique().tolist() for tensor in staged] == [[float(number)] for number in range(7)]

    def test_blocks_grow_with_the_input(self, device):
        upload = Upload(device, nbytes=16)
        for size in (2, 100, 3, 5000, 0, 5000):
            assert upload.stage(torch.arange(size)).tolist() == list(range(size))

    @pytest.mark.parametrize("side_stream", [False, True])
    def test_into_a_given_tensor(self, device, side_stream):
        upload, out = Upload(device, side_stream=side_stream), torch.zeros(4, 3, device=device)
        address = out.data_ptr()
        for number in range(5):
            assert upload.stage(np.full((4, 3), number, np.float32), out=out) is out
            assert (out.data_ptr(), out.sum().item()) == (address, 12.0 * number)
        upload.stage(np.ones((3, 4), np.float32), out=out.T)
        assert out.sum().item() == 12.0

    def test_refusals(self, device):
        upload = Upload(device)
        for value in ([1.0, 2.0], 3.0, "text"):
            with pytest.raises(TypeError, match="expected an array or a tensor, received"):
                upload.stage(value)
        for value in (np.array(["a"]), np.array([None]), np.array([0], "datetime64[s]")):
            with pytest.raises(
                TypeError, match="expected an array of numbers or booleans that torch has, received dtype"
            ):
                upload.stage(value)
        for out in (torch.zeros(2, device=device), torch.zeros(3, dtype=torch.int64, device=device)):
            with pytest.raises(ValueError, match=r"expected out of shape \(3,\), torch.float32 on .*, received shape"):
                upload.stage(torch.zeros(3), out=out)
        with pytest.raises(ValueError, match=r"expected a value on the host or on .*, received one on meta"):
            upload.stage(torch.zeros(3, device="meta"))
        with pytest.raises(ValueError, match="Upload: expected slots >= 1, received 0"):
            Upload(device, slots=0)


@pytest.fixture
def slow(monkeypatch, request):
    """A slow device behind all lanes; a test asks for its order with an indirect seed."""
    device = SlowDevice(request.param)
    monkeypatch.setattr(transfer, "Lane", partial(SlowLane, slow=device))
    return device


in_any_order = pytest.mark.parametrize("slow", range(40), indirect=True)
HERE = torch.device("cpu")


@in_any_order
@pytest.mark.parametrize("side_stream", [False, True])
class TestOrder:
    def test_download_sees_neither_later_writes_nor_half_copies(self, slow, side_stream):
        source = torch.zeros(6)
        download = Download(source, slots=slow.random.choice([1, 2, 3]), side_stream=side_stream)
        expected: list[float] = []
        for number in range(1, 30):
            slow.current.give(partial(source.fill_, number))
            slow.walk()
            if download.pending == len(download._flights) or (download.pending and slow.random.random() < 0.3):
                assert download.wait().tolist() == [expected.pop(0)] * 6
            download.start(source)
            expected.append(number)
            slow.walk()
        while download.pending:
            assert download.wait().tolist() == [expected.pop(0)] * 6
        slow.finish()

    def test_upload_is_whole_wherever_the_current_stream_reads_it(self, slow, side_stream):
        upload, array, seen = (
            Upload(HERE, slots=slow.random.choice([1, 2, 3]), side_stream=side_stream),
            np.zeros(6),
            [],
        )
        for number in range(1, 30):
            array[:] = number
            staged = upload.stage(array)
            array[:] = -1
            slow.walk()
            slow.current.give(lambda tensor=staged: seen.append(tensor.tolist()))
            slow.walk()
        slow.finish()
        assert seen == [[number] * 6 for number in range(1, 30)]

    def test_upload_into_a_tensor_that_is_still_read(self, slow, side_stream):
        upload, out, seen = Upload(HERE, side_stream=side_stream), torch.zeros(6), []
        for number in range(1, 30):
            upload.stage(torch.full((6,), float(number)), out=out)
            slow.walk()
            slow.current.give(lambda: seen.append(out.tolist()))
            slow.walk()
        slow.finish()
        assert seen == [[number] * 6 for number in range(1, 30)]


@in_any_order
def test_packed_records_in_any_order(slow):
    up, down = (PackedRecord([((6,), torch.float32)], HERE, slots=slow.random.choice([1, 2, 3])) for _ in range(2))
    for number in range(1, 20):
        up.write()[0][:] = number
        slow.walk()
        up.upload()
        slow.current.give(lambda: down.device_fields[0].copy_(up.device_fields[0] * 2))
        down.write()
        down.download()
        slow.walk()
        assert down.wait()[0].tolist() == [2 * number] * 6


@pytest.mark.parametrize("slow", [0], indirect=True)
def test_memory_is_lent_to_the_stream_that_did_not_make_it(slow):
    download = Download(torch.zeros(4), side_stream=True)
    assert {(id(tensor), id(stream)) for tensor, stream in slow.lent} == {
        (id(flight.snapshot), id(download._lane.side)) for flight in download._flights
    }
    slow.lent.clear()
    upload = Upload(HERE, side_stream=True)
    staged, out = upload.stage(torch.ones(4)), torch.zeros(4)
    upload.stage(torch.ones(4), out=out)
    assert [(id(tensor), id(stream)) for tensor, stream in slow.lent] == [
        (id(staged), id(slow.current)),
        (id(out), id(upload._lane.side)),
    ]


@pytest.mark.parametrize("broken", ["fork", "join", "synchronize"])
def test_the_slow_device_finds_what_is_missing(broken, monkeypatch):
    """The tests of order above have power: without one of the three waits, some order tears a value."""

    def torn(seed: int) -> bool:
        slow = SlowDevice(seed)
        monkeypatch.setattr(transfer, "Lane", partial(SlowLane, slow=slow))
        check = TestOrder()
        order = {
            "fork": check.test_upload_into_a_tensor_that_is_still_read,
            "join": check.test_upload_is_whole_wherever_the_current_stream_reads_it,
            "synchronize": check.test_download_sees_neither_later_writes_nor_half_copies,
        }
        try:
            order[broken](slow, True)
        except AssertionError:
            return True
        return False

    if broken == "synchronize":
        monkeypatch.setattr("slow_lane.Event.synchronize", lambda event: None)
    else:
        nothing = {"fork": lambda lane, current: lane.side, "join": lambda lane, current, arrived: None}
        monkeypatch.setattr(SlowLane, broken, nothing[broken])
    assert any(torn(seed) for seed in range(10))


class TestBlocksFilledInPlace:
    def test_what_is_written_arrives_and_stays(self):
        upload, sent = Upload("cpu", slots=2), []
        for turn in range(5):
            block = upload.block((2, 3), torch.float32)
            block.numpy()[:] = turn
            sent.append(upload.send(block))
        assert [tensor.unique().tolist() for tensor in sent] == [[0.0], [1.0], [2.0], [3.0], [4.0]]

    def test_out_is_written(self):
        upload, out = Upload("cpu"), torch.zeros(3, dtype=torch.int64)
        assert upload.send(upload.block((3,), torch.int64).fill_(7), out=out) is out
        assert out.tolist() == [7, 7, 7]

    def test_blocks_take_turns_and_grow(self):
        upload = Upload("cpu", slots=2, nbytes=4)
        blocks = [upload.block((size,), torch.float32) for size in (1, 9, 1)]
        addresses = [block.data_ptr() for block in blocks]
        assert addresses[0] == addresses[2] != addresses[1]

    def test_another_tensor_or_a_block_that_was_sent_is_refused(self):
        upload = Upload("cpu")
        with pytest.raises(ValueError, match="expected the block handed out last"):
            upload.send(torch.zeros(2))
        block = upload.block((2,), torch.float32).zero_()
        with pytest.raises(ValueError, match=r"expected out of shape \(2,\)"):
            upload.send(block, out=torch.zeros(3))
        upload.send(block)
        with pytest.raises(ValueError, match="has been sent"):
            upload.send(block)
