"""A recurrent core as a TensorDict module: one step, or a sequence, with resets inside."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from tensordict.utils import NestedKey, unravel_key, unravel_key_list
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.modules import GRUModule, LSTMModule, recurrent_mode

from torchrl_perf.modules.memory.core import MemoryCore
from torchrl_perf.modules.policy_state import PolicyState

__all__ = ["INIT_KEY", "MemoryModule", "memories_of", "refuse_memory_of"]

INIT_KEY = "is_init"


class MemoryModule(TensorDictModuleBase):
    """Reads an input, the states of the core and "is_init"; writes an output, and the new states under "next".

    **Step or sequence.** A batch whose last dimension is named "time", as those of the collectors here are, is a
    sequence; any other is a step, each row for itself. Within TorchRL's ``set_recurrent_mode(True)``, which TorchRL's
    losses and estimators enter, every batch is a sequence along its last dimension, and within
    ``set_recurrent_mode(False)`` none is. ``default_recurrent_mode`` stands for the name where it is given. In compiled
    functions copies of a batch have no names, so that one of these has to say which it is.

    **Resets.** The states of a row are 0 before each step with a true "is_init", in both forms, at the first step of a
    sequence too: nothing of an episode reaches the next one, in values or gradients.

    **States.** A sequence starts from the states at its first step and ignores those of later ones; without the entry
    it starts from 0. Under "next" are the states after each step. (TorchRL's modules leave 0 there for all steps but
    the last.)

    Dimension key: ``L`` layers, ``S`` numbers of a state.

    Keys read: the first of ``in_keys`` ``[*, I]``, the states ``[*, L, S]``, and "is_init" bool ``[*]`` or ``[*, 1]``.
    Written: the first of ``out_keys`` ``[*, H]``, and the states.

    Args:
        name: attribute of the core, the first part of the names of its parameters.
        core: the layers.
        in_keys: input and states, with or without "is_init".
        out_keys: output and states.
        default_recurrent_mode: whether batches are sequences where no ``set_recurrent_mode`` says so; None: by the name
            of their last dimension.

    Raises:
        ValueError: for a wrong number of keys; when called, for a batch without "is_init", states of another size, and
            in a compiled function a batch of several dimensions without names where no mode is set.
        KeyError: when called, for a batch without the input.
    """

    def __init__(
        self,
        name: str,
        core: MemoryCore,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey],
        default_recurrent_mode: bool | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, core)
        read, written = unravel_key_list(list(in_keys)), unravel_key_list(list(out_keys))
        wanted = 1 + len(core.state_sizes)
        if len(read) == wanted:
            read = [*read, INIT_KEY]
        if len(read) != wanted + 1 or len(written) != wanted:
            raise ValueError(
                f"expected in_keys of an input, {wanted - 1} states and perhaps a flag of first steps, and out_keys of "
                f"an output and as many states, received {list(in_keys)} and {list(out_keys)}. Remedy: in_key and "
                "out_key alone, which leave the names of the states to the module."
            )
        if default_recurrent_mode not in (None, False, True):
            raise ValueError(
                f"default_recurrent_mode: expected True, False or None, received {default_recurrent_mode!r}. Remedy: "
                "None, by which the name of a batch's last dimension decides."
            )
        self.in_keys, self.out_keys = read, written
        self.default_recurrent_mode = default_recurrent_mode

    @property
    def core(self) -> MemoryCore:
        """The layers, as functions of tensors."""
        return getattr(self, self._name)

    @property
    def state_keys(self) -> list[NestedKey]:
        """Root entries that hold the states."""
        return self.in_keys[1:-1]

    @property
    def recurrent_mode(self) -> bool | None:
        """What ``set_recurrent_mode`` says, else ``default_recurrent_mode``; None: by the name of the last dim."""
        mode = recurrent_mode()
        return self.default_recurrent_mode if mode is None else mode

    def make_tensordict_primer(self) -> PolicyState:
        """The transform that carries the states in an env, 0 at each reset, and adds them to its specs.

        Raises:
            ValueError: where the states are not written under "next" by the names that they are read from.
        """
        expected = [unravel_key(("next", key)) for key in self.state_keys]
        if self.out_keys[1:] != expected:
            raise ValueError(
                f"expected states in {expected} among the out_keys, received {self.out_keys[1:]}. Remedy: those names, "
                "by which an env passes a state to the next step."
            )
        sizes = zip(self.state_keys, self.core.state_sizes, strict=True)
        layers, dtype = self.core.num_layers, self.core.dtype
        return PolicyState({key: Unbounded(shape=(layers, size), dtype=dtype) for key, size in sizes})

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write output and states, of one step ``[*]`` or of a sequence ``[*, T]``."""
        x, batch = self._input(tensordict), tensordict.batch_size
        mode = self.recurrent_mode
        is_sequence = self._is_named_sequence(tensordict) if mode is None else mode
        if is_sequence and not batch:
            raise ValueError(
                "expected a sequence [*, T] in recurrent mode, received a batch without dimensions. Remedy: "
                "set_recurrent_mode(False) around a single step."
            )
        flags = self._flags(tensordict)
        if is_sequence:
            rows = (batch[:-1].numel(), batch[-1])
            states = [self._rows(tensordict, i, rows[0], sequence=True) for i in range(len(self.state_keys))]
            found = self.core.sequence(x.reshape(*rows, *x.shape[len(batch) :]), tuple(states), flags.reshape(rows))
        else:
            num_rows = batch.numel()
            begins = flags.reshape(num_rows, 1, 1)
            states = [self._rows(tensordict, i, num_rows, sequence=False) for i in range(len(self.state_keys))]
            kept = tuple(state.masked_fill(begins, 0) for state in states)
            found = self.core.step(x.reshape(num_rows, *x.shape[len(batch) :]), kept)
        output, after = found
        for key, value in zip(self.out_keys, (output, *after), strict=True):
            tail = value.shape[2:] if is_sequence else value.shape[1:]
            tensordict.set(key, value.reshape(*batch, *tail))
        return tensordict

    def _is_named_sequence(self, tensordict: TensorDictBase) -> bool:
        names = tensordict.names
        if tensordict.ndim > 1 and torch.compiler.is_compiling() and not any(names):
            _refuse_unnamed(type(self).__name__)
        return names[-1:] == ["time"]

    def _input(self, tensordict: TensorDictBase) -> Tensor:
        x = tensordict.get(self.in_keys[0], None)
        if x is None:
            found = sorted(map(str, tensordict.keys(True, True)))
            raise KeyError(f"expected {self.in_keys[0]!r}, received {found}. Remedy: set in_key.")
        core, batch = self.core, tensordict.batch_size
        # of more dimensions a step would mix its rows, where their numbers happen to be equal
        if x.shape != (*batch, core.input_size):
            raise ValueError(
                f"{self.in_keys[0]!r}: expected [{_listed(batch)}{core.input_size}], received {list(x.shape)}. Remedy: "
                f"an input_size of what comes in, and a network below that makes one vector of it."
            )
        if x.dtype != core.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"{self.in_keys[0]!r}: expected {core.dtype}, that of the parameters, received {x.dtype}. Remedy: "
                f"{type(self).__name__}(..., dtype={x.dtype}), or an input of their dtype."
            )
        return x

    def _flags(self, tensordict: TensorDictBase) -> Tensor:
        flags = tensordict.get(self.in_keys[-1], None)
        if flags is None:
            raise ValueError(
                f"{type(self).__name__}: expected {self.in_keys[-1]!r}, True where an episode begins, received "
                f"{sorted(map(str, tensordict.keys(True, True)))}. Remedy: an env that writes it, or TorchRL's "
                "InitTracker; without it a state would pass from episode to episode."
            )
        batch = tensordict.batch_size
        if flags.dtype is not torch.bool or flags.shape not in (batch, (*batch, 1)):
            raise ValueError(
                f"{self.in_keys[-1]!r}: expected bool [{_listed(batch)}1], received {flags.dtype} {list(flags.shape)}. "
                "Remedy: one flag a step, True where an episode begins."
            )
        return flags

    def _rows(self, tensordict: TensorDictBase, index: int, rows: int, *, sequence: bool) -> Tensor:
        """A state ``[rows, L, S]``: that of the first step of a sequence, or 0 where there is none."""
        core, key = self.core, self.state_keys[index]
        shape = (core.num_layers, core.state_sizes[index])
        state = tensordict.get(key, None)
        if state is None:
            return torch.zeros(rows, *shape, dtype=core.dtype, device=core.weight.device)
        if state.shape != (*tensordict.batch_size, *shape):
            raise ValueError(
                f"{key!r}: expected a state [*, {shape[0]}, {shape[1]}] of {shape[0]} layers, received "
                f"{list(state.shape)}. Remedy: the module that it was made with, or an env with this module's "
                "make_tensordict_primer()."
            )
        if sequence:
            steps = tensordict.ndim - 1
            # of no steps, there is no state to start from, and nothing that reads it
            state = state.select(steps, 0) if state.shape[steps] else state.new_zeros(rows, *shape)
        return state.reshape(rows, *shape).to(core.dtype)


def _listed(batch: torch.Size) -> str:
    return "".join(f"{size}, " for size in batch)


# raised within a graph, it would only send the compiler back to eager mode
@torch.compiler.disable(reason="a memory expected set_recurrent_mode around a compiled call, where names get lost")
def _refuse_unnamed(name: str) -> None:
    raise ValueError(
        f"{name}: expected set_recurrent_mode around a compiled call on several batch dimensions, which lose "
        "their names there, received none. Remedy: torchrl.modules.set_recurrent_mode(True) for sequences, "
        "False for single steps."
    )


def memories_of(network: nn.Module) -> list[MemoryModule]:
    """The recurrent modules of a network, if all of them keep the state of each step of a sequence; else none."""
    modules = list(network.modules())
    known = [module for module in modules if isinstance(module, MemoryModule)]
    return [] if any(isinstance(module, LSTMModule | GRUModule) for module in modules) else known


def refuse_memory_of(name: str, network: nn.Module, why: str) -> None:
    """Refuse a network with a recurrent module of the package or of TorchRL.

    Args:
        name: of the network, for the message.
        network: the network.
        why: what it is wanted for.

    Raises:
        ValueError: naming the module.
    """
    for path, module in network.named_modules():
        if isinstance(module, MemoryModule | LSTMModule | GRUModule):
            raise ValueError(
                f"{name}: expected a network without memory, {why}, received the recurrent {type(module).__name__} at "
                f"{path!r}. Remedy: networks of the memory's features, which it writes at the root by a sequence and "
                "under 'next' by a step from the state after each; --memory of the trainers does it (docs/memory.md)."
            )
