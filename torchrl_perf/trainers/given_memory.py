"""Actor and critic from Python that stand on one recurrent module, TorchRL's or the package's."""

from typing import Any, cast

from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.modules import GRUModule, LSTMModule

from torchrl_perf.modules.memory.module import INIT_KEY, MemoryModule
from torchrl_perf.modules.memory.recurrent import DeviceGRU, DeviceLSTM

__all__ = ["capturable_memory", "on_shared_memory"]

RECURRENT = (MemoryModule, GRUModule, LSTMModule)


def on_shared_memory(actor: nn.Module | None, critic: nn.Module | None) -> tuple[nn.Module | None, nn.Module | None]:
    """Both networks with a memory that can be captured in place of TorchRL's; unchanged where neither has one.

    Parameters are shared, not copied: what is learnt is learnt by the modules that were given.

    Args:
        actor: ``TensorDictSequential(*trunk, head)``, whose trunk ends with the memory.
        critic: the same trunk, and a head of its own.

    Raises:
        ValueError: for a memory in one of them alone, at another place, or another one in each.
    """
    if not any(_recurrent(network) for network in (actor, critic)):
        return actor, critic
    trunk = _trunk(actor, "actor")
    of_critic = _trunk(critic, "critic")
    if [id(module) for module in trunk] != [id(module) for module in of_critic]:
        raise ValueError(
            "critic: expected the modules that the actor stands on, up to its memory, received others. Remedy: "
            "TensorDictSequential(*trunk, head) for both, with one and the same trunk."
        )
    trunk = [*trunk[:-1], capturable_memory(trunk[-1])]
    heads = (list(cast("Any", network))[-1] for network in (actor, critic))
    made = [TensorDictSequential(*trunk, head) for head in heads]
    return made[0], made[1]


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


def _trunk(network: nn.Module | None, name: str) -> list[Any]:
    """The modules of a network up to its memory, which comes before the head."""
    parts = list(cast("Any", network)) if isinstance(network, TensorDictSequential) else []
    if len(parts) < 2 or not isinstance(parts[-2], RECURRENT) or any(map(_recurrent, (*parts[:-2], parts[-1]))):
        received = (
            "none" if network is None else f"{type(network).__name__} of {[type(part).__name__ for part in parts]}"
        )
        raise ValueError(
            f"{name}: expected with a memory TensorDictSequential(*trunk, head), whose trunk ends with the recurrent "
            f"module, received {received}. Remedy: one module for what lies above the memory, and one memory for actor "
            "and critic."
        )
    return parts[:-1]
