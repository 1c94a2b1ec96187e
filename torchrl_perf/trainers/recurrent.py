"""What carries state from one step to the next, and is refused where single steps are shuffled."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import nn
from torchrl.envs import Compose, TensorDictPrimer, Transform, TransformedEnv
from torchrl.modules import DTActor, GRUModule, LSTMModule, OnlineDTActor

from torchrl_perf.modules.policy_state import PolicyState

__all__ = ["recurrence_of", "refuse_recurrent", "refuse_recurrent_rows"]

CELLS = (nn.RNNBase, nn.RNNCellBase, LSTMModule, GRUModule, DTActor, OnlineDTActor)
ROW_STATE = "recurrent_state"  # what TorchRL's modules call it by default
REMEDY = (
    "Remedy: a network of what one row holds, such as observations stacked by TorchRL's CatFrames below a "
    "TransformedEnv; for PPO actor and critic that stand on one recurrent module (docs/memory.md); or a loop of your "
    "own on sequences: TorchRL's losses on a collector's batches [N, T] as they are, or on slices of a "
    "DeviceSliceSampler, within set_recurrent_mode(True)."
)


def refuse_recurrent(
    owner: str, parts: Mapping[str, Any], *, env: Any = None, own_state: Collection[NestedKey] = ()
) -> None:
    """Refuse networks that carry state, in a trainer that learns from shuffled rows.

    Shuffled, the rows of a minibatch are no sequence: a recurrent network takes them for one, or starts each from a
    state that is not its own, and every ratio, target and gradient is wrong without a word.

    Args:
        owner: name of the trainer, for the message.
        parts: networks by name; what is no module, such as None, is left out.
        env: whose transforms may add state for a policy.
        own_state: entries of such state that the trainer itself learns from in the right way.

    Raises:
        ValueError: naming the part, what is recurrent in it, and what works in its place.
    """
    state = {key: kind for key, kind in _primed(env) if key not in own_state}
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        found = recurrence_of(part, own_state)
        read = sorted(_read(part) & set(state), key=str)
        if not found and read:
            found = f"one that reads {read[0]!r}, state that the env's {state[read[0]]} carries"
        if found:
            raise ValueError(
                f"{name}: expected a network without memory, since {owner} learns from single steps in random order, "
                f"received {found}. {REMEDY}"
            )


def recurrence_of(part: nn.Module, own_state: Collection[NestedKey] = ()) -> str:
    """What is recurrent in a module, in words; an empty text where nothing is.

    Args:
        part: network, policy or loss.
        own_state: entries that do not count.
    """
    for path, module in part.named_modules():
        place = f" at {path!r}" if path else ""
        if isinstance(module, CELLS):
            return f"the recurrent {type(module).__name__}{place}"
    read = _read(part)
    for path, module in part.named_modules():
        for key in _keys(module, "out_keys"):
            if isinstance(key, tuple) and key[0] == "next":
                carried = unravel_key(key[1:])
                if carried in read and carried not in own_state:
                    place = f" at {path!r}" if path else ""
                    return f"{type(module).__name__}{place}, which writes ('next', {carried!r}) for the step after it"
    return ""


def refuse_recurrent_rows(batch: TensorDictBase, name: str) -> None:
    """Refuse to shuffle a batch that holds the states of TorchRL's recurrent modules.

    Raises:
        ValueError: naming the entry.
    """
    for key in batch.keys():
        if isinstance(key, str) and key.startswith(ROW_STATE):
            raise ValueError(
                f"{name}: expected rows that stand alone, since it shuffles single steps, received a batch with the "
                f"state {key!r} of a recurrent module. {REMEDY}"
            )


def _primed(env: Any) -> Iterator[tuple[NestedKey, str]]:
    """Entries that an env's transforms carry for a policy, and the transform of each."""
    while isinstance(env, TransformedEnv):
        for transform in _each(env.transform):
            if isinstance(transform, TensorDictPrimer):
                yield from ((unravel_key(key), type(transform).__name__) for key in transform.primers.keys(True, True))
            elif isinstance(transform, PolicyState):
                yield from ((unravel_key(key), type(transform).__name__) for key in transform.specs)
        env = env.base_env


def _each(transform: Transform | None) -> Iterator[Transform]:
    if isinstance(transform, Compose):
        for part in transform.transforms:
            yield from _each(part)
    elif transform is not None:
        yield transform


def _read(part: nn.Module) -> set[NestedKey]:
    """Root entries that a module or one within it reads."""
    return {key for module in part.modules() for key in _keys(module, "in_keys")}


def _keys(module: nn.Module, name: str) -> list[NestedKey]:
    keys = getattr(module, name, None)
    return [unravel_key(key) for key in keys if isinstance(key, str | tuple)] if isinstance(keys, list | tuple) else []
