"""The launch of kernels: Triton's own way the first time, and again for what it would compile anew."""

from typing import Any

import pytest
import torch
from interpreted import tries_kernels

from torchrl_perf.kernels import launch as module


class Compiled:
    """What Triton returns of a launch: it is launched with every argument, constants too."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.calls.append(("compiled", grid, args))


class Kernel:
    """A kernel that notes how it is launched."""

    arg_names = ("source_ptr", "rows", "eps", "WIDTH", "BLOCK")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: Any, **constants: Any) -> Compiled:
            self.calls.append(("triton", grid, args, constants))
            return Compiled(self.calls)

        return first


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "_VARIANTS", {})
    return Kernel()


def test_the_second_launch_is_of_what_was_compiled(kernel: Kernel):
    source = torch.zeros(64)
    for rows in (32, 48):
        module.launch(kernel, (3,), (source, rows, 0.5), {"BLOCK": 128, "WIDTH": 7}, num_warps=4)
    first, second = kernel.calls
    assert first == ("triton", (3,), (source, 32, 0.5), {"BLOCK": 128, "WIDTH": 7, "num_warps": 4})
    assert second == ("compiled", (3, 1, 1), (source, 48, 0.5, 7, 128))  # constants in the order of the arguments


@pytest.mark.parametrize(
    "args",
    [
        (torch.zeros(64)[1:], 32, 0.5),  # 4 bytes off
        (torch.zeros(64, dtype=torch.int32), 32, 0.5),
        (torch.zeros(64), 1, 0.5),
        (torch.zeros(64), 33, 0.5),
        (torch.zeros(64), 2**31, 0.5),
        (torch.zeros(64), 32, 2),
        (torch.zeros(64), (torch.zeros(32),), 0.5),
    ],
    ids=["alignment", "dtype", "one", "no multiple of 16", "wide", "float or int", "tuple of tensors"],
)
def test_other_assumptions_are_compiled_anew(kernel: Kernel, args: tuple[Any, ...]):
    module.launch(kernel, (1,), (torch.zeros(64), 32, 0.5), {"WIDTH": 7, "BLOCK": 128})
    module.launch(kernel, (1,), args, {"WIDTH": 7, "BLOCK": 128})
    assert [call[0] for call in kernel.calls] == ["triton", "triton"]


@pytest.mark.parametrize(("constants", "options"), [({"WIDTH": 8, "BLOCK": 128}, {}), ({}, {"num_warps": 2})], ids=str)
def test_other_constants_and_options_are_compiled_anew(kernel: Kernel, constants: Any, options: Any):
    args, given = (torch.zeros(64), 32, 0.5), {"WIDTH": 7, "BLOCK": 128}
    module.launch(kernel, (1,), args, given, num_warps=4)
    module.launch(kernel, (1,), args, given | constants, **({"num_warps": 4} | options))
    assert [call[0] for call in kernel.calls] == ["triton", "triton"]


def test_kernels_do_not_share_variants(kernel: Kernel):
    other = Kernel()
    for launched in (kernel, other):
        module.launch(launched, (1,), (torch.zeros(64), 32, 0.5), {"WIDTH": 7, "BLOCK": 128})
    assert [call[0] for call in kernel.calls + other.calls] == ["triton", "triton"]


@tries_kernels
def test_the_assumptions_are_tritons():
    """Two calls that Triton tells apart are told apart here, for every pair of arguments."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    values: list[Any] = [0, 1, 2, 15, 16, 17, -1, 2**31 - 1, 2**31, 2**40, 0.5, 1.0]
    values += [torch.zeros(64, dtype=dtype)[first:] for dtype in (torch.float32, torch.int64) for first in (0, 1, 4)]
    for a in values:
        for b in values:
            theirs = [native_specialize_impl(BaseBackend, value, False, True, True) for value in (a, b)]
            if theirs[0] != theirs[1]:
                assert module.assumptions((a,)) != module.assumptions((b,)), (a, b)
