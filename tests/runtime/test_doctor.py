"""The checks before a run: each verdict is brought about, and none of them ever raises."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from torchrl_perf.runtime.doctor import check_machine
from torchrl_perf.runtime.doctor import (
    checks as doctor_checks,
)
from torchrl_perf.runtime.doctor import (
    device as doctor_device,
)
from torchrl_perf.runtime.doctor import (
    host as doctor_host,
)
from torchrl_perf.runtime.doctor import (
    software as doctor_software,
)
from torchrl_perf.runtime.doctor.checks import Check, Finding, format_checks, run_checks, worst

GIB = 2**30
NAMES = {
    "python", "torch", "torchrl", "tensordict", "torchrl/tensordict", "other packages", "C++ extension", "compiler",
    "CUDA", "GPU", "TF32", "bf16", "CUDA graph", "GPU memory", "GPU in use", "power limit", "pinned memory",
    "CPU", "memory", "disk", "W&B",
}  # fmt: skip


def raising(error):
    """A function that raises whatever it is called with."""

    def call(*args, **kwargs):
        raise error

    return call


class TestReport:
    def test_a_check_that_raises_is_a_warning_of_one_line(self):
        (check,) = run_checks({"x": raising(RuntimeError("first line\nsecond line"))})
        assert check.verdict == "warn"
        assert check.found == "could not be checked: RuntimeError: first line."

    @pytest.mark.parametrize(
        ("verdicts", "expected"),
        [([], "ok"), (["n/a"], "ok"), (["ok", "n/a"], "ok"), (["ok", "warn"], "warn"), (["fail", "warn"], "fail")],
    )
    def test_the_worst_verdict_counts(self, verdicts, expected):
        assert worst([Check("x", verdict, "y") for verdict in verdicts]) == expected

    def test_lines(self):
        text = format_checks([Check("disk", "fail", "0.1 GiB free.", "free some."), Check("CPU", "ok", "2 cores.")])
        assert text.splitlines() == [
            "fail  disk                0.1 GiB free. Remedy: free some.",
            "ok    CPU                 2 cores.",
            "fail: 1 ok, 0 warn, 1 fail, 0 n/a",
        ]

    def test_long_errors_are_shortened(self):
        assert len(doctor_checks.short_error(ValueError("x" * 1000))) < 200
        assert doctor_checks.short_error(KeyError()) == "KeyError"


def test_this_machine_is_checked_whole(tmp_path):
    checks = {check.name: check for check in check_machine(str(tmp_path / "runs"))}
    assert set(checks) == NAMES
    assert not [check for check in checks.values() if "could not be checked" in check.found]
    assert checks["torch"].verdict == checks["torchrl/tensordict"].verdict == "ok"
    assert not (tmp_path / "runs").exists()
    for check in checks.values():
        assert check.found.endswith(".")
        assert "\n" not in str(check)
        assert check.remedy or check.verdict in ("ok", "n/a")


class TestSoftware:
    def find(self, name):
        (check,) = run_checks({name: doctor_software.software_probes()[name]})
        return check

    def test_a_version_out_of_range(self, monkeypatch):
        monkeypatch.setattr(doctor_software, "version", lambda name: "0.13.1")
        check = self.find("torchrl")
        assert (check.verdict, check.found) == ("fail", "0.13.1, outside of <0.15,>=0.14.")
        assert check.remedy == 'pip install "torchrl<0.15,>=0.14"'

    def test_a_package_that_is_missing(self, monkeypatch):
        monkeypatch.setattr(doctor_software, "version", lambda name: None)
        assert self.find("tensordict").found == "not installed."
        assert self.find("other packages").verdict == "fail"
        assert self.find("torchrl/tensordict").verdict == "n/a"
        assert self.find("C++ extension").verdict == "n/a"

    def test_a_package_that_does_not_import(self, monkeypatch):
        monkeypatch.setattr(importlib, "import_module", raising(ImportError("no libtorch")))
        check = self.find("torch")
        assert check.verdict == "fail"
        assert "ImportError: no libtorch" in check.found

    def test_a_pair_that_does_not_fit(self, monkeypatch):
        versions = {"torchrl": "0.14.1", "tensordict": "0.13.0"}
        monkeypatch.setattr(doctor_software, "version", versions.get)
        check = self.find("torchrl/tensordict")
        assert check.verdict == "fail"
        assert "tensordict 0.13.0" not in check.found
        assert "0.13.0 is there" in check.found

    def test_without_metadata_the_ranges_are_known(self, monkeypatch):
        missing = raising(importlib.metadata.PackageNotFoundError("torchrl_perf"))
        monkeypatch.setattr(importlib.metadata, "requires", missing)
        assert doctor_software.required_range("torchrl") == "<0.15,>=0.14"
        assert doctor_software.required_range("wandb") is None

    @pytest.mark.parametrize(
        ("version", "bounds", "expected"),
        [("2.13.0+cpu", ">=2.11", True), ("2.12.0.dev20260101", ">=2.11", True), ("2.10.1", ">=2.11", False),
         ("0.15.0", ">=0.14,<0.15", False), ("1.0", None, True)],
    )  # fmt: skip
    def test_ranges(self, version, bounds, expected):
        assert doctor_software.is_within(version, bounds) is expected

    def test_the_extension(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchrl._torchrl", SimpleNamespace(SumSegmentTreeFp32=1))
        assert self.find("C++ extension").found == "loads; priority trees on the CPU only."
        real = importlib.import_module
        broken = ImportError("undefined symbol: _ZN5torch8autograd")
        monkeypatch.setattr(
            importlib, "import_module", lambda name: real(name) if name != "torchrl._torchrl" else raising(broken)()
        )
        check = self.find("C++ extension")
        assert check.verdict == "warn"
        assert "PrioritizedSampler" in check.found
        assert "_ZN5" not in check.found
        assert "DevicePrioritizedSampler" in check.remedy

    def test_no_compiler(self, monkeypatch):
        monkeypatch.setattr(doctor_software.shutil, "which", lambda name: None)
        assert self.find("compiler").verdict == ("fail" if torch.cuda.is_available() else "warn")


class TestHost:
    def find(self, name, run_dir="runs"):
        (check,) = run_checks({name: doctor_host.host_probes(run_dir)[name]})
        return check

    def test_more_threads_than_cores(self, monkeypatch):
        monkeypatch.setattr(doctor_host, "usable_cores", lambda: 2)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
        check = self.find("CPU")
        assert check.verdict == "warn"
        assert "OMP_NUM_THREADS=2" in check.remedy

    def test_a_quota_bounds_the_cores(self, monkeypatch):
        monkeypatch.setattr(doctor_host.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
        monkeypatch.setattr(doctor_host, "cpu_quota", lambda: 3.5)
        assert doctor_host.usable_cores() == 4
        monkeypatch.setattr(doctor_host, "cpu_quota", lambda: None)
        assert doctor_host.usable_cores() == 64

    @pytest.mark.parametrize(("left", "verdict"), [(None, "ok"), (8, "ok"), (3, "warn")])
    def test_a_container_that_may_take_less_than_there_is(self, monkeypatch, left, verdict):
        text = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n"
        monkeypatch.setattr(doctor_host.Path, "read_text", lambda path: text)
        monkeypatch.setattr(doctor_host, "memory_left", lambda: None if left is None else left * GIB)
        check = self.find("memory")
        assert check.verdict == verdict and "32.0 of 64.0 GiB" in check.found
        assert ("to this container" in check.found) == (left is not None)

    @pytest.mark.parametrize(("free", "expected"), [(100, "ok"), (2, "warn"), (0.1, "fail")])
    def test_space(self, monkeypatch, tmp_path, free, expected):
        monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda path: SimpleNamespace(free=free * GIB))
        check = self.find("disk", str(tmp_path / "not" / "there"))
        assert check.verdict == expected
        assert str(tmp_path) in check.found

    def test_a_folder_that_cannot_be_written_to(self, monkeypatch, tmp_path):
        monkeypatch.setattr(doctor_host.os, "access", lambda path, mode: False)
        assert self.find("disk", str(tmp_path)).verdict == "fail"
        file = tmp_path / "file"
        file.touch()
        assert "is a file" in self.find("disk", str(file)).found

    @pytest.mark.parametrize(
        ("mode", "key", "verdict", "words"),
        [
            (None, None, "ok", "offline, no key"),
            (None, "secret", "ok", "online, a key is set"),
            ("offline", "secret", "ok", "WANDB_MODE=offline"),
            ("online", None, "warn", "no key"),
            ("sometimes", None, "warn", "is no mode"),
        ],
    )
    def test_wandb(self, monkeypatch, tmp_path, mode, key, verdict, words):
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        for name, value in (("WANDB_MODE", mode), ("WANDB_API_KEY", key)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        check = self.find("W&B")
        assert check.verdict == verdict
        assert words in check.found
        assert "secret" not in str(check)


class Card(SimpleNamespace):
    """A card to stand for CUDA where there is none."""


@pytest.fixture
def card(monkeypatch):
    """A machine with one H100; its attributes may be changed."""
    card = Card(free=70, total=80, facts={}, reading={}, arch=["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free * GIB, card.total * GIB))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: card.arch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(name="H100", total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    class Reader:
        def __init__(self, device, environ=None): ...

        def __enter__(self):
            return SimpleNamespace(read=lambda: card.reading, facts=lambda: card.facts)

        def __exit__(self, *exception): ...

    monkeypatch.setattr(doctor_device, "GpuReader", Reader)
    return card


class TestDevice:
    def find(self, name, device="cuda"):
        (check,) = run_checks({name: doctor_device.device_probes(device)[name]})
        return check

    @pytest.mark.parametrize(("free", "expected"), [(70, "ok"), (30, "warn"), (0.5, "fail")])
    def test_free_memory(self, card, free, expected):
        card.free = free
        assert self.find("GPU memory").verdict == expected

    @pytest.mark.parametrize(
        ("facts", "expected"),
        [
            ({}, "n/a"),
            ({"power_limit_w": 700.0, "power_default_w": 700.0, "power_max_w": 700.0}, "ok"),
            ({"power_limit_w": 500.0, "power_default_w": 700.0}, "warn"),
        ],
    )
    def test_power(self, card, facts, expected):
        card.facts = facts
        assert self.find("power limit").verdict == expected

    @pytest.mark.parametrize(
        ("reading", "expected"), [({}, "n/a"), ({"gpu/utilization": 0.0}, "ok"), ({"gpu/utilization": 90.0}, "warn")]
    )
    def test_another_user(self, card, reading, expected):
        card.reading = reading
        assert self.find("GPU in use").verdict == expected

    @pytest.mark.parametrize(
        ("arch", "expected"),
        [
            (["sm_90"], "ok"),
            (["sm_80", "compute_80"], "ok"),
            (["sm_70", "sm_80"], "fail"),
            (["sm_90a"], "ok"),
            (["sm_100", "compute_100"], "fail"),
            ([], "ok"),
        ],
    )
    def test_what_torch_was_built_for(self, card, arch, expected):
        card.arch = arch
        assert self.find("GPU").verdict == expected

    def test_a_device_that_is_not_there(self, card):
        assert self.find("GPU", "cuda:3").found == "cuda:3 is not there, 1 visible."

    def test_tf32_apis_that_disagree(self, card, monkeypatch):
        assert self.find("TF32").verdict == "ok"
        monkeypatch.setattr(torch, "get_float32_matmul_precision", raising(RuntimeError("mix of the legacy and new")))
        check = self.find("TF32")
        assert check.verdict == "warn"
        assert "mix of the legacy and new" in check.found

    def test_bf16(self, card, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
        assert self.find("bf16").verdict == "warn"

    def test_memory_that_cannot_be_pinned(self, card, monkeypatch):
        monkeypatch.setattr(torch, "empty", raising(RuntimeError("CUDA error: out of memory")))
        assert self.find("pinned memory").verdict == "fail"

    @pytest.mark.parametrize(
        ("available", "facts", "built", "verdict", "words"),
        [
            (False, {}, None, "n/a", "torch built without CUDA, no NVIDIA driver"),
            (False, {"name": "H100", "driver": "570"}, None, "fail", "torch is built without CUDA"),
            (False, {"name": "H100", "cuda_driver": "12.4"}, "13.0", "fail", "runs CUDA up to 12.4"),
            (False, {"name": "H100", "cuda_driver": "13.0"}, "13.0", "fail", "torch sees none of it"),
            (True, {"driver": "570", "cuda_driver": "12.8"}, "12.8", "ok", "torch built for CUDA 12.8"),
            (True, {"driver": "550", "cuda_driver": "12.4"}, "12.8", "warn", "up to 12.4"),
        ],
    )
    def test_driver_and_build(self, card, monkeypatch, available, facts, built, verdict, words):
        card.facts = facts
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError("no device")))
        check = self.find("CUDA")
        assert check.verdict == verdict
        assert words in check.found

    def test_a_capture_that_fails(self, card, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device", raising(RuntimeError("operation not permitted")))
        check = self.find("CUDA graph")
        assert (check.verdict, check.found) == ("fail", "capture fails (RuntimeError: operation not permitted).")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["CUDA", "GPU", "TF32", "bf16", "CUDA graph", "pinned memory"])
def test_a_real_gpu_passes(name):
    (check,) = run_checks({name: doctor_device.device_probes()[name]})
    assert check.verdict in ("ok", "warn"), str(check)


def test_findings_have_four_verdicts():
    assert set(doctor_checks.SEVERITY) == {"ok", "warn", "fail", "n/a"}
    assert Finding("ok", "x").remedy == ""
