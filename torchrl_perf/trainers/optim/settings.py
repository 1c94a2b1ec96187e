"""What an Adam can be set to, refused where it is wrong before anything is made of it."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.functional.adam import widest_dtype

__all__ = ["check_params", "check_setting", "checked_betas", "learning_rate_tensor"]

_RANGES = {
    "lr": ("a finite number of at least 0", lambda value: 0.0 <= value < math.inf),
    "eps": ("a finite number of at least 0", lambda value: 0.0 <= value < math.inf),
    "weight_decay": ("a finite number of at least 0", lambda value: 0.0 <= value < math.inf),
    "max_grad_norm": ("a positive number, math.inf or None for no limit", lambda value: value > 0.0),
    "beta": ("a number in [0, 1)", lambda value: 0.0 <= value < 1.0),
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ABSENT = ("amsgrad", "maximize", "differentiable")


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


def check_params(params: Iterable[Tensor], device: torch.device | None = None) -> None:
    """That parameters are on one device and of a floating dtype that can be learnt in.

    Args:
        params: parameters.
        device: where earlier ones are.

    Raises:
        ValueError: naming the dtype or the devices.
    """
    for param in params:
        device = param.device if device is None else device
        if param.dtype not in _DTYPES:
            raise ValueError(
                f"params: expected one of {', '.join(map(str, _DTYPES))}, received {param.dtype} of shape "
                f"{tuple(param.shape)}. Remedy: torch.view_as_real for complex ones; .float() for 8 bits."
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
