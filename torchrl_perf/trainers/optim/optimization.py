"""Optimiser steps that clip, schedule and skip on the device."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from torchrl_perf.functional.adam import AdamSettings, adam_step_, exact_copy_, widest_dtype
from torchrl_perf.runtime.loss_scale import LossScale
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.trainers.optim.settings import (
    check_params,
    check_setting,
    checked_betas,
    learning_rate_tensor,
    refuse_absent,
)

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_EXACT = "exact"  # the wide value of a 16-bit parameter, in its state
_KERNELS = ("params", "lr", "foreach", "fused", "capturable", "maximize", "amsgrad", "differentiable")
_OWN = ("max_grad_norm", "grad_norms", "params", "loss_scale", "_kind")


def is_fault(loss: Tensor, grad_norm: Tensor, loss_scale: LossScale | None = None) -> Tensor:
    """Whether a loss or its gradients are bad themselves, and not just too large for the loss scale.

    Args:
        loss: 0-d.
        grad_norm: norm of its gradients, 0-d, that ``loss_scale`` has checked.
        loss_scale: what the gradients were scaled with.

    Returns:
        bool 0-d.
    """
    bad = ~grad_norm.isfinite()
    return ~loss.isfinite() | (bad if loss_scale is None else bad & ~loss_scale.overflow)


class GuardedAdam(torch.optim.Optimizer):
    """Adam with gradient clipping, whose step can be skipped by a flag on the device.

    PyTorch's fused Adam already divides the gradient by a tensor and skips on a flag, for mixed precision: here the
    divisor clips the norm, and the flag is raised where the gradient is not finite. So a bad step leaves parameters and
    moments untouched without a host read.

    It is a ``torch.optim.Optimizer``: groups with their own ``lr``, ``betas``, ``eps`` and ``weight_decay``, PyTorch's
    schedulers, hooks, ``closure`` and form of ``state_dict``, and ``torch.amp.GradScaler``. The norm is that of all
    groups together. Learning rates are tensors on the device: a scheduler, ``group["lr"] = 1e-4`` and
    ``load_state_dict`` write them in place, which a captured graph honours; other settings are recorded with a graph.

    Parameters may be float32, float64, bfloat16 and float16, mixed as well. Moments and arithmetic are float32 (float64
    for float64). A 16-bit parameter has its float32 value in the state, and is the rounding of it: steps that are
    smaller than its resolution add up, and no number of steps is further from float32 than one rounding. What is
    written to the parameter itself counts from the next step on.

    Args:
        params: parameters, or groups of them, all on one device.
        lr: the initial step size; a 0-d tensor on the device is kept, to be overwritten in place.
        betas: decay of the means of gradients and of their squares.
        eps: Adam's epsilon.
        weight_decay: added to the gradient, times the parameter.
        decoupled_weight_decay: whether it shrinks the parameter itself instead, as in AdamW.
        learning_rate: another name of ``lr``.
        max_grad_norm: norm above which the gradient is scaled down to it; None or ``math.inf`` never.
        acceleration: gives the kind of the optimiser, and the loss scale for ``"fp16"``. The kinds that are not fused
            divide and skip in passes of their own.

    Attributes:
        params: the parameters of all groups, in order.
        learning_rate: the step size of the first group, 0-d, to be overwritten in place.
        learning_rates: those of all groups.
        loss_scale: factor on the loss, None where it needs none: differentiate ``scaled(loss)``.
        grad_norms: norm of each parameter's gradient at the latest :meth:`grad_norm`, float ``[P]``, with the scale.

    Raises:
        ValueError: for settings out of range, parameters on several devices or of another dtype, and for kind
            ``"foreach"`` on a CPU, where PyTorch has none with a learning rate in a tensor.
    """

    _step_supports_amp_scaling = True  # tells torch.amp.GradScaler to set grad_scale and found_inf, and to call step

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        learning_rate: float | Tensor | None = None,
        max_grad_norm: float | None = None,
        acceleration: Acceleration | None = None,
    ) -> None:
        if lr is not None and learning_rate is not None:
            raise ValueError(f"lr: expected it or learning_rate, received both, {lr} and {learning_rate}.")
        acceleration = acceleration or Acceleration()
        self.max_grad_norm = math.inf if max_grad_norm is None else check_setting("max_grad_norm", max_grad_norm)
        self._kind = acceleration.optimizer
        self.params: list[nn.Parameter] = []
        given = learning_rate if lr is None else lr
        defaults = {
            "lr": 1e-3 if given is None else given,
            "betas": checked_betas(betas),
            "eps": check_setting("eps", eps),
            "weight_decay": check_setting("weight_decay", weight_decay),
            "decoupled_weight_decay": bool(decoupled_weight_decay),
        }
        super().__init__(params, defaults)
        device = self.params[0].device
        if self._kind == "foreach" and device.type != "cuda":
            raise ValueError(
                f"optimizer='foreach': expected parameters on CUDA, received {device}. Remedy: 'fused' or 'for-loop'."
            )
        self.loss_scale: LossScale | None = acceleration.make_loss_scale(device)

    # -- torch.optim.Optimizer ----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with settings of their own; before a step is captured, since the graph keeps what it has.

        Args:
            param_group: ``params``, and any of ``lr``, ``betas``, ``eps``, ``weight_decay``,
                ``decoupled_weight_decay``; the constructor's for the others.

        Raises:
            ValueError: for settings out of range or absent here, other devices or dtypes, parameters it has already.
            TypeError: for what is no dict, or no tensors.
        """
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            if "learning_rate" in param_group:
                param_group["lr"] = param_group.pop("learning_rate")
            refuse_absent(param_group, "param_group")
        super().add_param_group(param_group)
        group = _Group(self.param_groups.pop())
        check_params(group["params"], self.params[0].device if self.params else None)
        group["betas"] = checked_betas(group["betas"])
        for name in ("eps", "weight_decay"):
            group[name] = check_setting(name, group[name])
        dict.__setitem__(group, "lr", learning_rate_tensor(group["lr"], group["params"]))
        self.param_groups.append(group)
        self.params = [*self.params, *group["params"]]
        # float64 as soon as one parameter is, and never the 16 bits that a norm overflows
        wide = max((widest_dtype(param.dtype) for param in self.params), key=lambda dtype: dtype.itemsize)
        self._norm_dtype = None if all(param.dtype == wide for param in self.params) else wide
        self.grad_norms = torch.zeros(len(self.params), dtype=wide, device=self.params[0].device)

    @property
    def adam(self) -> "GuardedAdam":
        """The optimiser that holds the moments: this one."""
        return self

    @property
    def learning_rate(self) -> Tensor:
        """The step size of the first group, 0-d on the device."""
        return self.param_groups[0]["lr"]

    @property
    def learning_rates(self) -> list[Tensor]:
        """The step size of each group, 0-d on the device."""
        return [group["lr"] for group in self.param_groups]

    def scaled(self, loss: Tensor) -> Tensor:
        """What to differentiate: the loss, times the loss scale where there is one."""
        return loss if self.loss_scale is None else self.loss_scale.scaled(loss)

    def grad_norm(self) -> Tensor:
        """Norm of all gradients together, 0-d, the loss scale divided out."""
        grads = [param.grad for param in self.params if param.grad is not None]
        try:
            norms: Sequence[Tensor] = torch._foreach_norm(grads, 2, self._norm_dtype) if grads else ()
        except NotImplementedError:
            for param in self.params:
                _check_dense(param)
            raise
        self.grad_norms = torch.stack(self._of_all_params(norms))
        norm = torch.linalg.vector_norm(self.grad_norms)
        return norm if self.loss_scale is None else self.loss_scale.check(norm)

    def _of_all_params(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """One norm for each parameter, 0 for those without a gradient."""
        if len(norms) == len(self.params):
            return list(norms)
        given, zero = iter(norms), torch.zeros((), dtype=self.grad_norms.dtype, device=self.grad_norms.device)
        return [zero if param.grad is None else next(given) for param in self.params]

    def is_fault(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether loss or gradients (both 0-d) are bad themselves, and not just too large for the loss scale; 0-d."""
        return is_fault(loss, grad_norm, self.loss_scale)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        grad_scale: Tensor | Callable[[], Any] | None = None,
        skip: Tensor | None = None,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """One step with the gradient clipped to ``max_grad_norm``, or none where it is not finite.

        Args:
            grad_scale: 0-d, what the gradients are divided by instead of what clips them, the loss scale apart; a
                closure in its place is taken for one, as PyTorch's optimisers have it.
            skip: 0-d, 1 to take no step. Given together with ``grad_scale`` by a caller who decides both and has called
                :meth:`grad_norm`; what is not given is found out here.
            closure: computes the loss anew, with its gradients.

        Returns:
            What the closure returned, or None.
        """
        if callable(grad_scale):
            grad_scale, closure = None, grad_scale
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # what torch.amp.GradScaler sets while it calls
        scale, bad = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.loss_scale is not None and (scale is not None or bad is not None):
            raise RuntimeError(
                "step: expected one loss scale, received a GradScaler beside that of precision 'fp16'. Remedy: "
                "GuardedAdam(…) without acceleration, or scaled(loss) without a GradScaler."
            )
        if grad_scale is None or skip is None:
            norm = self.grad_norm()
            norm = norm if scale is None else norm / scale
            grad_scale = (norm / self.max_grad_norm).clamp_min(1.0) if grad_scale is None else grad_scale
            skip = (~norm.isfinite()).float() if skip is None else skip
        if scale is not None:
            grad_scale = grad_scale * scale
        if isinstance(bad, Tensor):
            skip = torch.maximum(skip.float(), bad.float())
        if self.loss_scale is not None:
            grad_scale = grad_scale * self.loss_scale.scale
            skip = torch.maximum(skip.float(), (~self.loss_scale.finite).float())
        for group in self.param_groups:
            self._step_group(group, grad_scale, skip)
        if self.loss_scale is not None:
            self.loss_scale.update()
        return loss

    # -- one group ----------------------------------------------------------------------------------------------------

    def _step_group(self, group: dict[str, Any], grad_scale: Tensor, skip: Tensor) -> None:
        """The step of the parameters of a group that have a gradient."""
        narrow: list[tuple[Tensor, Tensor]] = []
        usual, double = _Rows.empty(), _Rows.empty()
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state = self.state[param]
            if not state:
                self._start(param, state)
            value = param
            if _EXACT in state:
                value = exact_copy_(state[_EXACT], param)
                narrow.append((param, value))
            rows = double if value.dtype == torch.float64 else usual
            rows.add(value, grad if grad.dtype == value.dtype else grad.to(value.dtype), state)
        if usual.params and self._kind == "fused":
            adam(
                *usual,
                fused=True,
                # the kernel reads both as float32
                grad_scale=grad_scale.to(torch.float32),
                found_inf=skip.to(torch.float32),
                decoupled_weight_decay=group["decoupled_weight_decay"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"] if group["lr"].dtype == torch.float32 else group["lr"].to(torch.float32),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        elif self._kind == "for-loop":
            for row in usual.each():
                self._formula(row, group, grad_scale, skip)
        else:
            self._formula(usual, group, grad_scale, skip)
        self._formula(double, group, grad_scale, skip)
        if narrow:
            params, values = zip(*narrow, strict=True)
            torch._foreach_copy_(list(params), list(values))

    def _formula(self, rows: "_Rows", group: Mapping[str, Any], grad_scale: Tensor, skip: Tensor) -> None:
        """The step in ordinary operations."""
        adam_step_(
            *(rows.params, rows.grads, rows.exp_avgs, rows.exp_avg_sqs, rows.steps),
            lr=group["lr"],
            settings=AdamSettings(group["betas"], group["eps"], group["weight_decay"], group["decoupled_weight_decay"]),
            grad_scale=grad_scale,
            skip=skip,
        )

    def _start(self, param: Tensor, state: dict[str, Tensor]) -> None:
        """Fills the state of a parameter that gets its first gradient; the names are PyTorch's."""
        _check_dense(param)
        dtype = widest_dtype(param.dtype)
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in _MOMENTS[1:]:
            state[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        if param.dtype != dtype:
            state[_EXACT] = param.detach().to(dtype)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state in PyTorch's form, the learning rates among it, and the loss scale."""
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}
        return super().state_dict() | scale

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, or that of a ``torch.optim.Adam``, in place: a captured graph stays valid.

        Raises:
            ValueError: for other groups, or parameters of other shapes; nothing is changed then.
        """
        groups, state, given = self.param_groups, self.state, []

        def check(_: Any, final: dict[str, Any]) -> dict[str, Any]:
            given.append((final, self._saved_states(final)))
            # what torch would copy, in the dtype of the parameter, is written in place below
            return {**final, "state": {}}

        def put_back(_: Any) -> None:
            loaded, (final, saved) = self.param_groups, given[-1]
            self.param_groups, self.state = groups, state
            self._load(loaded, saved)
            # none: the state is of another precision
            if self.loss_scale is not None and (scale := final.get("loss_scale")) is not None:
                self.loss_scale.load_state_dict(scale)

        # behind the hooks of others before it, and in front of them after it
        handles = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(put_back, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _saved_states(self, state_dict: Mapping[str, Any]) -> dict[Tensor, Mapping[str, Any]]:
        """The saved state of each parameter, by its place in the groups; refused where it does not fit."""
        groups = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in part] for part in (self.param_groups, groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"state_dict: expected param_groups of {sizes[0]} parameters, received {sizes[1]}. Remedy: the "
                "groups that it was saved with."
            )
        for group in groups:
            refuse_absent(group, "state_dict")
            check_setting("lr", group["lr"])
        numbers = [number for group in groups for number in group["params"]]
        pairs = zip(self.params, numbers, strict=True)
        saved = {param: state_dict["state"][n] for param, n in pairs if state_dict["state"].get(n)}
        for param, values in saved.items():
            absent = [name for name in _MOMENTS if name not in values]
            received = [tuple(values[name].shape) for name in _MOMENTS[1:] if name in values]
            if absent or received != [tuple(param.shape)] * 2:
                raise ValueError(
                    f"state_dict: expected {', '.join(_MOMENTS)} of shapes (), {tuple(param.shape)}, "
                    f"{tuple(param.shape)}, received {received} without {absent}. Remedy: the networks that it was "
                    "saved with."
                )
        return saved

    @torch.no_grad()
    def _load(self, groups: Sequence[Mapping[str, Any]], saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group["lr"] = loaded["lr"]
            group.update({name: value for name, value in loaded.items() if name not in _KERNELS})
        for param in self.params:
            values = saved.get(param)
            if values is None and param not in self.state:
                continue
            state = self.state[param]
            if not state:
                self._start(param, state)
            for name in _MOMENTS:
                # none: the state was saved before the parameter had a gradient
                if values is None:
                    state[name].zero_()
                else:
                    state[name].copy_(torch.as_tensor(values[name]))
            if _EXACT in state:
                state[_EXACT].copy_(param if values is None else values.get(_EXACT, param))

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*_OWN, "_norm_dtype")}
        return {**super().__getstate__(), **own}


def _check_dense(param: Tensor) -> None:
    """Refuse a sparse gradient."""
    if param.grad is not None and param.grad.layout != torch.strided:
        raise ValueError(
            f"grad: expected a dense one, received {param.grad.layout} of shape {tuple(param.grad.shape)}. Remedy: "
            "an Embedding with sparse=False, or torch.optim.SparseAdam."
        )


class _Rows(NamedTuple):
    """What a step is made of, one entry for each parameter; in the order of ``torch.optim.adam.adam``."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def empty(cls) -> "_Rows":
        """No rows."""
        return cls([], [], [], [], [], [])

    def add(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        """One more parameter."""
        self.params.append(param)
        self.grads.append(grad)
        self.exp_avgs.append(state["exp_avg"])
        self.exp_avg_sqs.append(state["exp_avg_sq"])
        self.steps.append(state["step"])

    def each(self) -> "Iterator[_Rows]":
        """The rows one by one."""
        columns = (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps)
        for param, grad, mean, square, step in zip(*columns, strict=True):
            yield _Rows([param], [grad], [mean], [square], [], [step])


class _Group(dict[str, Any]):
    """A group of parameters whose learning rate is written into its tensor, where a captured graph reads it."""

    def __setitem__(self, name: str, value: Any) -> None:
        held = self.get(name)
        if name != "lr" or not isinstance(held, Tensor) or held is value:
            super().__setitem__(name, value)
        elif isinstance(value, Tensor):
            held.copy_(value)
        else:
            held.fill_(check_setting("lr", value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As a dict's, the learning rate in place."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value
