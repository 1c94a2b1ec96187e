"""A CUDA graph in slow motion, for the CPU: the operations of a function, done again on the same tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torchrl_perf.runtime._signature import detached


class EmulatedGraph(TorchDispatchMode):
    """Notes operations while it is active, and repeats them into the tensors that they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.constants: set[int] = set()
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        constant = func is torch.ops.aten.lift_fresh.default or all(id(each) in self.constants for each in given)
        if func is torch.ops.aten._local_scalar_dense.default and not constant:
            raise RuntimeError("operation not permitted when stream is capturing (emulated)")
        for place, argument in enumerate(func._schema.arguments):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or (func.overloadpacket is torch.ops.aten.native_batch_norm and "running" in argument.name):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self.before += [(each, each.clone()) for each in tree_leaves(value) if isinstance(each, Tensor)]
        result = func(*args, **kwargs)
        if constant:  # a number that Python made, which lives on the host where the device is another
            self.constants |= {id(each) for each in tree_leaves(result)}
        self.operations.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """A recording writes nothing."""
        while self.before:
            tensor, value = self.before.pop()
            tensor.data.copy_(value)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, result in self.operations:
                # .data: memory alone, neither history nor version
                again = func(*tree_map_only(Tensor, _memory, args), **tree_map_only(Tensor, _memory, kwargs))
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor):
                        old.data.copy_(new)

    def reset(self) -> None:
        self.operations.clear()


def _memory(tensor: Tensor) -> Tensor:
    return tensor.data


def record(fn, device, pool, generators, *, frees_memory=True):
    """As ``torchrl_perf.runtime._graph.record``, for the CPU."""
    graph = EmulatedGraph()
    state, states = torch.get_rng_state(), [generator.get_state() for generator in generators]
    try:
        with graph:
            result = detached(fn())
    finally:
        graph.undo()  # also of one that failed
        torch.set_rng_state(state)
        for generator, before in zip(generators, states, strict=True):
            generator.set_state(before)
    return graph, result
