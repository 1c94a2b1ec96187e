"""The one place of the package that calls ``torch.compile``."""

import functools
import types
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch.torch_version import TorchVersion

from torchrl_perf.runtime.upstream import inductor

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
"""How long the compiler looks for fast kernels. The second tries the block sizes of matrix products, for minutes."""

DEFAULTS = {"fallback_random": True, "combo_kernels": True, "online_softmax": False}
"""Options of Inductor that the package relies on.

``fallback_random``: random numbers are those of the eager function, so that the two can be compared bit for bit.
``combo_kernels``: independent small kernels become one launch; on an H100 an iteration of PPO with 4 envs took 3.11 ms
instead of 3.33, one with 4,096 envs 6.42 instead of 6.80. ``online_softmax`` pays for long rows only, and warns for
each short one (the logits of a few actions) that it turns itself off.
"""

FEW_LAUNCHES = {"aggressive_fusion": True, "score_fusion_memory_threshold": 0}
"""Further options for a function of small tensors on CUDA, of which each launch costs more than its memory traffic.

Operations of one shape become one kernel whether or not they read the same memory, such as the rows of a step that hold
constants.
"""

FUSES_PAST_WRITES = TorchVersion(torch.__version__) < "2.12"
"""Whether Inductor's code for a CPU may read a buffer after the write in place that has to come after the read.

Seen on torch 2.11 where a short sum over an env's old state stands beside the write of the new one: the reward was that
of the next step. Fused loops are in the wrong order; each loop on its own is not.
"""


def compiled(fn: Callable[..., Any], *, device: torch.device | None = None, **options: Any) -> Callable[..., Any]:
    """Compile a function as one graph with static shapes.

    ``fullgraph=True`` because a graph break is an unwanted host round trip; ``dynamic=False`` because the shapes of the
    package are static and a dynamic kernel is slower. ``mode="reduce-overhead"`` is refused: its implicit
    CUDA graphs copy inputs and outputs on each call, cannot be nested in ``torchrl_perf.runtime.capture``, and made
    loops slower on torch 2.10 and later. Put ``capture`` around the compiled function instead.

    Args:
        fn: function of tensors, free of host waits.
        device: where it runs; by default CUDA where there is one.
        **options: passed to ``torch.compile``; they override the defaults above. A ``mode`` is added to the
            ``options``, which ``torch.compile`` itself takes only without a mode.

    Returns:
        The compiled function. Nothing is compiled before its first call.

    Raises:
        ValueError: for a ``mode`` with implicit CUDA graphs.
    """
    mode = options.pop("mode", None)
    if mode in ("reduce-overhead", "max-autotune"):
        raise ValueError(
            f'expected a mode without implicit CUDA graphs, received mode="{mode}". Remedy: '
            '"max-autotune-no-cudagraphs" or none, and torchrl_perf.runtime.capture for the graph'
        )
    settings: dict[str, Any] = {"fullgraph": True, "dynamic": False, **options}
    if settings.get("backend", "inductor") == "inductor":
        of_device = _device_options(device)
        settings["options"] = {**DEFAULTS, **of_device, **_mode_options(mode), **settings.get("options", {})}
    return torch.compile(_with_own_code(fn), **settings)


def _device_options(device: torch.device | None) -> dict[str, Any]:
    """On a CPU what keeps the reads and writes of a function in order, at the cost of some speed; on CUDA fewer gaps.

    From sm_90 on a kernel is placed while the one before it still runs, and waits there: an iteration of PPO with 4
    envs takes 1.32 ms on an H200 instead of 1.94. Two small networks of one input, such as actor and critic, are one
    launch each way.
    """
    kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        inductor.wait_first()
        return {"triton.enable_pdl": True, "post_grad_custom_pre_pass": inductor.graph_pass()}
    return {"max_fusion_size": 1} if kind == "cpu" and FUSES_PAST_WRITES else {}


def _mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's options for a mode of ``torch.compile``."""
    if mode is None or mode == "default":
        return {}
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise ValueError(
            f"expected a mode among {('default', *known)}, received {mode!r}. Remedy: leave it out for the default"
        )
    return known[mode]


def _with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function or method, with a separate code object.

    Dynamo stores compiled code with the code object, for all instances of a class together: the ninth trainer of a
    process would exceed the limit of recompilations, and each call would first check the guards of the others.
    """
    if isinstance(fn, types.MethodType):
        return types.MethodType(_with_own_code(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    if hasattr(fn, "__wrapped__"):
        fn = _entered_plainly(fn)
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    functools.update_wrapper(copy, fn)
    del copy.__wrapped__  # Dynamo would follow it to the shared code
    return copy


def _entered_plainly(fn: Callable[..., Any]) -> types.FunctionType:
    """A plain function around a decorated one.

    Dynamo enters torch's own wrappers, such as that of ``torch.no_grad()``, through one function that all share.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return cast("types.FunctionType", functools.wraps(fn)(call))
