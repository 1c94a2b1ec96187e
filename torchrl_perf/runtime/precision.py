"""Precision, compilation, optimiser kind and memory format of a training loop, in one object."""

import contextlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torchrl_perf.runtime.compile import CompileMode, compiled
from torchrl_perf.runtime.loss_scale import LossScale

__all__ = ["PRECISIONS", "Acceleration", "OptimizerKind", "Precision", "autocast", "float32_products", "widened"]

Precision = Literal["tf32", "bf16", "fp16", "ieee"]
OptimizerKind = Literal["fused", "foreach", "for-loop"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """Context in which matrix products and convolutions take 16-bit operands for ``"bf16"`` and ``"fp16"``.

    ``torch.autocast`` without its cache of converted weights: a weight that is first used under ``torch.no_grad``, as
    by targets, would be kept there without a gradient and silently stop learning.

    Args:
        precision: ``"bf16"`` or ``"fp16"``; the others change nothing.
        device: CPU or CUDA.
    """
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    return torch.autocast(kind, dtype=dtype, cache_enabled=False)


@dataclass(frozen=True)
class Acceleration:
    """Settings that make the same loop faster, each with a method that applies it; nothing changes before that.

    All together in your own script::

        fast = Acceleration("bf16")
        net = fast.module(net)
        optimizer = fast.make_optimizer(net.parameters(), lr=3e-4)
        with fast.active("cuda"):
            step = fast.compile(step)
            ...

    Args:
        precision: of matrix products and convolutions. ``"ieee"``: float32. ``"tf32"``: operands rounded to 10 bits
            of mantissa on CUDA, about 1e-3 relative. ``"bf16"`` (8 bits, about 1e-2) and ``"fp16"`` (11 bits, but a
            range up to 65,504, so that the loss has to be scaled): networks by :meth:`module` or :meth:`autocast`,
            and TF32 for the products that stay in float32. Losses, targets and statistics remain float32. On a CPU
            ``"tf32"`` and ``"ieee"`` are the same.
        compile_mode: how long the compiler searches, see :func:`~torchrl_perf.runtime.compile.compiled`.
        optimizer: ``"fused"`` is one kernel for all parameters, ``"foreach"`` a few a step, ``"for-loop"`` a few a
            parameter.
        channels_last: store images and convolution weights with the channels innermost, as tensor cores want them.

    Raises:
        ValueError: for a name that is none of these.
    """

    precision: Precision = "tf32"
    compile_mode: CompileMode = "default"
    optimizer: OptimizerKind = "fused"
    channels_last: bool = False

    def __post_init__(self) -> None:
        choices = {"precision": PRECISIONS, "compile_mode": get_args(CompileMode), "optimizer": get_args(OptimizerKind)}
        for name, expected in choices.items():
            if getattr(self, name) not in expected:
                raise ValueError(
                    f"{name}: expected one of {expected}, received {getattr(self, name)!r}. Remedy: one of these."
                )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Dtype of the operands of 16-bit products; None for ``"tf32"`` and ``"ieee"``."""
        return _AUTOCAST.get(self.precision)

    def active(self, device: torch.device | str) -> contextlib.AbstractContextManager[None]:
        """Context in which float32 products on CUDA use TF32, or not for ``"ieee"``; see :func:`float32_products`.

        Put the code that runs, compiles or captures the loop inside: a compiled function is recompiled if the setting
        differs, and a graph replays the products that it recorded. It also affects the products of an env that steps
        inside. On a CPU it changes nothing.

        Args:
            device: device of the loop.
        """
        kind = device.type if isinstance(device, torch.device) else torch.device(device).type
        return float32_products(self.precision != "ieee") if kind == "cuda" else contextlib.nullcontext()

    def autocast(self, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
        """:func:`autocast` of this precision, around the forward pass of networks.

        The output of the last layer has 16 bits: convert it with ``.float()`` before losses and targets, or let
        :meth:`module` do both.
        """
        return autocast(self.precision, device)

    def module(self, net: nn.Module) -> nn.Module:
        """Makes a network run in this precision, with float32 outputs, and in this memory format; returns it.

        The network is changed in place, but only its ``forward``, which copies keep; parameters, state and class stay.
        Networks with their own ``precision``, such as ``FusedMLP``, are left alone. Images become channels-last at the
        input.
        """
        if self.channels_last:
            net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        sees_to_it_itself = any(getattr(part, "precision", None) in PRECISIONS for part in net.modules())
        if (self.autocast_dtype is None or sees_to_it_itself) and not self.channels_last:
            return net
        net.acceleration = self  # pyright: ignore[reportAttributeAccessIssue]
        # a bound method, which copy.deepcopy binds to the copy
        net.forward = types.MethodType(_accelerated_forward, net)
        return net

    def policy(self, policy: nn.Module) -> nn.Module:
        """:meth:`module` for every network inside of a TensorDict module, such as a ``ProbabilisticActor``.

        The distribution and everything else outside of the networks stays in float32.
        """
        from tensordict.nn import TensorDictModuleBase

        for part in list(policy.modules()):
            net: Any = getattr(part, "module", None)
            if isinstance(part, TensorDictModuleBase) and _is_network(net):
                self.module(net)
        return policy

    def compile(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """:func:`~torchrl_perf.runtime.compile.compiled` in this mode."""
        return compiled(fn, mode=self.compile_mode, **options)

    def make_optimizer(
        self, params: Iterable[nn.Parameter], cls: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimiser of this kind, capturable into a graph where the parameters are on CUDA.

        Args:
            params: parameters, on one device.
            cls: class of the optimiser; settings that it has no argument for are left out.
            **options: its other arguments.
        """
        params = list(params)
        known = inspect.signature(cls).parameters
        wanted = {"fused": self.optimizer == "fused", "foreach": self.optimizer == "foreach"}
        wanted["capturable"] = params[0].device.type == "cuda"
        known_and_wanted = {name: value for name, value in wanted.items() if name in known}
        return cast("Any", cls)(params, **(known_and_wanted | options))

    def make_loss_scale(self, device: torch.device | str) -> LossScale | None:
        """The loss scale that ``"fp16"`` needs; None for the others."""
        return LossScale(device) if self.precision == "fp16" else None


def _is_network(module: Any) -> bool:
    """Whether a TensorDict module's ``module`` is a network: a module of its own with parameters, or a list of such."""
    from tensordict.nn import TensorDictModuleBase

    return isinstance(module, nn.Module) and not isinstance(module, TensorDictModuleBase | nn.ModuleList)


def _accelerated_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a module that :meth:`Acceleration.module` was given."""
    acceleration: Acceleration = self.acceleration  # pyright: ignore[reportAssignmentType]
    if acceleration.channels_last:
        args = tree_map_only(Tensor, _channels_last, args)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else next(self.parameters()).device
    with autocast(acceleration.precision, device):
        out = type(self).forward(self, *args, **kwargs)
    return tree_map_only(Tensor, widened, out) if acceleration.autocast_dtype is not None else out


def _channels_last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


def widened(value: Tensor) -> Tensor:
    """A 16-bit tensor as float32, any other as it is."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


# -- TF32 ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Context in which float32 products on CUDA use TF32 or not, in both of PyTorch's APIs; restored afterwards.

    PyTorch has the flags twice: ``allow_tf32`` and ``set_float32_matmul_precision``, and since 2.9 ``fp32_precision``
    of matrix products, convolutions and recurrent layers, each of which may inherit from its parent. If a script has
    set the two to contradict each other, reading one raises, in a compiler too. Within this context they agree;
    afterwards the previous values are restored, contradictory and inherited ones included. They belong to the process:
    threads see them too.

    If everything is already as requested, nothing is touched, neither here nor at the end.

    Args:
        tf32: whether to use TF32.
    """
    with _quiet():
        restore = [change(tf32) for change in (_change_matmul, _change_cudnn)]
    try:
        yield
    finally:
        for undo in restore:
            undo()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallows the warning that PyTorch gives once, at the first use of the older API; the first use is here."""
    if _QUIET_SINCE:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _QUIET_SINCE.append(True)


_QUIET_SINCE: list[bool] = []


def _nothing() -> None:
    """Undoes nothing, because nothing was changed."""


def _agreed(*reads: Callable[[], bool]) -> bool:
    """Whether each read gives True; an older API that contradicts the newer one raises."""
    try:
        return all(read() for read in reads)
    except RuntimeError:
        return False


def _change_matmul(tf32: bool) -> Callable[[], None]:
    """Sets matrix products; returns what restores them."""
    matmul, onednn = torch.backends.cuda.matmul, cast("Any", torch.backends.mkldnn)
    if _agreed(lambda: matmul.allow_tf32 == tf32, lambda: bool(torch.get_float32_matmul_precision())):
        return _nothing
    own = _inherited(matmul, torch.backends.cudnn, _inherited(torch.backends.cudnn, torch.backends))
    # its parent cannot be moved: torch.backends.mkldnn.fp32_precision sets that of torch.backends
    cpu = _inherited(onednn.matmul, torch.backends)
    # the older setting shows through where the newer one does not contradict it
    matmul.fp32_precision = onednn.matmul.fp32_precision = "ieee"
    older = torch.get_float32_matmul_precision()
    matmul.allow_tf32 = tf32
    matmul.fp32_precision = "tf32" if tf32 else "ieee"

    def restore() -> None:
        torch.set_float32_matmul_precision(older)
        matmul.fp32_precision, onednn.matmul.fp32_precision = own, cpu

    return restore


def _change_cudnn(tf32: bool) -> Callable[[], None]:
    """Sets convolutions and recurrent layers; returns what restores them."""
    cudnn = cast("Any", torch.backends.cudnn)
    if _agreed(lambda: cudnn.allow_tf32 == tf32):
        return _nothing
    root = _inherited(cudnn, torch.backends)
    conv, rnn = (_inherited(node, cudnn, root) for node in (cudnn.conv, cudnn.rnn))
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    older = _agreed(lambda: cudnn.allow_tf32)
    cudnn.allow_tf32 = tf32
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if tf32 else "ieee"

    def restore() -> None:
        cudnn.allow_tf32 = older
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = conv, rnn

    return restore


def _inherited(node: Any, parent: Any, parents_own: str | None = None) -> str:
    """The value that was set at a node of the newer API: ``"none"`` where it follows its parent.

    A node without its own value returns its parent's, so the parent is changed for a moment to tell the two apart.

    Args:
        node: has ``fp32_precision``.
        parent: the node above.
        parents_own: what is set at the parent itself; None is what it answers.
    """
    answer, above = node.fp32_precision, parent.fp32_precision
    own = above if parents_own is None else parents_own
    answers = []
    for value in ("ieee", "tf32"):
        parent.fp32_precision = value
        answers.append(node.fp32_precision)
    parent.fp32_precision = own
    # a node that follows and yet differs from its parent has PyTorch's default, which can only be set as a value
    return "none" if answers[0] != answers[1] and answer == above else answer
