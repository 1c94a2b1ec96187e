"""Recurrent layers over ``[N, T]`` sequences, to be timed: this package's, cuDNN's and TorchRL's."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import GRUModule, set_recurrent_mode

from torchrl_perf.modules.memory.core import MemoryCore
from torchrl_perf.modules.memory.gates import GRUCore, LSTMCore
from torchrl_perf.modules.memory.linear import LRUCore, MinGRUCore

__all__ = ["CAPTURED", "SEQUENCES", "make_sequence"]

Call = Callable[[Tensor, Tensor], Tensor]

OURS = ("gru", "lstm", "mingru", "lru")
CUDNN = ("cudnn-gru", "cudnn-lstm")
TORCHRL = ("torchrl-pad", "torchrl-scan", "torchrl-triton")
SEQUENCES = (*OURS, *CUDNN, *TORCHRL)
"""Layers by name; those of cuDNN know no resets, and TorchRL's are ``GRUModule`` by its back ends."""
CAPTURED = (*OURS, *CUDNN, "torchrl-triton")
"""Those that can be recorded into a graph; TorchRL's other back ends ask the host where episodes begin."""


def make_sequence(name: str, size: int, device: torch.device) -> tuple[nn.Module, Call]:
    """A layer, and what calls it on ``x [N, T, size]`` and ``begins [N, T]`` from states of 0: ``[N, T, size]``.

    Args:
        name: one of :data:`SEQUENCES`.
        size: of inputs and state.
        device: of the parameters.
    """
    if name in OURS:
        return _own(name, size, device)
    if name in CUDNN:
        kind = nn.GRU if name == "cudnn-gru" else nn.LSTM
        layer = kind(size, size, batch_first=True, device=device)
        return layer, lambda x, _: layer(x)[0]
    return _torchrl(name.removeprefix("torchrl-"), size, device)


def _own(name: str, size: int, device: torch.device) -> tuple[nn.Module, Call]:
    place: dict[str, Any] = {"device": device}
    make: dict[str, Callable[[], MemoryCore]] = {
        "gru": lambda: GRUCore(size, size, 1, True, 0.0, **place),
        "lstm": lambda: LSTMCore(size, size, 1, True, 0.0, **place),
        "mingru": lambda: MinGRUCore(size, size, 1, True, 0.0, **place),
        "lru": lambda: LRUCore(size, size, 1, 0.0, **place),
    }
    core = make[name]()

    def call(x: Tensor, begins: Tensor) -> Tensor:
        states = tuple(x.new_zeros(len(x), 1, each) for each in core.state_sizes)
        return core.sequence(x, states, begins)[0]

    return core, call


def _torchrl(backend: str, size: int, device: torch.device) -> tuple[nn.Module, Call]:
    if backend == "triton" and device.type != "cuda":
        raise RuntimeError(f"device: expected 'cuda' for torchrl-triton, received '{device}'. Remedy: --sequences.")
    options: Any = {"recurrent_backend": backend, "device": device}
    module = GRUModule(size, size, in_key="x", out_key="y", **options)

    def call(x: Tensor, begins: Tensor) -> Tensor:
        batch = TensorDict({"x": x, "is_init": begins.unsqueeze(-1)}, x.shape[:2])
        with set_recurrent_mode(True):
            return module(batch)["y"]

    return module, call
