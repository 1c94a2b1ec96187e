"""Checkpoint files are whole or absent and load as data only; their folder keeps the newest and the best."""

import errno
import os
import pickle
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from tiny_runs import in_use

from torchrl_perf.runtime import files
from torchrl_perf.runtime.files import CheckpointError, FolderLock, load_checkpoint, save_checkpoint, write_text
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, read_checkpoint
from torchrl_perf.trainers.run.state import TrainState

STATE = {"weights": torch.arange(1000.0), "step": 7, "nested": {"flag": True, "list": [1, 2.5, None, "a"]}}


def valid(value=0.0):
    """A state that a folder takes."""
    return TrainState(net=torch.nn.Linear(2, 2), counters={"value": value}).snapshot()


class TestFiles:
    def test_round_trip(self, tmp_path):
        path = save_checkpoint(STATE, tmp_path / "new" / "folder" / "checkpoint.pt")
        loaded = load_checkpoint(path)
        assert torch.equal(loaded["weights"], STATE["weights"])
        assert loaded["nested"] == STATE["nested"]
        assert os.listdir(path.parent) == ["checkpoint.pt"]

    @pytest.mark.parametrize("at", ["save", "fsync", "replace"])
    def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(self, tmp_path, monkeypatch, at):
        path = save_checkpoint({"step": 1}, tmp_path / "checkpoint.pt")

        def fails(*args):
            if at == "save":
                args[1].write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch if at == "save" else os, at, fails)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint({"step": 2}, path)
        monkeypatch.undo()
        assert load_checkpoint(path)["step"] == 1
        assert os.listdir(tmp_path) == ["checkpoint.pt"]

    def test_torchs_own_error_is_told_as_the_disks(self, tmp_path, monkeypatch):
        def fails(state, file):
            try:
                raise OSError(28, "No space left on device")
            except OSError as error:
                raise RuntimeError("PytorchStreamWriter failed") from error

        monkeypatch.setattr(torch, "save", fails)
        with pytest.raises(OSError, match="No space left on device"):
            save_checkpoint({}, tmp_path / "checkpoint.pt")

    def test_the_file_is_on_disk_before_its_name_and_the_name_before_the_return(self, tmp_path, monkeypatch):
        calls = []
        for name in ("fsync", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
        save_checkpoint({}, tmp_path / "checkpoint.pt")
        assert calls == ["fsync", "replace", "fsync"]

    def test_a_missing_file_is_named_with_what_lies_beside_it(self, tmp_path):
        (tmp_path / "config.json").touch()
        with pytest.raises(FileNotFoundError, match=r"checkpoint.pt, received \['config.json'\]. Remedy"):
            load_checkpoint(tmp_path / "checkpoint.pt")
        with pytest.raises(FileNotFoundError, match="no such folder"):
            load_checkpoint(tmp_path / "nowhere" / "checkpoint.pt")

    @pytest.mark.parametrize("length", [0, 10, 2000])
    def test_a_file_that_is_cut_off_is_told(self, tmp_path, length):
        path = save_checkpoint(STATE, tmp_path / "checkpoint.pt")
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(CheckpointError, match=rf"a whole file .*, received {length} bytes .* Remedy"):
            load_checkpoint(path)

    def test_a_flipped_bit_is_told(self, tmp_path):
        path = save_checkpoint(STATE, tmp_path / "checkpoint.pt")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1  # in the weights: torch would load it
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"damaged in .*data/0. Remedy"):
            load_checkpoint(path)

    def test_other_zip_files_are_told(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "checkpoint.pt", "w") as file:
            file.writestr("a.txt", "text")
        with pytest.raises(CheckpointError, match=r"cannot be read.* Remedy"):
            load_checkpoint(tmp_path / "checkpoint.pt")

    @pytest.mark.parametrize(
        "pickled",
        [
            b"",
            b".",
            b"\xff\xfe",
            b"\x80\x02h\x05.",
            b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
            b"\x80\x02K\x01Q.",
            b"\x80\x02(X\x07\x00\x00\x00storageK\x01X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ.",
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01tR.",
        ],
        ids=["empty", "no value", "no pickle", "no memo", "no UTF-8", "no id", "no storage", "no arguments"],
    )
    def test_whatever_reading_raises_is_told(self, tmp_path, pickled):
        """Broken in ways that make torch raise IndexError, UnicodeDecodeError, AssertionError, TypeError and more."""
        with zipfile.ZipFile(tmp_path / "000000002.pt", "w") as file:
            for name, content in {"data.pkl": pickled, "version": b"3", "byteorder": b"little"}.items():
                file.writestr(f"archive/{name}", content)
        with pytest.raises(CheckpointError, match="Remedy"):
            load_checkpoint(tmp_path / "000000002.pt")
        folder = CheckpointFolder(tmp_path)
        folder.write(valid(1.0), 1)
        assert folder.load_newest()[0].name == "000000001.pt"

    def test_a_damaged_table_of_contents_is_told(self, tmp_path):
        path = save_checkpoint(STATE, tmp_path / "checkpoint.pt")
        content = bytearray(path.read_bytes())
        content[content.rfind(b"PK\x01\x02") + 6] = 251  # a version of zip that nobody reads
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"damaged in its table .* Remedy"):
            load_checkpoint(path)

    @pytest.mark.parametrize("wrap", ["torch", "pickle"])
    def test_code_is_not_executed(self, tmp_path, wrap):
        class Evil:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "pwned"),))

        path = tmp_path / "checkpoint.pt"
        if wrap == "torch":
            torch.save({**valid(), "evil": Evil()}, path)
        else:
            path.write_bytes(pickle.dumps(Evil()))
        with pytest.raises(CheckpointError, match=r"executed none of it|something else"):
            load_checkpoint(path)
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.parametrize("value", [np.zeros(2), np.float64(1.0), object(), {"a": [np.int64(3)]}])
    def test_what_could_not_be_loaded_is_not_written(self, tmp_path, value):
        with pytest.raises(CheckpointError, match=r"received \w+\.\w+ at /part/x.* Remedy"):
            save_checkpoint({"part": {"x": value}}, tmp_path / "checkpoint.pt")
        assert os.listdir(tmp_path) == []

    def test_text(self, tmp_path):
        write_text(tmp_path / "a.json", "é")
        write_text(tmp_path / "a.json", "ü", lasting=False)
        assert (tmp_path / "a.json").read_text(encoding="utf-8") == "ü"
        assert os.listdir(tmp_path) == ["a.json"]


class TestLock:
    def test_a_second_process_is_kept_out_until_the_first_ends(self, tmp_path):
        with in_use(tmp_path):
            assert not FolderLock(tmp_path).acquire()
        lock = FolderLock(tmp_path)
        assert lock.acquire()
        lock.release()
        lock.release()

    def test_without_locks_of_the_file_system(self, tmp_path, monkeypatch):
        fcntl = pytest.importorskip("fcntl")
        monkeypatch.setattr(fcntl, "lockf", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available")))
        assert FolderLock(tmp_path).acquire()


class TestFolder:
    def test_the_newest_are_kept(self, tmp_path):
        folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
        for iteration in (3, 6, 9, 1000):
            folder.write(valid(float(iteration)), iteration)
        assert [path.name for path in folder.files()] == ["000001000.pt", "000000009.pt"]
        path, state = folder.load_newest()
        assert (path.name, state["counters"]["value"]) == ("000001000.pt", 1000.0)

    def test_the_best_outlives_its_number(self, tmp_path):
        folder = CheckpointFolder(tmp_path, keep=1)
        for iteration in (1, 2, 3):
            folder.write(valid(float(iteration)), iteration)
            if iteration == 2:
                folder.mark_best(2)
                folder.mark_best(2)
                assert folder.best.samefile(tmp_path / "000000002.pt")
        assert sorted(os.listdir(tmp_path)) == ["000000003.pt", "best.pt"]
        assert read_checkpoint(folder.best)["counters"]["value"] == 2.0
        folder.mark_best(1)  # gone
        assert read_checkpoint(folder.best)["counters"]["value"] == 2.0

    def test_the_best_without_hard_links(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "link", lambda *a: (_ for _ in ()).throw(OSError(1, "not permitted")))
        folder = CheckpointFolder(tmp_path)
        folder.write(valid(5.0), 1)
        folder.mark_best(1)
        assert read_checkpoint(folder.best)["counters"]["value"] == 5.0

    @pytest.mark.parametrize("damage", ["cut off", "empty", "foreign", "version", "algorithm", "code"])
    def test_the_next_older_one_is_taken_with_a_message(self, tmp_path, caplog, damage):
        folder = CheckpointFolder(tmp_path)
        folder.write({**valid(1.0), "made_by": {"algorithm": "ppo"}}, 1)
        newest = folder.write({**valid(2.0), "made_by": {"algorithm": "ppo"}}, 2)
        if damage == "cut off":
            newest.write_bytes(newest.read_bytes()[:-100])
        elif damage == "empty":
            newest.write_bytes(b"")
        elif damage == "foreign":
            save_checkpoint({"model": torch.zeros(2)}, newest)
        elif damage == "code":
            torch.save({"a": os.getcwd}, newest)
        else:
            changes = {"version": {"version": 99}, "algorithm": {"made_by": {"algorithm": "dqn"}}}
            save_checkpoint({**valid(), **changes[damage]}, newest)
        path, state = folder.load_newest(made_by="ppo")
        assert (path.name, state["counters"]["value"]) == ("000000001.pt", 1.0)
        assert "000000002.pt is left out" in caplog.text
        assert "Remedy" in caplog.text

    def test_no_sound_one_and_none_at_all(self, tmp_path):
        folder = CheckpointFolder(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"expected files <iteration>.pt in .*, received \[\]. Remedy"):
            folder.load_newest()
        folder.write(valid(), 1).write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"000000001.pt.* to be readable, received"):
            folder.load_newest()

    def test_later_ones_of_a_run_that_was_left_are_set_aside(self, tmp_path):
        folder = CheckpointFolder(tmp_path)
        for iteration in (2, 4, 6):
            folder.write(valid(), iteration)
        folder.write(valid(), 3)
        assert [path.name for path in folder.files()] == ["000000003.pt", "000000002.pt"]
        aside = sorted(path.name for path in tmp_path.glob("*.set-aside"))
        assert aside == ["000000004.pt.set-aside", "000000006.pt.set-aside"]

    def test_a_save_that_fails_leaves_the_later_ones(self, tmp_path, monkeypatch):
        """As when a run goes on from its best checkpoint, whose number is gone, and the disk is full."""
        folder = CheckpointFolder(tmp_path)
        for iteration in (6, 8):
            folder.write(valid(), iteration)
        monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            folder.write(valid(), 3)
        assert sorted(os.listdir(tmp_path)) == ["000000006.pt", "000000008.pt"]

    def test_keep_of_none(self, tmp_path):
        with pytest.raises(ValueError, match="keep: expected a positive number of checkpoints, received 0"):
            CheckpointFolder(tmp_path, keep=0)


def mounted(folder, options):
    """Mounts a small file system, or skips the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a file system")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    mounted(folder, "size=256k")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)


class TestFullDisk:
    def test_the_earlier_one_stays_and_no_half_is_left(self, small_disk):
        folder = CheckpointFolder(small_disk)
        folder.write({**valid(), "notes": {"weights": torch.zeros(30_000)}}, 1)
        with pytest.raises(OSError, match="No space left on device"):
            folder.write({**valid(), "notes": {"weights": torch.zeros(60_000)}}, 2)
        assert os.listdir(small_disk) == ["000000001.pt"]
        assert folder.load_newest()[0].name == "000000001.pt"

    def test_a_read_only_folder(self, small_disk):
        folder = CheckpointFolder(small_disk)
        folder.write(valid(), 1)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            folder.write(valid(), 2)
        assert folder.load_newest()[0].name == "000000001.pt"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(number, "not here")))
    files.sync_folder(tmp_path)
