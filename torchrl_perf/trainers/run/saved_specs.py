"""The specs of a run's env as plain values, so that a checkpoint is enough to make its networks again."""

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

__all__ = ["SavedSpecs", "plain_specs"]

PARTS = {"observation": "observation_spec", "action": "full_action_spec"}
# the more special ones first: a Binary is a Categorical too
KINDS: tuple[Any, ...] = (Binary, MultiOneHot, MultiCategorical, OneHot, Categorical, Bounded, Unbounded)
MOST_BOUNDS = 4096  # numbers that differ; more of them, as of an image, are kept by no network


def plain_specs(source: Any) -> dict[str, Any]:
    """The specs of one row's observation and action, as numbers, texts and lists.

    Args:
        source: what has ``observation_spec`` and ``full_action_spec``, such as an env; what a policy ``carried`` from
            step to step among them is none of its observations.

    Returns:
        ``"observation"`` and ``"action"``, each a list of entries with ``key``, a list of names, and ``kind``,
        ``shape``, ``dtype`` and what the kind has besides.
    """
    found: dict[str, Any] = {}
    carried = getattr(source, "carried", ())
    for part, attribute in PARTS.items():
        spec = getattr(source, attribute, None)
        leaves = spec.items(True, True) if isinstance(spec, Composite) else ()
        found[part] = [
            {"key": [key] if isinstance(key, str) else list(key), **_plain_leaf(leaf, len(cast("Any", spec).shape))}
            for key, leaf in leaves
            if isinstance(leaf, TensorSpec) and key not in carried
        ]
    return found


def _plain_leaf(leaf: Any, dims: int) -> dict[str, Any]:
    """One entry without its ``dims`` batch dims."""
    kind = next((kind for kind in KINDS if isinstance(leaf, kind)), None)
    name = type(leaf).__name__ if kind is None else kind.__name__
    plain: dict[str, Any] = {"kind": name, "shape": list(leaf.shape[dims:]), "dtype": str(leaf.dtype)}
    if kind is MultiOneHot:
        plain["sizes"] = [int(box.n) for box in leaf.space]
    elif kind is MultiCategorical:
        plain["sizes"] = _row(leaf.nvec, dims).reshape(-1).tolist()
    elif kind in (Categorical, OneHot):
        plain["sizes"] = [int(leaf.space.n)]
    elif kind is Bounded:
        plain["low"], plain["high"] = (_bounds(_row(bound, dims)) for bound in (leaf.space.low, leaf.space.high))
    return plain


def _row(values: Tensor, dims: int) -> Tensor:
    return values.flatten(0, dims - 1)[0] if dims and values.ndim >= dims else values


def _bounds(values: Tensor) -> Any:
    """One number where all are the same, else the list of them; None for more than :data:`MOST_BOUNDS`."""
    values = values.detach().cpu()
    first = values.flatten()[0].item() if values.numel() else 0.0
    if bool((values == first).all()):
        return first
    return values.tolist() if values.numel() <= MOST_BOUNDS else None


class SavedSpecs:
    """What networks are made for, read from a checkpoint: the specs of an env with one row, without the env.

    It has the names that networks ask an env for.

    Args:
        plain: as :func:`plain_specs` gives it.
        device: of the networks.

    Attributes:
        batch_size: [1]: sizes of networks do not depend on the number of rows.
        observation_spec: Composite ``[1]``.
        full_action_spec: Composite ``[1]``.
        action_keys: in their order.

    Raises:
        ValueError: for an action whose kind of spec is unknown here; such observations are left out.
    """

    def __init__(self, plain: dict[str, Any], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.batch_size = torch.Size((1,))
        self.batch_dims = 1
        known = {kind.__name__ for kind in KINDS}
        action = plain["action"]
        if unknown := [f"{entry['kind']} at {_key(entry)!r}" for entry in action if entry["kind"] not in known]:
            raise ValueError(
                f"action_spec: expected one of {', '.join(sorted(known))}, received {', '.join(unknown)}. Remedy: "
                "load_policy(..., actor=) with the network that the run was given."
            )
        self.full_action_spec = self._composite(action)
        self.observation_spec = self._composite([entry for entry in plain["observation"] if entry["kind"] in known])
        self.action_keys = [_key(entry) for entry in action]

    @property
    def action_spec(self) -> TensorSpec:
        """Spec of the action; all of them where there are several."""
        return self.full_action_spec[self.action_keys[0]] if len(self.action_keys) == 1 else self.full_action_spec

    def fake_tensordict(self) -> TensorDict:
        """A row of zeros, ``[1]``: observations, actions and the flags of a root."""
        flag = torch.zeros(1, 1, dtype=torch.bool, device=self.device)
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        root = TensorDict(flags, batch_size=self.batch_size, device=self.device)
        return root.update(self.observation_spec.zero()).update(self.full_action_spec.zero())

    def _composite(self, entries: list[dict[str, Any]]) -> Composite:
        made = Composite(shape=self.batch_size, device=self.device)
        for entry in entries:
            made[_key(entry)] = _leaf(entry, self.device).expand(1, *entry["shape"])
        return made


def _key(entry: dict[str, Any]) -> Any:
    path = entry["key"]
    return path[0] if len(path) == 1 else tuple(path)


def _leaf(entry: dict[str, Any], device: torch.device) -> TensorSpec:
    """The spec of one row from its entry, of a kind that is known here."""
    kind, shape = entry["kind"], torch.Size(entry["shape"])
    where: dict[str, Any] = {"dtype": getattr(torch, entry["dtype"].removeprefix("torch.")), "device": device}
    if kind in ("Categorical", "OneHot"):
        return (Categorical if kind == "Categorical" else OneHot)(entry["sizes"][0], shape=shape, **where)
    if kind in ("MultiCategorical", "MultiOneHot"):
        return (MultiCategorical if kind == "MultiCategorical" else MultiOneHot)(entry["sizes"], shape=shape, **where)
    if kind == "Binary":
        return Binary(shape=shape, **where)
    if kind == "Bounded" and entry["low"] is not None and entry["high"] is not None:
        low, high = (torch.tensor(entry[name], **where).expand(shape) for name in ("low", "high"))
        return Bounded(low, high, shape=shape, **where)
    if kind == "Bounded" and not where["dtype"].is_floating_point:  # unbounded integers are counts, which none reads
        limits = torch.iinfo(where["dtype"])
        return Bounded(limits.min, limits.max, shape=shape, **where)
    return Unbounded(shape=shape, **where)
