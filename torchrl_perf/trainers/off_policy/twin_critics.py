"""How many critics a network is, and how many its loss is to make of it."""

import copy
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_perf.objectives.sac import VALUE_KEY
from torchrl_perf.objectives.twins import members_of


def critics_wanted(critic: nn.Module, specs: Any, number: int) -> int | None:
    """What ``num_qvalue_nets`` of a loss has to be for a run of ``number`` critics; None takes the critic as it is.

    Args:
        critic: one network that writes ``[*, 1]``, of which the loss makes twins, or all of them, ``[*, K]``.
        specs: an env, or what has its ``observation_spec`` and ``action_spec``; None where they are not known.
        number: of the settings, ``num_critics``.

    Raises:
        ValueError: for a critic that is several, but not as many as the settings have.
    """
    values = members_of(critic)
    if values is None and specs is not None:
        values = _values_written(critic, specs)
    if values == number:
        return None
    if values is None or values == 1:
        return number
    raise ValueError(
        f"num_critics: expected {values}, the values [*, {values}] that critic= writes, received {number}. Remedy: "
        f"num_critics={values}, or a critic of one value, of which num_critics twins are made."
    )


def _values_written(critic: nn.Module, specs: Any) -> int | None:
    """K of the values ``[*, K]`` of a critic, from a copy of it on zeros; None where it reads what an env has not."""
    if not isinstance(critic, TensorDictModuleBase):
        return None
    observation = specs.observation_spec.zero()
    batch = observation.batch_size
    rows = TensorDict({**observation.to_dict(), "action": specs.action_spec.zero()}, batch, device=observation.device)
    if any(rows.get(key, None) is None for key in critic.in_keys) or VALUE_KEY not in critic.out_keys:
        return None
    devices = [rows.device] if rows.device is not None and rows.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):  # the copy may draw numbers, and keeps statistics
        return copy.deepcopy(critic)(rows).get(VALUE_KEY).shape[-1]
