"""Copies under stress on CUDA: racing writes, reused slots, side streams, sources dropped at once, no hidden wait."""

import threading

import numpy as np
import pytest
import torch

from torchrl_perf.runtime import Download, PackedRecord, Upload

pytestmark = pytest.mark.gpu

SIZE = 1 << 17  # one megabyte of int64: tens of microseconds a copy, time enough to be torn
ROUNDS = 2000


def is_all(host: torch.Tensor, number: int) -> bool:
    """Whether each element of a host tensor is the number."""
    return bool((host == number).all())


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_downloads_beside_thousands_of_writes(slots, side_stream):
    source = torch.zeros(SIZE, dtype=torch.int64, device="cuda")
    download, expected = Download(source, slots=slots, side_stream=side_stream), []
    for number in range(1, ROUNDS + 1):
        source.fill_(number)
        if download.pending == slots:
            assert is_all(download.wait(), expected.pop(0))
        download.start(source)
        expected.append(number)
        source.fill_(-number)  # behind the copy, or beside it where it has a stream of its own
    while download.pending:
        assert is_all(download.wait(), expected.pop(0))


@pytest.mark.parametrize("side_stream", [False, True])
def test_source_deleted_right_after_start_and_its_memory_taken(side_stream):
    like = torch.zeros(SIZE, dtype=torch.int64, device="cuda")
    download = Download(like, slots=2, side_stream=side_stream)
    for number in range(1, 500):
        source = torch.full_like(like, number)
        download.start(source)
        del source
        taken = torch.full_like(like, -number)
        assert is_all(download.wait(), number)
        del taken


@pytest.mark.parametrize("side_stream", [False, True])
def test_download_dropped_under_way_gives_no_memory_away(side_stream):
    for number in range(1, 200):
        source = torch.full((SIZE,), number, dtype=torch.int64, device="cuda")
        dropped = Download(source, side_stream=side_stream)
        dropped.start(source)
        del dropped
        kept = Download(source, side_stream=side_stream)
        kept.start(source)
        assert is_all(kept.wait(), number)


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("as_array", [False, True])
def test_uploads_from_one_array_that_is_overwritten_at_once(slots, side_stream, as_array):
    upload = Upload("cuda", slots=slots, side_stream=side_stream)
    array = np.zeros(SIZE, np.int64)
    tensor = torch.from_numpy(array)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(1, ROUNDS // 2 + 1):
        array[:] = number
        staged = upload.stage(array if as_array else tensor)
        array[:] = -number
        wrong += (staged != number).sum()
        del staged  # its memory may be given away, but not before the sum has been taken
    assert wrong.item() == 0


@pytest.mark.parametrize("side_stream", [False, True])
def test_upload_into_a_static_tensor_behind_slow_readers(side_stream):
    upload, out = Upload("cuda", side_stream=side_stream), torch.zeros(SIZE, dtype=torch.int64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(1, 300):
        upload.stage(torch.full((SIZE,), number), out=out)
        torch.cuda._sleep(20_000)
        wrong += (out != number).sum()
    assert wrong.item() == 0


def test_both_ways_at_once_beside_a_busy_stream():
    upload = Upload("cuda", side_stream=True)
    download = Download(torch.zeros(SIZE, dtype=torch.int64, device="cuda"), slots=3, side_stream=True)
    work, expected = torch.randn(512, 512, device="cuda"), []
    for number in range(500):
        staged = upload.stage(np.full(SIZE, number))
        work = torch.tanh(work @ work)
        if download.pending == 3:
            assert is_all(download.wait(), expected.pop(0))
        download.start(staged.mul_(3).add_(1))
        expected.append(3 * number + 1)
    while download.pending:
        assert is_all(download.wait(), expected.pop(0))


def test_packed_records_beside_a_busy_stream():
    fields = [((SIZE,), torch.int64), ((7,), torch.bool)]
    up, down = PackedRecord(fields, torch.device("cuda")), PackedRecord(fields, torch.device("cuda"))
    for number in range(500):
        numbers, flags = up.write()
        numbers[:], flags[:] = number, number % 2
        up.upload()
        down.device_fields[0].copy_(up.device_fields[0] + 1)
        down.device_fields[1].copy_(up.device_fields[1])
        down.write()
        down.download()
        numbers, flags = down.wait()
        assert (numbers == number + 1).all()
        assert (flags == number % 2).all()


def test_each_thread_with_objects_of_its_own():
    failures = []

    def work(base: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            upload, like = Upload("cuda"), torch.zeros(SIZE, dtype=torch.int64, device="cuda")
            download = Download(like)
            for number in range(base, base + 200):
                download.start(upload.stage(np.full(SIZE, number)))
                if not is_all(download.wait(), number):
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_host_memory_is_page_locked_and_nothing_waits():
    source = torch.ones(SIZE, device="cuda")
    download, upload = Download(source), Upload("cuda", nbytes=4 * SIZE)
    array, out = np.ones(SIZE, np.float32), torch.empty(SIZE, device="cuda")
    assert all(flight.host.is_pinned() for flight in (*download._flights, *upload._flights))
    torch.cuda.set_sync_debug_mode("error")
    download.start(source)
    upload.stage(array)
    upload.stage(array, out=out)
    download.start(out.view(2, -1).T.reshape(-1))
    torch.cuda.set_sync_debug_mode("default")
    assert download.wait().sum() == SIZE


def test_the_host_goes_on_while_the_stream_is_busy():
    source = torch.ones(SIZE, device="cuda")
    download, upload = Download(source), Upload("cuda", nbytes=4 * SIZE)
    array = np.ones(SIZE, np.float32)
    upload.stage(array)  # so that there is cached memory: an allocation by the driver may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about a tenth of a second
    behind = torch.cuda.Event()
    download.start(source)
    upload.stage(array)
    behind.record()
    assert not behind.query()
    assert download.wait().sum() == SIZE


def test_the_device_itself_keeps_what_it_has():
    upload, value = Upload("cuda"), torch.ones(3, device="cuda", requires_grad=True)
    staged = upload.stage(value)
    assert (staged.data_ptr(), staged.requires_grad) == (value.data_ptr(), False)
    out = torch.zeros(3, device="cuda")
    assert upload.stage(value, out=out) is out
    assert out.tolist() == [1.0, 1.0, 1.0]


def test_captures_are_refused():
    source, upload = torch.ones(3, device="cuda"), Upload("cuda")
    download = Download(source)
    for copy in (lambda: download.start(source), lambda: upload.stage(torch.ones(3))):
        with (
            pytest.raises(RuntimeError, match="expected a stream that is not being captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            source.mul(2)  # an empty graph would be warned of
            copy()
    torch.cuda.synchronize()
    download.start(source)
    assert download.wait().tolist() == [1.0, 1.0, 1.0]
