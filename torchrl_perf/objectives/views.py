"""TorchRL's view of a loss's networks: its parameters as TensorDicts, and the names in its state."""

from typing import Any

from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torchrl.objectives.utils import RANDOM_MODULE_LIST

from torchrl_perf.objectives.checks import checked_gamma
from torchrl_perf.objectives.twins import Twins

FORMER_NAMES = {"actor": "actor_network", "critic": "qvalue_network", "network": "value_network"}


def holder(network: nn.Module) -> nn.Module:
    """The module whose tree of parameters is TorchRL's."""
    return network.net if isinstance(network, Twins) else network


def params_of(network: nn.Module, *, as_buffers: bool = False) -> TensorDictParams:
    """TorchRL's view of a network's parameters, which shares their memory."""
    params = TensorDict.from_module(holder(network))
    size = [network.num_members] if isinstance(network, Twins) else []
    leaf = (lambda value: nn.Buffer(value.data)) if as_buffers else (lambda value: value)
    return TensorDictParams(params.apply(leaf, batch_size=size, filter_empty=False), no_convert=True)


def buffers_of(network: nn.Module) -> dict[str, Tensor]:
    """All buffers of a network by name."""
    return dict(network.named_buffers(remove_duplicate=False))


def randomness_of(chosen: str | None, network: nn.Module) -> str:
    """How members of an ensemble draw numbers: as chosen, else TorchRL's choice for networks with dropout and such."""
    draws = any(isinstance(part, RANDOM_MODULE_LIST) for part in network.modules())
    return chosen or ("different" if draws else "error")


def torchrl_name(loss: Any, name: str) -> str:
    """TorchRL's name of a parameter or buffer of a loss."""
    for ours, theirs in loss.name_pairs():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def joined(prefix: str, name: str) -> str:
    """A name with a prefix, where there is one."""
    return f"{prefix}.{name}" if prefix else name


def to_torchrl_names(loss: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Gives the entries of a loss's state TorchRL's names."""
    # in the order of old, which a dict keeps
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + torchrl_name(loss, key.removeprefix(prefix))] = state.pop(key)


def from_torchrl_names(loss: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes a state of a loss of TorchRL, or of an earlier version of this package."""
    pairs = [(theirs, ours) for ours, theirs in loss.name_pairs()]
    for former, name in FORMER_NAMES.items():
        pairs += [(f"{start}{former}.", f"{start}{name}.") for start in ("", "target_")]
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        value = state.pop(key)
        if name.endswith(("__batch_size", "__device")):
            continue  # further entries of TorchRL's state
        if name.startswith("_value_estimator."):
            _load_hyperparameter(loss, name.rpartition(".")[2], value)
            continue
        for theirs, ours in pairs:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
                break
        state[prefix + name] = value
    for name in loss.constants:
        value = state.pop(prefix + name, None)
        if value is not None and getattr(loss, name) is not None:
            getattr(loss, name).copy_(value)


def _load_hyperparameter(loss: Any, name: str, value: Tensor) -> None:
    """Loads the discount of TorchRL's value estimator from the state of its loss."""
    if name in ("gamma", "lmbda") and getattr(loss, name) is not None:
        setattr(loss, name, checked_gamma(float(value), name))
