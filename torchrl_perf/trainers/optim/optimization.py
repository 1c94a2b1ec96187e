"""The optimiser of every trainer: Adam that clips, schedules and skips on the device."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.adam import gradient_norms, widest_dtype
from torchrl_perf.functional.parts import joined_in_parts
from torchrl_perf.kernels import adam_kernels
from torchrl_perf.runtime.loss_scale import LossScale
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.runtime.self_capture import InPlaceReplays
from torchrl_perf.trainers.optim.adam_state import EXACT, MOMENTS, from_lists, saved_states
from torchrl_perf.trainers.optim.adam_step import AdamStep, follow_
from torchrl_perf.trainers.optim.hooks import is_hooked, within_hooks
from torchrl_perf.trainers.optim.settings import (
    AdamGroup,
    adam_options,
    check_params,
    check_setting,
    checked_betas,
    learning_rate_tensor,
    refuse_absent,
    refuse_of_all,
)

_KERNELS = ("params", "lr", "foreach", "fused", "capturable", "maximize", "amsgrad", "differentiable")
_OWN = (
    "_max_grad_norm",
    "grad_norms",
    "params",
    "loss_scale",
    "capture",
    "_kind",
    "_replays",
    "_norm_dtype",
    "_norm_space",
    "_steps",
    "_group_steps",
    "_ends",
)


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
    """Adam with gradient clipping, whose step is skipped on the device where a gradient is not finite.

    PyTorch's fused Adam already divides the gradient by a tensor and skips on a flag, for mixed precision: here the
    divisor clips the norm, and the flag is raised where the gradient is not finite. So a bad step leaves parameters and
    moments untouched without a host read.

    There are two ways to step. :meth:`step` takes the gradients that ``backward()`` left at the parameters;
    :meth:`apply_gradients` takes those that ``torch.autograd.grad`` or ``torch.func`` returned, and may be compiled
    together with the losses that they are of. Norm, guard, moments and parameters are few kernels then.

    It is a ``torch.optim.Optimizer``: groups with their own ``lr``, ``betas``, ``eps`` and ``weight_decay``, PyTorch's
    schedulers, hooks, ``closure`` and form of ``state_dict``, and ``torch.amp.GradScaler``. The norm is that of all
    groups together. Learning rates are tensors on the device: a scheduler, ``group["lr"] = 1e-4`` and
    ``load_state_dict`` write them in place, which a captured graph honours; other settings are recorded with a graph,
    and with a compiled step.

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
        decoupled_weight_decay: whether it shrinks the parameter itself instead, as in AdamW (arXiv:1711.05101).
        learning_rate: another name of ``lr``.
        max_grad_norm: norm above which the gradient is scaled down to it; None or ``math.inf`` never.
        acceleration: gives the kind of the optimiser, and the loss scale for ``"fp16"``. The kinds that are not fused
            divide and skip in passes of their own.
        capture: on CUDA, :meth:`step` without arguments becomes a CUDA graph after two calls, into which the gradients
            are copied: two launches in all.

    Attributes:
        params: the parameters of all groups, in order.
        learning_rate: the step size of the first group, 0-d, to be overwritten in place.
        learning_rates: those of all groups.
        loss_scale: factor on the loss, None where it needs none: differentiate ``scaled(loss)``.
        grad_norms: one number for each parameter, ``[P]``: the norm of its latest gradient, with the loss scale. Of a
            compiled :meth:`apply_gradients` only the first that is not finite says something: the gradient of that
            parameter was not.

    Raises:
        ValueError: for settings out of range, parameters on several devices or of another dtype, and for kind
            ``"foreach"`` on a CPU, where PyTorch has none with a learning rate in a tensor.
    """

    _in_hooks = False  # while those of apply_gradients are called
    _step_supports_amp_scaling = True  # tells torch.amp.GradScaler to set grad_scale and found_inf, and to call step

    def __init__(  # noqa: PLR0913  PyTorch's arguments of Adam, and what this one adds
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
        capture: bool = True,
    ) -> None:
        if lr is not None and learning_rate is not None:
            raise ValueError(
                f"lr: expected it or learning_rate, received both, {lr} and {learning_rate}. Remedy: leave one out."
            )
        acceleration = acceleration or Acceleration()
        self.max_grad_norm = max_grad_norm
        self._kind = acceleration.optimizer
        self.params: list[nn.Parameter] = []
        self._group_steps: list[AdamStep] = []
        self.capture, self._replays = capture, InPlaceReplays(type(self).__name__)
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

    # -- groups -------------------------------------------------------------------------------------------------------

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
            refuse_of_all(param_group)
        super().add_param_group(param_group)
        group = AdamGroup(self.param_groups.pop())
        check_params(group["params"], self.params[0].device if self.params else None)
        for name in ("betas", "eps", "weight_decay"):
            group[name] = group[name]  # checks it
        dict.__setitem__(group, "lr", learning_rate_tensor(group["lr"], group["params"]))
        self.param_groups.append(group)
        self.params = [*self.params, *group["params"]]
        self._make_state(group)

    def _make_state(self, group: AdamGroup) -> None:
        """Makes what a step needs of the parameters of a new group, the last."""
        device = self.params[0].device
        counts = [] if len(self.param_groups) == 1 else [self._steps]
        # all counts are one vector, so that all rise in one launch
        self._steps = torch.cat([*counts, torch.zeros(len(group["params"]), device=device)])
        self._group_steps.append(AdamStep(group["params"], group["lr"], group.settings))
        self._show_state()
        # float64 as soon as one parameter is, and never the 16 bits that a norm overflows
        wide = max((widest_dtype(param.dtype) for param in self.params), key=lambda dtype: dtype.itemsize)
        self._norm_dtype = None if all(param.dtype == wide for param in self.params) else wide
        self.grad_norms = torch.zeros(len(self.params), dtype=wide, device=device)
        kernels = adam_kernels(self.params) if self._norm_dtype is None else None
        self._norm_space = None if kernels is None else kernels.workspace(self.params)
        self._ends = torch.tensor([param.numel() for param in self.params], device=device).cumsum(0)

    def _show_state(self) -> None:
        """Puts into ``state`` what the steps are computed with."""
        states = [state for held in self._group_steps for state in held.states()]
        for param, step, state in zip(self.params, self._steps.unbind(), states, strict=True):
            self.state[param] = {"step": step, **state}

    def _read_groups(self) -> None:
        """Takes over what was changed in ``param_groups`` and in ``state`` since the last step."""
        for held, group in zip(self._group_steps, self.param_groups, strict=True):
            held.lr, held.settings = group["lr"], cast("AdamGroup", group).settings
        if emptied := [param for param in self.params if not self.state.get(param)]:
            self._show_state()
            for param in emptied:
                for name in MOMENTS:
                    self.state[param][name].zero_()

    @property
    def max_grad_norm(self) -> float:
        """Norm above which the gradient is scaled down to it, ``math.inf`` for never; setting None means that too.

        Raises:
            ValueError: when it is set to something else than a positive number.
        """
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = math.inf if value is None else check_setting("max_grad_norm", value)

    @property
    def step_counts(self) -> Tensor:
        """Steps taken of each parameter, ``[P]`` float32, to be counted in place by who takes them by other means."""
        return self._steps

    def take_over_settings(self) -> None:
        """Heeds what was changed in ``param_groups`` and ``state``; for who takes steps by other means."""
        self._read_groups()

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

    # -- loss and norm ------------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """What to differentiate: the loss, times the loss scale where there is one."""
        return loss if self.loss_scale is None else self.loss_scale.scaled(loss)

    def cotangent(self, loss: Tensor) -> Tensor:
        """What to begin the backward pass of ``loss`` with: 1, or the loss scale; 0-d."""
        one = torch.ones_like(loss)
        return one if self.loss_scale is None else one * self.loss_scale.scale

    def grad_norm(self) -> Tensor:
        """Norm of all gradients at the parameters together, 0-d, the loss scale divided out."""
        return self.joint_norm(self.parameter_norms())

    def flat_norm(self, flat: Tensor, ends: Tensor) -> Tensor:
        """:meth:`grad_norm` of gradients that lie in one tensor, in few kernels where it is compiled.

        Args:
            flat: all of them in the order of ``params``, with zeros anywhere between them.
            ends: where each one ends, int64 ``[P]``.

        Returns:
            0-d, the loss scale divided out. ``grad_norms`` marks the first parameter whose gradient is not finite.
        """
        norm = self._marked_norm(flat if self._norm_dtype is None else flat.to(self._norm_dtype), ends)
        return norm if self.loss_scale is None else self.loss_scale.check(norm)

    def parameter_norms(self) -> Tensor:
        """Norm of the gradient at each parameter, ``[P]``, with the loss scale; a tensor of its own at each call."""
        return self._norms_of([param.grad for param in self.params])

    def joint_norm(self, norms: Tensor) -> Tensor:
        """:meth:`grad_norm` from :meth:`parameter_norms`, which become :attr:`grad_norms`; it may be compiled."""
        # in place, so that each recorded step writes where the others do
        self.grad_norms.copy_(norms)
        norm = torch.linalg.vector_norm(norms)
        return norm if self.loss_scale is None else self.loss_scale.check(norm)

    def _norms_of(self, of_params: Sequence[Tensor | None]) -> Tensor:
        grads = [grad for grad in of_params if grad is not None]
        if grads and self._norm_space is not None and adam_kernels(grads) is not None:
            together = gradient_norms(grads, self._norm_space)
            return together if len(grads) == len(self.params) else self._spread(together.unbind(), of_params)
        try:
            norms: Sequence[Tensor] = torch._foreach_norm(grads, 2, self._norm_dtype) if grads else ()
        except NotImplementedError:
            for param in self.params:
                _check_dense(param)
            raise
        return self._spread(norms, of_params)

    def _spread(self, norms: Sequence[Tensor], of_params: Sequence[Tensor | None]) -> Tensor:
        """One norm for each parameter, 0 for those without a gradient."""
        if len(norms) == len(self.params):
            return torch.stack(list(norms))
        given, zero = iter(norms), torch.zeros((), dtype=self.grad_norms.dtype, device=self.grad_norms.device)
        return torch.stack([zero if grad is None else next(given) for grad in of_params])

    def is_fault(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether loss or gradients (both 0-d) are bad themselves, and not just too large for the loss scale; 0-d."""
        return is_fault(loss, grad_norm, self.loss_scale)

    # -- gradients at the parameters ----------------------------------------------------------------------------------

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
        self._read_groups()
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
        grads = [param.grad for param in self.params]
        plain = grad_scale is None and skip is None and scale is None and bad is None
        if plain and self.capture and self._replays.serves(self.params[0].device):
            device = self.params[0].device
            self._replays(self._guarded_step, grads, self._memory(), device=device, writes=self.params)
        else:
            self._guarded_step(grads, grad_scale, skip, scale, bad)
        return loss

    def _guarded_step(
        self,
        grads: Sequence[Tensor | None],
        grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
        scale: Tensor | None = None,
        bad: Tensor | None = None,
    ) -> None:
        if grad_scale is None or skip is None:
            norm = self.joint_norm(self._norms_of(grads))
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
        skip = skip.to(torch.float32)
        if all(grad is not None for grad in grads):
            self._steps.add_(1.0 - skip)
        elif counted := [self.state[p]["step"] for p, grad in zip(self.params, grads, strict=True) if grad is not None]:
            torch._foreach_add_(counted, [1.0 - skip] * len(counted))
        self._step_groups(grads, grad_scale, skip)
        if self.loss_scale is not None:
            self.loss_scale.update()

    def _memory(self) -> tuple[Any, ...]:
        """Where a step reads and writes, and with which settings: what a recorded step has to have in common."""
        settings = [(held.lr.data_ptr(), held.settings) for held in self._group_steps]
        moments = [value.data_ptr() for param in self.params for value in self.state[param].values()]
        return self.max_grad_norm, tuple(settings), tuple(moments), tuple([param.data_ptr() for param in self.params])

    def _step_groups(self, grads: Sequence[Tensor | None], grad_scale: Tensor, skip: Tensor) -> None:
        """The step of all groups, whose gradients stand one after the other."""
        start = 0
        for held in self._group_steps:
            part = slice(start, start := start + len(held.params))
            held(grads[part], self._steps[part], grad_scale, skip, self._kind)

    # -- gradients that are given -------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply_gradients(
        self,
        grads: Sequence[Tensor],
        loss: Tensor,
        targets: Sequence[Tensor] = (),
        tau: float | Tensor = 0.0,
        *,
        unless: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step, or none where a gradient or the loss is not finite; targets follow in any case.

        Nothing is read by the host, and a compiler takes it whole. Hooks around the step are called, with the gradients
        at the parameters, but not within a compiled function: callers that compile it ask ``is_hooked`` before.

        Args:
            grads: one for each of ``params``, of the loss times the loss scale where there is one.
            loss: 0-d, what they are the gradients of.
            targets: one for each of ``params``, such as those of a target network, or none.
            tau: how far the targets go towards the parameters, a number or 0-d.
            unless: bool 0-d, whether no step is wanted.

        Returns:
            Whether the step was taken, bool 0-d, and the norm of the gradients before clipping, 0-d.
        """
        if torch.compiler.is_compiling():
            norm, grads = self._compiled_norm(grads)
        elif not self._in_hooks and is_hooked(self):
            self._in_hooks = True
            try:
                with within_hooks(self, grads) as changed:
                    return self.apply_gradients(changed, loss, targets, tau, unless=unless)
            finally:
                self._in_hooks = False
        else:
            self._read_groups()
            self._check_shapes(grads)
            norms = self._norms_of(grads)
            self.grad_norms.copy_(norms)
            norm = torch.linalg.vector_norm(norms)
        applies = norm.isfinite() & loss.detach().isfinite()
        applies = applies if unless is None else applies & ~unless
        self._steps.add_(applies)  # of += torch 2.11 would make an assignment, which its compiler refuses
        scale = self.loss_scale
        before = None if scale is None else scale.scale.clone()
        if scale is not None:
            norm = scale.check(norm)
            scale.update()
        limit = self.max_grad_norm
        divisor = torch.ones_like(norm) if limit == math.inf else (norm / limit).clamp_min(1.0)
        divisor = divisor if before is None else divisor * before
        self._step_groups(grads, divisor, (~applies).to(torch.float32))
        if targets:
            follow_(targets, [value for held in self._group_steps for value in held.exact], tau)
        return applies, norm

    def _check_shapes(self, grads: Sequence[Tensor]) -> None:
        """That gradients are shaped as their parameters: kernels would walk over others to their end, and beyond."""
        if len(grads) != len(self.params) or any(g.shape != p.shape for g, p in zip(grads, self.params, strict=True)):
            raise ValueError(
                f"grads: expected shapes {[tuple(param.shape) for param in self.params]}, received "
                f"{[tuple(grad.shape) for grad in grads]}. Remedy: torch.autograd.grad(loss, optimizer.params)."
            )

    def _compiled_norm(self, grads: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Norm of all gradients in one pass, 0-d, and the gradients; the first bad one is marked in ``grad_norms``."""
        # one sum over all: a sum for each gradient is two kernels where it is large
        rows = joined_in_parts([grad.reshape(-1).to(self._norm_dtype or grad.dtype) for grad in grads])
        norm = self._marked_norm(rows, self._ends)
        if self._norm_dtype is not None:
            return norm, grads
        # as parts of the joined ones: a gradient may be a slice of a padded product, which is slow to walk
        parts = rows.view(-1).split([*[grad.numel() for grad in grads], rows.numel() - sum(g.numel() for g in grads)])
        return norm, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=False)]

    def _marked_norm(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Norm of gradients that lie one after the other, ``[*]``; the first bad one is marked in ``grad_norms``."""
        # the place of the first bad entry comes from the same pass; those of its parameter's end lie behind it
        places = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
        place = torch.where(rows.isfinite(), rows.numel(), places).amin(-1).amin()
        number = (ends <= place).sum()
        numbers = torch.arange(len(self.params), device=rows.device)
        self.grad_norms.copy_(torch.where(numbers == number, torch.inf, 0.0))
        return rows.square().sum(-1).sum().sqrt()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state in PyTorch's form, the learning rates among it, and the loss scale."""
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}
        return super().state_dict() | scale

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, or that of a ``torch.optim.Adam``, in place: a captured graph stays valid.

        The lists that off-policy runs up to 0.1 stored are read as well.

        Raises:
            ValueError: for other groups, or parameters of other shapes; nothing is changed then.
        """
        groups, state, given = self.param_groups, self.state, []
        if "exp_avg" in state_dict:
            state_dict = from_lists(state_dict, super().state_dict())

        def check(_: Any, final: dict[str, Any]) -> dict[str, Any]:
            given.append((final, saved_states(self.params, self.param_groups, final)))
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

    @torch.no_grad()
    def _load(self, groups: Sequence[Mapping[str, Any]], saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group["lr"] = loaded["lr"]
            group.update({name: value for name, value in loaded.items() if name not in _KERNELS})
        self._read_groups()
        for param in self.params:
            values, state = saved.get(param), self.state[param]
            for name in MOMENTS:
                # none: the state was saved before the parameter had a gradient
                if values is None:
                    state[name].zero_()
                else:
                    state[name].copy_(torch.as_tensor(values[name]))
            if EXACT in state:
                state[EXACT].copy_(param if values is None else values.get(EXACT, param))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}


def _check_dense(param: Tensor) -> None:
    """Refuse a sparse gradient."""
    if param.grad is not None and param.grad.layout != torch.strided:
        raise ValueError(
            f"grad: expected a dense one, received {param.grad.layout} of shape {tuple(param.grad.shape)}. Remedy: "
            "an Embedding with sparse=False, or torch.optim.SparseAdam."
        )


def adam_of(config: Any, params: Iterable[nn.Parameter], acceleration: Acceleration) -> GuardedAdam:
    """The optimiser of parameters that learn at one rate, with a config's settings."""
    return GuardedAdam(
        params,
        learning_rate=config.learning_rate,
        max_grad_norm=config.max_grad_norm,
        acceleration=acceleration,
        **adam_options(config),
    )
