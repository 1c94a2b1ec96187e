"""The machine card is complete, JSON-ready, and never fails."""

import json
import subprocess
import sys

import pytest
import torch

from torchrl_perf.runtime import machine, machine_card

KEYS = {
    "command", "commit", "dirty", "date", "gpu", "gpus", "gpu_memory_gib", "power_limit_w", "driver", "cuda", "cpu",
    "cores", "ram_gib", "os", "python", "packages", "tf32", "threads",
}  # fmt: skip


def test_it_is_complete_and_json():
    card = machine_card()
    assert set(card) == KEYS
    assert json.loads(json.dumps(card)) == card
    assert card["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert card["packages"]["torchrl"]
    assert card["cores"] >= 1
    assert card["tf32"]["matmul_precision"] == torch.get_float32_matmul_precision()


def test_what_is_unknown_is_none(monkeypatch, tmp_path):
    def fails(*args, **kwargs):
        raise OSError("no such thing")

    monkeypatch.setattr(machine.subprocess, "run", fails)
    monkeypatch.setattr(machine.Path, "read_text", fails)
    monkeypatch.setattr(machine.os, "sysconf", fails)
    monkeypatch.setattr(torch, "get_num_threads", fails)
    card = machine_card()
    assert set(card) == KEYS
    assert card["commit"] is card["dirty"] is card["ram_gib"] is card["threads"] is None


def test_outside_a_checkout_there_is_no_commit(monkeypatch):
    done = subprocess.CompletedProcess([], 128, "", "fatal: not a git repository")
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **kwargs: done)
    card = machine_card()
    assert card["commit"] is card["dirty"] is None


def test_nvidia_smi_is_read(monkeypatch):
    monkeypatch.setattr(machine, "_nvml", lambda: None)
    monkeypatch.setattr(machine, "_run", lambda *command: "700.00, 570.12")
    assert machine._nvidia_smi() == {"power_limit_w": 700.0, "driver": "570.12"}
    monkeypatch.setattr(machine, "_run", lambda *command: "[N/A], 570.12")
    assert machine._nvidia_smi() == {"power_limit_w": None, "driver": "570.12"}


def test_importing_runtime_is_light():
    code = (
        "import sys, tensordict; before = set(sys.modules); import torchrl_perf.runtime; "  # which may have triton
        "print({'wandb', 'tyro', 'triton', 'matplotlib', 'jax'} & set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.gpu
def test_the_gpu_is_named():
    card = machine_card()
    assert card["gpu"] == torch.cuda.get_device_name()
    assert card["cuda"] == torch.version.cuda
    assert card["gpu_memory_gib"] > 1
