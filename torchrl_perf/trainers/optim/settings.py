"""What an Adam can be set to, refused where it is wrong before anything is made of it."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.functional.adam import AdamSettings, widest_dtype

__all__ = [
    "AdamGroup",
    "adam_options",
    "check_params",
    "check_setting",
    "checked_betas",
    "learning_rate_tensor",
    "refuse_absent",
    "refuse_of_all",
]

_RANGES = {
    "lr": ("a finite number of at least 0", lambda value: 0.0 <= value < math.inf),
    "eps": ("a finite number of at least 0", lambda value: 0.0 <= value < math.inf),
    "weight_decay": ("a finite number of at least 0", lambda value: 0.0 <= value < math.inf),
    "max_grad_norm": ("a positive number, math.inf or None for no limit", lambda value: value > 0.0),
    "beta": ("a number in [0, 1)", lambda value: 0.0 <= value < 1.0),
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ABSENT = ("amsgrad", "maximize", "differentiable")
_OF_ALL = ("max_grad_norm", "acceleration")
"""What all groups have together: the norm is that of all gradients."""


def check_setting(name: str, value: Any) -> float:
    """The value as a float, if it is one that the setting can have.

    Args:
        name: ``"lr"``, ``"eps"``, ``"weight_decay"``, ``"max_grad_norm"`` or ``"beta"``.
        value: a number, or a tensor of one element, which is read.

    Raises:
        ValueError: for another one; NaN is out of every range.
    """
    wanted, fits = _RANGES[name]
    is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_number or isinstance(value, bool) or not fits(float(value)):
        raise ValueError(f"{name}: expected {wanted}, received {value!r}. Remedy: {_REMEDIES.get(name, 'correct it')}.")
    return float(value)


_REMEDIES = {
    "lr": "lr=3e-4, say; gradients that are followed upwards need a loss of the other sign",
    "eps": "eps=1e-8, PyTorch's, or 1e-5",
    "weight_decay": "weight_decay=0 for none",
    "max_grad_norm": "max_grad_norm=0.5, say",
    "beta": "betas=(0.9, 0.999)",
}


def checked_betas(betas: Any) -> tuple[float, float]:
    """Two decays in [0, 1).

    Raises:
        ValueError: for other numbers, or another number of them.
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers in [0, 1), received {betas!r}. Remedy: betas=(0.9, 0.999).")
    return check_setting("beta", betas[0]), check_setting("beta", betas[1])


def refuse_absent(group: Mapping[str, Any], where: str) -> None:
    """That a group of parameters asks for nothing of ``torch.optim.Adam`` that is not here.

    Raises:
        ValueError: naming what it asks for.
    """
    if asked := [name for name in _ABSENT if group.get(name)]:
        raise ValueError(
            f"{where}: expected none of {', '.join(_ABSENT)}, received {', '.join(asked)}. Remedy: torch.optim.Adam, "
            "or leave it out."
        )


def refuse_of_all(group: Mapping[str, Any]) -> None:
    """That a group does not set for itself what all groups have together.

    Raises:
        ValueError: naming what it sets.
    """
    if asked := [name for name in _OF_ALL if name in group]:
        raise ValueError(
            f"param_group: expected {', '.join(_OF_ALL)} for all groups together, received {', '.join(asked)} for one. "
            "Remedy: an argument of the optimiser, or an optimiser for each."
        )


def check_params(params: Iterable[Tensor], device: torch.device | None = None) -> None:
    """That parameters are on one device, of a floating dtype that can be learnt in, and with a place for each number.

    Args:
        params: parameters.
        device: where earlier ones are.

    Raises:
        ValueError: naming the dtype, the devices or the strides.
    """
    for param in params:
        device = param.device if device is None else device
        if param.dtype not in _DTYPES:
            raise ValueError(
                f"params: expected one of {', '.join(map(str, _DTYPES))}, received {param.dtype} of shape "
                f"{tuple(param.shape)}. Remedy: torch.view_as_real for complex ones; .float() for 8 bits."
            )
        if any(step == 0 and size > 1 for step, size in zip(param.stride(), param.shape, strict=True)):
            raise ValueError(
                f"params: expected a place in memory for each number, received an expanded tensor of shape "
                f"{tuple(param.shape)} and strides {param.stride()}. Remedy: nn.Parameter(tensor.contiguous())."
            )
        if param.device != device:
            raise ValueError(
                f"params: expected all on one device, received some on {device} and one of shape "
                f"{tuple(param.shape)} on {param.device}. Remedy: an optimiser for each device."
            )


def learning_rate_tensor(lr: float | Tensor, params: Iterable[Tensor]) -> Tensor:
    """A learning rate as a 0-d tensor beside its parameters: a tensor that serves is taken as it is.

    Args:
        lr: a number, or a tensor of one element.
        params: the parameters that it is for; it is float64 where one of them is, else float32.

    Raises:
        ValueError: for a negative one, one that is not finite, or a tensor on another device.
    """
    check_setting("lr", lr)
    params = list(params)
    dtype = max((widest_dtype(p.dtype) for p in params), key=lambda dtype: dtype.itemsize, default=torch.float32)
    device = params[0].device if params else None
    if not isinstance(lr, Tensor):
        return torch.tensor(float(lr), dtype=dtype, device=device)
    if (lr.device, lr.dtype, lr.ndim) != (device or lr.device, dtype, 0):
        raise ValueError(
            f"lr: expected a number or a {dtype} tensor of shape () on {device}, received {lr.dtype} of shape "
            f"{tuple(lr.shape)} on {lr.device}. Remedy: torch.tensor(…, dtype={dtype}, device={str(device)!r})."
        )
    return lr.detach()


def adam_options(config: Any) -> dict[str, Any]:
    """The arguments of :class:`~torchrl_perf.trainers.GuardedAdam` that every config has settings for."""
    return {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "decoupled_weight_decay": True,
    }


class AdamGroup(dict[str, Any]):
    """A group of parameters whose learning rate is written into its tensor, where a captured graph reads it.

    Raises:
        ValueError: for settings out of range, and those of ``torch.optim.Adam`` that are not here.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name in _ABSENT:
            refuse_absent({name: value}, "param_group")
        elif name == "betas":
            value = checked_betas(value)
        elif name in ("eps", "weight_decay"):
            value = check_setting(name, value)
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

    @property
    def settings(self) -> AdamSettings:
        """What a step is made with, beside its step size."""
        return AdamSettings(self["betas"], self["eps"], self["weight_decay"], self["decoupled_weight_decay"])
