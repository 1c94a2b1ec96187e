"""Checkpoints are whole or absent, load as data only, and carry the random state."""

import os

import pytest
import torch

from torchrl_perf.trainers.checkpoint import (
    check_modules,
    load_checkpoint,
    load_random_state,
    random_state,
    save_checkpoint,
)


def test_round_trip(tmp_path):
    state = {"weights": torch.arange(3.0), "step": 7, "nested": {"flag": True, "list": [1, 2]}}
    path = save_checkpoint(state, tmp_path / "new" / "folder" / "checkpoint.pt")
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.pop("weights"), state.pop("weights"))
    assert loaded == state
    assert os.listdir(path.parent) == ["checkpoint.pt"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = save_checkpoint({"step": 1}, tmp_path / "checkpoint.pt")

    def fails(state, file):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint({"step": 2}, path)
    assert load_checkpoint(path)["step"] == 1


def test_a_missing_file_is_named_with_what_lies_beside_it(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(FileNotFoundError, match=r"checkpoint.pt, found \['config.json'\]. Remedy"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_checkpoint(tmp_path / "nowhere" / "checkpoint.pt")


def test_a_file_that_is_cut_off_is_told(tmp_path):
    path = save_checkpoint({"weights": torch.zeros(1000)}, tmp_path / "checkpoint.pt")
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"expected a whole file of torch.save at .*, received 2000 bytes .* Remedy"):
        load_checkpoint(path)


def test_other_networks_are_told():
    parts = {"policy": torch.nn.Linear(2, 3), "optimizer": object()}
    check_modules(parts, {"policy": torch.nn.Linear(2, 3).state_dict(), "optimizer": {}})
    with pytest.raises(ValueError, match=r"in policy bias: \[3\], received \[4\], weight: .* Nothing was changed"):
        check_modules(parts, {"policy": torch.nn.Linear(2, 4).state_dict()})


def test_code_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "pwned"),))

    torch.save({"evil": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "pwned").exists()


def test_random_state(device):
    state = random_state(device)
    first = torch.rand(3), torch.rand(3, device=device)
    load_random_state(state, device)
    assert torch.equal(torch.rand(3), first[0])
    assert torch.equal(torch.rand(3, device=device), first[1])
