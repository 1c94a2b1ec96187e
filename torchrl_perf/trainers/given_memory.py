"""Actor and critic from Python that stand on one recurrent module, TorchRL's or the package's."""

from typing import Any

from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torchrl.modules import GRUModule, LSTMModule

from torchrl_perf.modules.memory.module import INIT_KEY, MemoryModule
from torchrl_perf.modules.memory.recurrent import DeviceGRU, DeviceLSTM

__all__ = ["capturable_memory", "on_shared_memory"]

RECURRENT = (MemoryModule, GRUModule, LSTMModule)


def on_shared_memory(actor: nn.Module | None, critic: nn.Module | None) -> tuple[nn.Module | None, nn.Module | None]:
    """Both networks as a trunk and a head, on a memory that can be captured in place of TorchRL's.

    Parameters are shared, not copied: what is learnt is learnt by the modules that were given. Networks of which not
    both have a memory are returned as they are.

    Args:
        actor: a sequence of TensorDict modules, one of them recurrent.
        critic: one that begins with the same modules, up to the recurrent one.

    Raises:
        ValueError: for a memory that is not one of the modules themselves, several in one network, or another one in
            each.
    """
    if not (_recurrent(actor) and _recurrent(critic)):
        return actor, critic
    (trunk, of_actor), (other, of_critic) = _split(actor, "actor"), _split(critic, "critic")
    if [id(module) for module in trunk] != [id(module) for module in other]:
        raise ValueError(
            "critic: expected the modules that the actor stands on, up to its memory, received others. Remedy: "
            "TensorDictSequential(*trunk, head) for both, with one and the same trunk."
        )
    trunk = [*trunk[:-1], capturable_memory(trunk[-1])]
    return TensorDictSequential(*trunk, of_actor), TensorDictSequential(*trunk, of_critic)


def capturable_memory(module: TensorDictModuleBase) -> MemoryModule:
    """A memory as it is, or the counterpart of TorchRL's ``GRUModule`` or ``LSTMModule`` with its parameters.

    Raises:
        ValueError: for a module without counterpart, such as one that reads backwards in time.
    """
    if isinstance(module, MemoryModule):
        return module
    given: Any = module
    keys = {"in_keys": [key for key in given.in_keys if key != INIT_KEY], "out_keys": list(given.out_keys)}
    return DeviceGRU(gru=given.gru, **keys) if isinstance(module, GRUModule) else DeviceLSTM(lstm=given.lstm, **keys)


def _recurrent(network: nn.Module | None) -> bool:
    return network is not None and any(isinstance(module, RECURRENT) for module in network.modules())


def _split(network: Any, name: str) -> tuple[list[Any], TensorDictModuleBase]:
    """The modules of a network up to its memory, and what lies above as one."""
    parts = list(network) if isinstance(network, TensorDictSequential) else []
    memories = [index for index, part in enumerate(parts) if isinstance(part, RECURRENT)]
    if len(memories) != 1 or sum(map(_recurrent, parts)) != 1 or memories[0] + 1 == len(parts):
        raise ValueError(
            f"{name}: expected TensorDictSequential(*trunk, head), whose trunk ends with its only recurrent module, "
            f"received {type(network).__name__} of {[type(part).__name__ for part in parts]}. Remedy: one memory for "
            "actor and critic, as a module of the sequence itself; it may have several layers."
        )
    trunk, above = parts[: memories[0] + 1], parts[memories[0] + 1 :]
    if len(above) == 1:
        return trunk, above[0]
    draws = isinstance(above[-1], ProbabilisticTensorDictModule)
    return trunk, (ProbabilisticTensorDictSequential if draws else TensorDictSequential)(*above)
