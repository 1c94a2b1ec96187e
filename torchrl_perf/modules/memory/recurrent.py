"""GRU, LSTM, minGRU and linear recurrent units as TensorDict modules."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import nn
from torchrl.modules import GRUModule, LSTMModule

from torchrl_perf.modules.memory.core import MemoryCore
from torchrl_perf.modules.memory.gates import GatedCore, GRUCore, LSTMCore
from torchrl_perf.modules.memory.linear import LRUCore, MinGRUCore
from torchrl_perf.modules.memory.module import MemoryModule

__all__ = ["LRU", "DeviceGRU", "DeviceLSTM", "MinGRU"]

Keys = Sequence[NestedKey]
_BACKENDS: dict[str, tuple[Any, ...]] = {
    "python_based": (False, True),
    "recurrent_backend": ("auto", "pad", "scan", "triton"),
    "recurrent_compute_dtype": (torch.float32,),
    "recurrent_recompute": ("none", "full"),
    "recurrent_matmul_precision": ("auto", "fast", "high-prec", "ieee", "tf32", "tf32x3"),
}
"""TorchRL's choices among its programs, which have equal results. Products of 16 bits are none of them."""


def _names(
    in_key: NestedKey | None, in_keys: Keys | None, out_key: NestedKey | None, out_keys: Keys | None, states: list[str]
) -> tuple[Keys, Keys]:
    """Both lists of keys, of which each is given whole or by its first entry."""
    for name, one, several in (("in_key", in_key, in_keys), ("out_key", out_key, out_keys)):
        if (one is None) == (several is None):
            raise ValueError(
                f"expected one of {name} and {name}s, received {name}={one!r} and {name}s={several!r}. Remedy: "
                f"{name}='...', which leaves the names of the states to the module."
            )
    read = [in_key, *states] if in_keys is None else in_keys
    written = [out_key, *(("next", state) for state in states)] if out_keys is None else out_keys
    return read, written  # pyright: ignore


def _gated(kind: type[GatedCore], given: nn.RNNBase | None, options: dict[str, Any], backends: dict[str, Any]) -> Any:
    """The core of a module with TorchRL's arguments."""
    unknown = sorted(backends.keys() - _BACKENDS)
    if unknown:
        raise TypeError(f"expected arguments of TorchRL's module, received {unknown}. Remedy: leave them out.")
    for name, value in backends.items():
        if value not in _BACKENDS[name]:
            raise ValueError(f"{name}: expected one of {_BACKENDS[name]}, received {value!r}. Remedy: leave it out.")
    batch_first, bidirectional = options.pop("batch_first"), options.pop("bidirectional")
    if not batch_first or bidirectional or options.pop("proj_size", 0):
        raise ValueError(
            f"expected batch_first=True, bidirectional=False and no proj_size, received {batch_first} and "
            f"{bidirectional}. Remedy: leave them out; a policy cannot read the future, and batches are [N, T]."
        )
    sizes = options["input_size"], options["hidden_size"]
    if given is not None:
        if sizes != (None, None):
            raise ValueError(
                f"expected sizes or a {kind.kind.__name__}, received both. Remedy: leave out input_size and "
                "hidden_size."
            )
        core = kind.of(given)
        _check_given(core, options)
        return core
    if None in sizes:
        raise ValueError(f"expected input_size and hidden_size, received {sizes}. Remedy: give both.")
    return kind(**options)


def _check_given(core: GatedCore, options: dict[str, Any]) -> None:
    """Refuse arguments that a given module contradicts, which would be passed over."""
    weight = next(core.parameters())
    usual = {"num_layers": 1, "bias": True, "dropout": 0.0, "device": None, "dtype": None}
    has = {"device": weight.device, "dtype": weight.dtype}
    for name, value in usual.items():
        own, wanted = has[name] if name in has else getattr(core, name), options[name]
        if wanted != value and (torch.device(wanted) if name == "device" else wanted) != own:
            raise ValueError(
                f"{name}: expected that of the given module, {own}, received {wanted}. Remedy: leave it out, or sizes "
                "in place of the module."
            )


class DeviceGRU(MemoryModule):
    """A GRU (arXiv:1406.1078), the counterpart of TorchRL's ``GRUModule`` without host waits.

    It takes the arguments of ``GRUModule``, has the names of its parameters (``module.load_state_dict`` takes the
    state of either) and reads and writes the same keys; resets, states and the choice between a step and a sequence are
    those of :class:`~torchrl_perf.modules.memory.module.MemoryModule`. TorchRL's asks the host whether a row has been
    reset, at each step and at each sequence, which it then cuts to pieces of unequal length.

    Keys read: ``in_key`` ``[*, I]``, "recurrent_state" ``[*, L, H]`` and "is_init" bool ``[*]`` or ``[*, 1]``. Written:
    ``out_key`` ``[*, H]`` and ``("next", "recurrent_state")``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: whether there are biases.
        batch_first: True.
        dropout: between layers, in training.
        bidirectional: False.
        in_key: of the input.
        in_keys: of input and state, in place of ``in_key``.
        out_key: of the output.
        out_keys: of output and state, in place of ``out_key``.
        device: of the parameters.
        dtype: of the parameters, which is that of states and outputs.
        gru: an ``nn.GRU`` whose parameters are used, in place of the sizes.
        default_recurrent_mode: see ``MemoryModule``.
        backends: TorchRL's ``python_based`` and ``recurrent_*``, which choose among its programs. Here there is one.

    Raises:
        ValueError: for sizes, keys or a module that do not fit, a backward direction, or projections.
        TypeError: for an argument that TorchRL's module does not have.
    """

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        in_key: NestedKey | None = None,
        in_keys: Keys | None = None,
        out_key: NestedKey | None = None,
        out_keys: Keys | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gru: nn.GRU | None = None,
        default_recurrent_mode: bool | None = None,
        **backends: Any,
    ) -> None:
        options = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers, "bias": bias}
        options |= {"dropout": dropout, "device": device, "dtype": dtype}
        options |= {"batch_first": batch_first, "bidirectional": bidirectional}
        core = _gated(GRUCore, gru, options, backends)
        names = _names(in_key, in_keys, out_key, out_keys, ["recurrent_state"])
        super().__init__("gru", core, *names, default_recurrent_mode)

    def load_rnn(self, rnn: nn.GRU | GRUModule) -> None:
        """Copy the weights of an ``nn.GRU``, or of the one in TorchRL's module.

        Raises:
            ValueError: for another kind of module, or one of other sizes.
        """
        self.gru.load_rnn(rnn.gru if isinstance(rnn, GRUModule) else rnn)  # pyright: ignore


class DeviceLSTM(MemoryModule):
    """An LSTM, the counterpart of TorchRL's ``LSTMModule`` without host waits; see :class:`DeviceGRU`.

    Keys read: ``in_key`` ``[*, I]``, "recurrent_state_h" and "recurrent_state_c" ``[*, L, H]`` and "is_init" bool
    ``[*]`` or ``[*, 1]``. Written: ``out_key`` ``[*, H]`` and both states under "next".

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: whether there are biases.
        batch_first: True.
        dropout: between layers, in training.
        proj_size: 0.
        bidirectional: False.
        in_key: of the input.
        in_keys: of input and both states, in place of ``in_key``.
        out_key: of the output.
        out_keys: of output and both states, in place of ``out_key``.
        device: of the parameters.
        dtype: of the parameters, which is that of states and outputs.
        lstm: an ``nn.LSTM`` whose parameters are used, in place of the sizes.
        default_recurrent_mode: see ``MemoryModule``.
        backends: TorchRL's ``python_based`` and ``recurrent_*``, which choose among its programs. Here there is one.

    Raises:
        ValueError: for sizes, keys or a module that do not fit, a backward direction, or projections.
        TypeError: for an argument that TorchRL's module does not have.
    """

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        proj_size: int = 0,
        bidirectional: bool = False,
        *,
        in_key: NestedKey | None = None,
        in_keys: Keys | None = None,
        out_key: NestedKey | None = None,
        out_keys: Keys | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        lstm: nn.LSTM | None = None,
        default_recurrent_mode: bool | None = None,
        **backends: Any,
    ) -> None:
        options = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers, "bias": bias}
        options |= {"dropout": dropout, "device": device, "dtype": dtype, "proj_size": proj_size}
        options |= {"batch_first": batch_first, "bidirectional": bidirectional}
        core = _gated(LSTMCore, lstm, options, backends)
        names = _names(in_key, in_keys, out_key, out_keys, ["recurrent_state_h", "recurrent_state_c"])
        super().__init__("lstm", core, *names, default_recurrent_mode)

    def load_rnn(self, rnn: nn.LSTM | LSTMModule) -> None:
        """Copy the weights of an ``nn.LSTM``, or of the one in TorchRL's module.

        Raises:
            ValueError: for another kind of module, or one of other sizes.
        """
        self.lstm.load_rnn(rnn.lstm if isinstance(rnn, LSTMModule) else rnn)  # pyright: ignore


class MinGRU(MemoryModule):
    """Layers of minGRU (arXiv:2410.01201): ``h' = (1 - z) h + z g(c)``, gate and candidate of the input alone.

    A sequence is one scan over time a layer, with the same resets as :class:`DeviceGRU`. A state forgets by what comes
    in and never by what it holds. Unlike in the paper the scan is not in logarithms, which only guard products that do
    not arise here; ``g``, which keeps states positive, is the paper's. At first gates differ far more from unit to unit
    and from input to input than in the paper, so that a state may last for thousands of steps: see
    :class:`~torchrl_perf.modules.memory.linear.MinGRUCore`.

    Keys read: ``in_key`` ``[*, I]``, "recurrent_state" ``[*, L, H]`` and "is_init" bool ``[*]`` or ``[*, 1]``. Written:
    ``out_key`` ``[*, H]`` and ``("next", "recurrent_state")``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: whether the maps of the inputs have biases.
        dropout: between layers, in training.
        in_key: of the input.
        in_keys: of input and state, in place of ``in_key``.
        out_key: of the output.
        out_keys: of output and state, in place of ``out_key``.
        device: of the parameters.
        dtype: of the parameters, which is that of states and outputs.
        default_recurrent_mode: see ``MemoryModule``.

    Raises:
        ValueError: for sizes or keys that do not fit.
    """

    def __init__(  # noqa: PLR0913  as DeviceGRU
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        *,
        in_key: NestedKey | None = None,
        in_keys: Keys | None = None,
        out_key: NestedKey | None = None,
        out_keys: Keys | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        core: MemoryCore = MinGRUCore(input_size, hidden_size, num_layers, bias, dropout, device=device, dtype=dtype)
        names = _names(in_key, in_keys, out_key, out_keys, ["recurrent_state"])
        super().__init__("min_gru", core, *names, default_recurrent_mode)


class LRU(MemoryModule):
    """Blocks of linear recurrent units (arXiv:2303.06349): complex states that turn and decay, read by a gated layer.

    A sequence is two scans over time a layer, with the same resets as :class:`DeviceGRU`. Two things differ from the
    paper. States last from 2 to 10,000 steps at first, each octave as likely, where the paper's lie on a ring of moduli
    and last a few hundred at most. And inputs are multiplied by ``|1 - lambda|``, not by ``(1 - |lambda|^2)^(1/2)``: a
    long corridor of equal observations would else drown what came before it.

    Keys read: ``in_key`` ``[*, I]``, "recurrent_state" ``[*, L, 2 H]`` and "is_init" bool ``[*]`` or ``[*, 1]``.
    Written: ``out_key`` ``[*, H]`` and ``("next", "recurrent_state")``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        dropout: between layers, in training.
        in_key: of the input.
        in_keys: of input and state, in place of ``in_key``.
        out_key: of the output.
        out_keys: of output and state, in place of ``out_key``.
        device: of the parameters.
        dtype: of the parameters, which is that of states and outputs.
        default_recurrent_mode: see ``MemoryModule``.

    Raises:
        ValueError: for sizes or keys that do not fit.
    """

    def __init__(  # noqa: PLR0913  as DeviceGRU
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        *,
        in_key: NestedKey | None = None,
        in_keys: Keys | None = None,
        out_key: NestedKey | None = None,
        out_keys: Keys | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        core: MemoryCore = LRUCore(input_size, hidden_size, num_layers, dropout, device=device, dtype=dtype)
        names = _names(in_key, in_keys, out_key, out_keys, ["recurrent_state"])
        super().__init__("lru", core, *names, default_recurrent_mode)
