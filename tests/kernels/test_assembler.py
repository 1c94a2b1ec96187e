"""Kernels for Hopper are assembled by a ptxas that makes right descriptors of matrix products."""

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from torchrl_perf.kernels import assembler, launch


@pytest.fixture(params=[(9, 0), (8, 0), (10, 0)], ids=["Hopper", "Ampere", "Blackwell"])
def capability(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return request.param


def kernel():
    """One that notes what it is compiled with, and no other kernel's variant."""
    seen = []

    class Kernel:
        arg_names = ("x", "A")

        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((triton.knobs.nvidia.ptxas.version, options))

    return Kernel(), seen


def test_a_kernel_is_compiled_with_the_newer_one_that_triton_brings(capability):
    usual, path = triton.knobs.nvidia.ptxas, os.environ.get("TRITON_PTXAS_PATH")
    compiled, seen = kernel()
    launch._first(compiled, (1,), (torch.empty(4),), {"A": 3}, {"num_warps": 4}, 0)
    ((version, options),) = seen
    is_old = assembler._version(usual) < assembler.LEAST
    assert options == {"A": 3, "num_warps": 4} | ({"ptx_version": 88} if is_old and capability == (9, 0) else {})
    assert assembler._version(SimpleNamespace(version=version)) >= assembler.LEAST or capability != (9, 0)
    assert triton.knobs.nvidia.ptxas == usual
    assert os.environ.get("TRITON_PTXAS_PATH") == path


def test_hopper_is_refused_with_old_ones_alone(capability, monkeypatch):
    old = SimpleNamespace(version="12.8", path="/cuda-12.8/ptxas")
    monkeypatch.setattr(triton.knobs, "nvidia", SimpleNamespace(ptxas=old, ptxas_blackwell=old))
    if capability == (9, 0):
        with pytest.raises(RuntimeError, match=r"expected ptxas 12\.9 .*received 12\.8 .*Remedy: set TRITON_"):
            assembler.sound_assembler(0).__enter__()
    else:
        with assembler.sound_assembler(0) as options:
            assert options == {}


def test_a_newer_one_that_is_set_stays(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    newer = SimpleNamespace(version="13.0", path="/cuda-13.0/ptxas")
    monkeypatch.setattr(triton.knobs, "nvidia", SimpleNamespace(ptxas=newer))
    with assembler.sound_assembler(0) as options:
        assert options == {}
        assert triton.knobs.nvidia.ptxas is newer
