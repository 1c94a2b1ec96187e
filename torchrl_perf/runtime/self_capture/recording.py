"""One recorded call: a graph of the forward pass, graphs of its backward passes, and the autograd node between them."""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchrl_perf.runtime._graph import record
from torchrl_perf.runtime.self_capture.conditions import alone_on_side_stream, no_autocast_cache
from torchrl_perf.runtime.self_capture.substitutes import aliased, aliases_of, called_with
from torchrl_perf.runtime.self_capture.watch import Watch
from torchrl_perf.runtime.upstream.tensordicts import entries_of, unchecked
from torchrl_perf.runtime.upstream.tensors import Piece, apply_plain, pieces_of

__all__ = ["NotRecordableError", "Recording", "by_dtype"]

Grads = tuple[Tensor | None, ...]


class NotRecordableError(RuntimeError):
    """Raised for a call that a graph cannot repeat; it has run eagerly up to here, and can go on so."""


class _Output(NamedTuple):
    key: NestedKey
    written: bool
    """Whether it goes into the TensorDict that was given, not into the one that is returned."""


class _Backward:
    """The gradients of some outputs with respect to all leaves: eagerly over the recorded forward, then as a graph.

    Attributes:
        chosen: numbers of the outputs, among those that have a gradient.
        reads: parameters and buffers that these gradients are computed from, as positions in the state.
    """

    def __init__(self, chosen: tuple[int, ...]) -> None:
        self.chosen = chosen
        self.reads: tuple[int, ...] = ()
        self.graph: Any = None
        self.runs_eagerly = True  # at first, so that kernels are loaded and libraries tuned
        self.failed = False
        self.seeds: list[Tensor] = []
        self.missing: tuple[bool, ...] = ()
        self.found: _Packed | None = None


class _Ticket:
    """One call of a recording, kept by the autograd node of its outputs."""

    __slots__ = ("__weakref__", "fresh", "number", "recording", "used", "versions")

    def __init__(self, recording: "Recording", versions: list[int]) -> None:
        self.recording, self.number, self.versions = recording, recording.number, versions
        self.used: set[int] = set()
        self.fresh: list[Tensor] = []


class _Node(torch.autograd.Function):
    """Stands for everything between the leaves and the outputs."""

    @staticmethod
    def forward(ctx: Any, ticket: _Ticket, *leaves: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ticket = ticket
        ctx.set_materialize_grads(False)
        fresh, ticket.fresh = ticket.fresh, []
        return tuple(fresh)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.ticket.recording.backward(ctx.ticket, seeds)


class Recording:
    """One call of a module on a TensorDict of fixed shapes, repeated by graphs.

    Args:
        method: what is called, with the module and the TensorDict.
        module: its parameters are read where they are.
        tensordict: an example of the argument.
        leaves: its tensors, by key.
        watch: the state of the module.
        device: CUDA device with an index.
        pool: memory pool handle of the graphs.

    Raises:
        NotRecordableError: for a result that is no TensorDict, or an input that is written in place.
        Exception: whatever the module or the recording raises.
    """

    def __init__(
        self,
        method: Callable[[Any, TensorDictBase], Any],
        module: nn.Module,
        tensordict: TensorDictBase,
        leaves: dict[NestedKey, Tensor],
        watch: Watch,
        device: torch.device,
        pool: Any,
    ) -> None:
        self.number = 0
        self._device, self._pool, self._state = device, pool, watch.state
        self._reads: set[int] | None = None
        self._last: Callable[[], _Ticket | None] = lambda: None
        self._backwards: dict[tuple[int, ...], _Backward] = {}
        self._lock = threading.RLock()
        grad = torch.is_grad_enabled()
        self._inputs = [leaf.detach().clone() for leaf in leaves.values()]
        # what the module sees has a version of its own: loading the inputs must not count as a write to what is saved
        seen = {key: aliased(given) for key, given in zip(leaves, self._inputs, strict=True)}
        for alias, leaf in zip(seen.values(), leaves.values(), strict=True):
            alias.requires_grad_(grad and leaf.requires_grad)
        static = tensordict.empty(recurse=True)
        for key, alias in seen.items():
            static.set(key, alias)
        versions = [alias._version for alias in seen.values()]
        aliases = aliases_of(iter(self._state)) if grad else {}

        def forward() -> None:
            with saved_tensors_hooks(self._pack, self._unpack):
                self._take(called_with(method, module, aliases, static), static, seen)

        with alone_on_side_stream(), no_autocast_cache():
            self._graph, _ = record(forward, device, pool, (), frees_memory=False)
        if written := [key for key, old in zip(seen, versions, strict=True) if seen[key]._version != old]:
            raise NotRecordableError(
                f"argument: expected to be left as it is, received a write to {written[0]!r}. Remedy: a new tensor."
            )
        self._groups = by_dtype(self._inputs)
        self._find_leaves(aliases, list(seen.values()))

    def _take(self, result: Any, static: TensorDictBase, seen: dict[NestedKey, Tensor]) -> None:
        """Keeps what the module returns and what it writes into its argument."""
        if not isinstance(result, TensorDictBase):
            raise NotRecordableError(
                f"result: expected a TensorDict, received {type(result).__name__}. Remedy: a TensorDict."
            )
        self._returns_argument = result is static
        named = [(_Output(key, True), leaf) for key, leaf in static.items(True, True) if seen.get(key) is not leaf]
        if not self._returns_argument:
            self._batch_size = result.batch_size
            self._shell = result.empty(recurse=True)  # batch sizes and names of what lies deeper
            named += [(_Output(key, False), leaf) for key, leaf in result.items(True, True)]
        if strange := [each.key for each, leaf in named if not isinstance(leaf, Tensor)]:
            raise NotRecordableError(
                f"result: expected tensors, received {strange[0]!r} beside them. Remedy: leave it out."
            )
        self._keys = [each for each, _ in named]
        # a leaf that is returned as it is has no history to go back through
        self._outputs = [leaf.clone() if leaf.requires_grad and leaf.grad_fn is None else leaf for _, leaf in named]
        self._results = _Packed([output.detach() for output in self._outputs])

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        # its memory, without the version that a later write to a parameter would raise
        return tensor.data, tensor.untyped_storage().data_ptr()

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        if self._reads is not None:
            self._reads.add(packed[1])
        return packed[0]

    def _find_leaves(self, aliases: dict[int, Tensor], seen: list[Tensor]) -> None:
        """The leaves that the outputs depend on, each beside what it stands for: a parameter or an input's number."""
        self._differentiable = [number for number, output in enumerate(self._outputs) if output.requires_grad]
        owner: dict[int, Tensor | int] = {id(aliases[id(real)]): real for real in self._state if id(real) in aliases}
        owner |= {id(alias): number for number, alias in enumerate(seen)}
        self._leaves = _accumulating([self._outputs[number] for number in self._differentiable])
        self._stands_for = [owner.get(id(leaf), leaf) for leaf in self._leaves]

    # -- forward ------------------------------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Whether some output has one."""
        return bool(self._differentiable)

    @property
    def free(self) -> bool:
        """Whether no backward pass of an earlier call can still come."""
        last = self._last()
        return last is None or len(last.used) == len(self._differentiable)

    def __call__(self, tensordict: TensorDictBase, leaves: Sequence[Tensor]) -> TensorDictBase:
        """The call on these inputs: fresh tensors, with a gradient where the module's have one.

        Args:
            tensordict: the argument, which is written to where the module does so.
            leaves: its tensors, in the order of the example.
        """
        with self._lock:
            with torch.no_grad():
                for targets, numbers in self._groups:
                    torch._foreach_copy_(targets, [leaves[number] for number in numbers])
                self._graph.replay()
                fresh = self._results.fresh()
            self.number += 1
            if self._differentiable:
                ticket = _Ticket(self, [tensor._version for tensor in self._state])
                ticket.fresh = [fresh[number] for number in self._differentiable]
                self._last = weakref.ref(ticket)
                ends = [leaves[owner] if isinstance(owner, int) else owner for owner in self._stands_for]
                for number, output in zip(self._differentiable, apply_plain(_Node, ticket, *ends), strict=True):
                    fresh[number] = output
        returned: dict[NestedKey, Tensor] = {}
        # its type, batch size and device are those of the example, whose entries fitted
        unlocked = None if tensordict.is_locked else entries_of(tensordict)
        for (key, written), value in zip(self._keys, fresh, strict=True):
            if written and unlocked is not None and isinstance(key, str):
                unlocked[key] = value
            elif written:
                tensordict.set(key, value)
            else:
                returned[key] = value
        if self._returns_argument:
            return tensordict
        if all(isinstance(key, str) for key in returned):
            return unchecked(cast("Any", returned), batch_size=self._batch_size)
        result = self._shell.empty(recurse=True)
        for key, value in returned.items():
            result.set(key, value)
        return result

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, ticket: _Ticket, seeds: Sequence[Tensor | None]) -> Grads:
        """Gradients of the leaves.

        Args:
            ticket: the call that is gone back through.
            seeds: gradients of the outputs that have one, None where none arrived.

        Raises:
            RuntimeError: for a gradient of a gradient, a call whose intermediate results are overwritten, and a
                parameter that was written since the call.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward: expected create_graph=False, since a recorded backward pass has no gradient of its own, "
                "received True. Remedy: capture=False."
            )
        with self._lock:
            if ticket.number != self.number:
                raise RuntimeError(
                    "backward: expected one pass through each output, before the next call, received another pass "
                    f"{self.number - ticket.number} calls later. Remedy: add the losses before backward(), or "
                    "capture=False."
                )
            chosen = tuple(number for number, seed in enumerate(seeds) if seed is not None)
            ticket.used.update(chosen)
            way = self._backwards.setdefault(chosen, _Backward(chosen))
            given = [seed for seed in seeds if seed is not None]
            if way.graph is None and (way.runs_eagerly or not self._record_backward(way)):
                found = self._backward_eagerly(way, given)
                self._check_versions(way, ticket)
                return found
            self._check_versions(way, ticket)
            torch._foreach_copy_(way.seeds, given)
            way.graph.replay()
            present = iter(cast("_Packed", way.found).fresh())
            return tuple(None if missing else next(present) for missing in way.missing)

    def _backward_eagerly(self, way: _Backward, seeds: list[Tensor]) -> Grads:
        """Over the recorded forward pass, whose intermediate results are those of the last replay."""
        self._reads = set()
        try:
            with alone_on_side_stream():
                found = self._grads(way, seeds)
        finally:
            reads, self._reads = self._reads, None
        way.runs_eagerly = way.failed
        pointers = [tensor.untyped_storage().data_ptr() for tensor in self._state]
        way.reads = tuple(number for number, pointer in enumerate(pointers) if pointer in reads)
        way.seeds = [torch.empty_like(seed, memory_format=torch.contiguous_format) for seed in seeds]
        return tuple(None if grad is None else _of_this_stream(grad) for grad in found)

    def _grads(self, way: _Backward, seeds: list[Tensor]) -> Grads:
        outputs = [self._outputs[self._differentiable[number]] for number in way.chosen]
        return torch.autograd.grad(outputs, self._leaves, seeds, retain_graph=True, allow_unused=True)

    def _record_backward(self, way: _Backward) -> bool:
        """Records a backward pass that has run once; here, since autograd runs it on this thread and no other."""
        try:
            with alone_on_side_stream():
                way.graph, _ = record(partial(self._pack_grads, way), self._device, self._pool, (), frees_memory=False)
        except Exception:
            way.runs_eagerly = way.failed = True  # over the recorded forward pass it is as right, and slower
        return way.graph is not None

    def _pack_grads(self, way: _Backward) -> None:
        found = self._grads(way, way.seeds)
        way.missing = tuple(grad is None for grad in found)
        way.found = _Packed([grad for grad in found if grad is not None])

    def _check_versions(self, way: _Backward, ticket: _Ticket) -> None:
        for number in way.reads:
            if self._state[number]._version != ticket.versions[number]:
                raise RuntimeError(
                    "backward: expected the parameters that the loss was computed from, received some that were "
                    f"written in place since ({list(self._state[number].shape)}, version "
                    f"{self._state[number]._version} for {ticket.versions[number]}). Remedy: backward() before the "
                    "optimiser's step."
                )

    def release(self) -> None:
        """Gives the memory of the graphs back."""
        for graph in (self._graph, *(way.graph for way in self._backwards.values())):
            if graph is not None:
                graph.reset()
        self._backwards.clear()
        self._outputs, self._leaves = [], []


def _of_this_stream(tensor: Tensor) -> Tensor:
    """A copy in memory of the current stream, of a tensor that the stream of recordings made.

    Freed memory is used again by the stream that it was allocated for, which does not wait for readers on another.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor.clone()


def by_dtype(tensors: list[Tensor]) -> list[tuple[list[Tensor], list[int]]]:
    """Tensors of one dtype, which one launch copies, and their numbers."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
    for number, tensor in enumerate(tensors):
        targets, numbers = groups.setdefault(tensor.dtype, ([], []))
        targets.append(tensor)
        numbers.append(number)
    return list(groups.values())


class _Packed:
    """Tensors that a graph writes into one memory, so that a copy of them all is one launch.

    Each begins at a boundary of 128 bytes, as tensors of their own do at least: kernels add in another order, and
    more slowly, where they cannot read several numbers at once.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._number = len(tensors)
        self._places: list[tuple[torch.dtype, list[int], list[Piece]]] = []
        groups, end = by_dtype(tensors), 0
        for given, numbers in groups:
            places = []
            for tensor in given:
                places.append((tuple(tensor.shape), _contiguous(tensor.shape), end // tensor.element_size()))
                end += -(-tensor.numel() * tensor.element_size() // 128) * 128
            self._places.append((given[0].dtype, numbers, places))
        device = tensors[0].device if tensors else None
        self._memory = torch.zeros(end, dtype=torch.uint8, device=device)
        for (given, _), (dtype, _, places) in zip(groups, self._places, strict=True):
            torch._foreach_copy_(pieces_of(self._memory, dtype, places), given)

    def fresh(self) -> list[Tensor]:
        """Copies, contiguous, that nothing will overwrite."""
        copies: list[Any] = [None] * self._number
        memory = self._memory.clone()
        for dtype, numbers, places in self._places:
            for number, piece in zip(numbers, pieces_of(memory, dtype, places), strict=True):
                copies[number] = piece
        return copies


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _accumulating(outputs: list[Tensor]) -> list[Tensor]:
    """The leaves that outputs depend on, each once, in the order in which they are met."""
    leaves: dict[int, Tensor] = {}
    waiting = [output.grad_fn for output in reversed(outputs)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.setdefault(id(variable), variable)
        waiting += [following for following, _ in node.next_functions]
    return list(leaves.values())
