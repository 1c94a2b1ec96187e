"""The saved states that an Adam can be restored from, checked before anything is written."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchrl_perf.trainers.optim.settings import check_setting, refuse_absent

__all__ = ["EXACT", "MOMENTS", "from_lists", "saved_states"]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What is kept of each parameter; the names are PyTorch's."""
EXACT = "exact"
"""The wide value of a 16-bit parameter."""


def saved_states(
    params: Sequence[nn.Parameter], own: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> dict[Tensor, Mapping[str, Any]]:
    """The saved state of each parameter, by its place in the groups.

    Args:
        params: those of all groups, in order.
        own: the groups that are to be restored.
        state_dict: in PyTorch's form.

    Raises:
        ValueError: for other groups, and parameters of other shapes.
    """
    groups = state_dict["param_groups"]
    sizes = [[len(group["params"]) for group in part] for part in (own, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"state_dict: expected param_groups of {sizes[0]} parameters, received {sizes[1]}. Remedy: the "
            "groups that it was saved with."
        )
    for group in groups:
        refuse_absent(group, "state_dict")
        check_setting("lr", group["lr"])
    numbers = [number for group in groups for number in group["params"]]
    pairs = zip(params, numbers, strict=True)
    saved = {param: state_dict["state"][n] for param, n in pairs if state_dict["state"].get(n)}
    for param, values in saved.items():
        absent = [name for name in MOMENTS if name not in values]
        received = [tuple(values[name].shape) for name in MOMENTS[1:] if name in values]
        if absent or received != [tuple(param.shape)] * 2:
            raise ValueError(
                f"state_dict: expected {', '.join(MOMENTS)} of shapes (), {tuple(param.shape)}, "
                f"{tuple(param.shape)}, received {received} without {absent}. Remedy: the networks that it was "
                "saved with."
            )
    return saved


def from_lists(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A state of lists, as the optimiser of off-policy runs gave it up to 0.1, in PyTorch's form.

    Args:
        state_dict: ``exp_avg`` and ``exp_avg_sq`` with an entry for each parameter, ``learning_rates`` with one for
            each group, ``steps``; ``exact`` of the 16-bit ones.
        own: the state of the optimiser that is to be restored, in PyTorch's form.

    Raises:
        ValueError: for another number of parameters or groups.
    """
    numbers = [number for group in own["param_groups"] for number in group["params"]]
    sizes = {"exp_avg": len(numbers), "exp_avg_sq": len(numbers), "learning_rates": len(own["param_groups"])}
    received = {name: len(state_dict[name]) for name in sizes}
    if received != sizes:
        raise ValueError(
            f"state_dict: expected lists of {sizes} entries, received {received}. Remedy: the networks that it was "
            "saved with."
        )
    rates = zip(own["param_groups"], state_dict["learning_rates"], strict=True)
    pairs = zip(state_dict["exp_avg"], state_dict["exp_avg_sq"], strict=True)
    moments = zip(numbers, pairs, strict=True)
    state = {n: dict(zip(MOMENTS, (state_dict["steps"], *pair), strict=True)) for n, pair in moments}
    narrow = [number for number in numbers if EXACT in own["state"][number]]
    for number, value in zip(narrow, state_dict.get(EXACT, ()), strict=False):
        state[number][EXACT] = value
    scale = {name: state_dict[name] for name in ("loss_scale",) if name in state_dict}
    return {"state": state, "param_groups": [{**group, "lr": rate} for group, rate in rates], **scale}
