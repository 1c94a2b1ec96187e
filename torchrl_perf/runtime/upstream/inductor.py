"""torch: kernels of Inductor that may be placed before the one before them has ended wait for it.

With ``triton.enable_pdl`` Inductor's kernels are launched early (see :mod:`torchrl_perf.kernels.dependent`), but wait
only for what the kernel just before them touches, by the names of buffers. That is not enough where that kernel reads
nothing, a fill say, and so waits for nothing itself: the next one may read what the kernel before both still writes,
and a fill may write into memory that was freed and is still read. Here each kernel waits before its first access.
"""

import re
from typing import Any

WAIT = "tl.extra.cuda.gdc_wait()"


def waiting(name: str, source: str) -> str:
    """The source of a kernel of Inductor, with a wait as its first statement if it is launched early.

    Args:
        name: of the function.
        source: of its module. One whose function is not found is not launched early.
    """
    if "'launch_pdl': True" not in source:
        return source
    found = re.search(rf"^def {re.escape(name)}\(.*\):\n", source, re.MULTILINE)
    if found is None:
        return source.replace("'launch_pdl': True", "'launch_pdl': False")
    return f"{source[: found.end()]}    {WAIT}\n{source[found.end() :]}"


def wait_first() -> None:
    """Has all kernels that Inductor launches early wait first, from the next compilation on."""
    from torch._dynamo.callback import callback_handler

    if patch_loader not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(patch_loader)


def patch_loader(*_: Any) -> None:
    """Once the compiler is in use: to import it takes seconds."""
    from torch._inductor.async_compile import AsyncCompile

    load = AsyncCompile.triton
    if hasattr(load, "waits"):
        return

    def triton(self: AsyncCompile, kernel_name: str, source_code: str, *args: Any, **options: Any) -> Any:
        return load(self, kernel_name, waiting(kernel_name, source_code), *args, **options)

    triton.waits = True  # pyright: ignore[reportFunctionMemberAccess]
    AsyncCompile.triton = triton
