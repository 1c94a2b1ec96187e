"""The cores and memory that a container or job may use, read from control groups of both versions."""

import pytest
import torch

from torchrl_perf.replay.memory import available_bytes
from torchrl_perf.runtime import cgroup

V2, V1 = "0::/job/step\n", "4:memory:/job/step\n3:cpu,cpuacct:/job\n1:name=systemd:/\n"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes the files of control groups."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "self")

    def write(membership, files):
        (tmp_path / "self").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2, {"cpu.max": "max 100000"}, None),
        (V2, {"cpu.max": "150000 100000"}, 1.5),
        (V2, {"cpu.max": "400000 100000", "job/cpu.max": "max 100000", "job/step/cpu.max": "50000 100000"}, 0.5),
        (V1, {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V2, {}, None),
        ("nonsense", {}, None),
    ],
)
def test_quota(groups, membership, files, expected):
    groups(membership, files)
    assert cgroup.cpu_quota() == expected


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2, {"memory.max": "max", "memory.current": "5", "memory.stat": ""}, None),
        (V2, {"memory.max": "100", "memory.current": "60", "memory.stat": "anon 50\ninactive_file 7\n"}, 47),
        (
            V2,  # the narrowest of the group and those above it counts
            {
                **{"memory.max": "100", "memory.current": "60", "memory.stat": ""},
                **{"job/step/memory.max": "50", "job/step/memory.current": "45", "job/step/memory.stat": ""},
            },
            5,
        ),
        (V2, {"memory.max": "100", "memory.current": "160", "memory.stat": ""}, 0),
        (
            V1,
            {
                "memory/job/memory.limit_in_bytes": "80",
                "memory/job/memory.usage_in_bytes": "30",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 10\n",
            },
            60,
        ),
        (
            V1,
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "30",
                "memory/memory.stat": "",
            },
            None,
        ),
        ("nonsense", {}, None),
    ],
)
def test_memory(groups, membership, files, expected):
    groups(membership, files)
    assert cgroup.memory_left() == expected


def test_without_control_groups(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "none")
    assert cgroup.cpu_quota() is None and cgroup.memory_left() is None


def test_a_limit_bounds_what_a_buffer_or_a_run_may_take(groups):
    """Beyond it the kernel kills the process, however much the machine has."""
    groups(V2, {"memory.max": str(3 << 20), "memory.current": str(1 << 20), "memory.stat": ""})
    assert available_bytes(torch.device("cpu")) == 2 << 20
