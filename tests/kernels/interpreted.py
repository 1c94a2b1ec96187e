"""Where kernels can be tried: on CUDA, else on a CPU by Triton's interpreter."""

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


def tries_kernels(test: Callable[..., Any]) -> Any:
    """Marks a test of kernels: it needs CUDA, or TRITON_INTERPRET=1 in the environment (Triton reads it at import)."""
    return test if os.environ.get("TRITON_INTERPRET") == "1" else pytest.mark.gpu(test)


def kernel_device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gluon_kernels(name: str) -> ModuleType:
    """A module of kernels in Triton's Gluon, which has no interpreter: there it is given Triton's language.

    Layouts mean nothing there, shared memory is a variable, and float16 operands stay float32, so that values are those
    of float32 arithmetic. On CUDA it is the module itself.
    """
    path = f"torchrl_perf.kernels.{name}"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return importlib.import_module(path)
    import triton.experimental
    import triton.language as tl

    with pytest.MonkeyPatch.context() as patch:
        modules = _interpreted_gluon()
        patch.setattr(triton.experimental, "gluon", modules["triton.experimental.gluon"], raising=False)
        for place, module in modules.items():
            patch.setitem(sys.modules, place, module)
        loaded = [importlib.import_module(each) for each in (path, "torchrl_perf.kernels.cells")]
    for module in loaded:
        module.tl = tl  # the interpreter looks for it among the names of a function
    return loaded[0]


class _Shared:
    """Shared memory, or several of it."""

    def __init__(self, value: Any = None) -> None:
        self.value, self.parts = value, {}

    def store(self, value: Any) -> None:
        self.value = value

    def load(self, layout: Any) -> Any:
        return self.value

    def index(self, place: int) -> "_Shared":
        return self.parts.setdefault(place, _Shared())


def _interpreted_gluon() -> dict[str, ModuleType]:
    import triton
    import triton.language as tl
    from triton.runtime.jit import type_canonicalisation_dict

    gluon, gl, ampere = ModuleType("gluon"), ModuleType("gl"), ModuleType("ampere")
    gluon.language = gl
    gluon.jit = lambda fn=None, **options: triton.jit(fn, **options)
    type_canonicalisation_dict["gl.constexpr"] = "constexpr"  # the interpreter knows constants by their text
    ampere.mma_v2 = lambda a, b, acc: acc + tl.dot(a, b, input_precision="ieee")
    for name in ("constexpr", "int64", "float32"):
        setattr(gl, name, getattr(tl, name))
    gl.float16 = tl.float32
    for name in ("load", "store", "where", "maximum", "program_id", "sum", "associative_scan"):
        setattr(gl, name, lambda *args, name=name, **options: getattr(tl, name)(*args, **options))
    gl.arange = lambda start, end, layout: tl.arange(start, end)
    gl.zeros = lambda shape, dtype, layout: tl.zeros(shape, dtype)
    gl.inline_asm_elementwise = lambda asm, constraints, args, **options: 1.0 - 2.0 / (tl.exp(2.0 * args[0]) + 1.0)
    gl.num_warps = lambda: 8
    gl.allocate_shared_memory = lambda dtype, shape, layout, value=None: _Shared(value)
    for name in ("NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout", "SliceLayout", "BlockedLayout"):
        setattr(gl, name, lambda *args, **options: None)
    root = "triton.experimental.gluon"
    return {root: gluon, f"{root}.language": gl, f"{root}.language.nvidia.ampere": ampere}
