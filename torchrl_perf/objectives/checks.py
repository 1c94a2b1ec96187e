"""Checks of the losses' arguments and batches, by shapes and names alone."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor


def checked_gamma(gamma: float, name: str = "gamma") -> float:
    """Returns a discount factor.

    Raises:
        ValueError: outside of [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(
            f"{name}: expected a discount factor in [0, 1], received {gamma}. Remedy: a number from 0 to 1, such as "
            "0.99."
        )
    return float(gamma)


def entry(td: TensorDictBase, key: NestedKey) -> Any:
    """An entry of a batch.

    Raises:
        KeyError: if it is missing, with the keys that the batch has.
    """
    value = td.get(key, None)
    if value is None:
        raise KeyError(
            f"Expected {key!r} in the batch, received {sorted(map(str, td.keys()))}. Remedy: store it, or set_keys."
        )
    return value


def column(value: Tensor, rows: Sequence[int], name: NestedKey) -> Tensor:
    """One number for each row ``[*]``.

    Args:
        value: ``[*]`` or ``[*, 1]``.
        rows: the shape ``[*]``.
        name: of the entry, for the error.

    Raises:
        ValueError: for any other shape, which would broadcast to something else.
    """
    rows = tuple(rows)
    if value.shape == rows:
        return value
    if value.shape != (*rows, 1):
        raise ValueError(
            f"{name}: expected {[*rows, 1]}, one number for each row, received {list(value.shape)}. Remedy: a reward, "
            "flag or weight for each row of the batch."
        )
    return value.squeeze(-1)


def refuse(owner: object, unknown: dict[str, Any]) -> None:
    """Raises TypeError for arguments that a loss does not have."""
    if unknown:
        raise TypeError(
            f"{type(owner).__name__}: expected its own arguments, received {sorted(unknown)}. Remedy: take these out."
        )


def required(owner: object, **networks: Any) -> None:
    """Raises TypeError for a network that is not given."""
    if missing := [name for name, network in networks.items() if network is None]:
        raise TypeError(f"{type(owner).__name__}: expected {missing}, received None. Remedy: give each network.")
