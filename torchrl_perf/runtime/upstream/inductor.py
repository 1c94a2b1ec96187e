"""torch: what Inductor is told beyond its settings: early kernels wait, pairs become one, attention's seeds stay apart.

With ``triton.enable_pdl`` Inductor's kernels are launched early (see :mod:`torchrl_perf.kernels.dependent`), but wait
only for what the kernel just before them touches, by the names of buffers. That is not enough where that kernel reads
nothing, a fill say, and so waits for nothing itself: the next one may read what the kernel before both still writes,
and a fill may write into memory that was freed and is still read. Here each kernel waits before its first access.
"""

import operator
import re
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

WAIT = "tl.extra.cuda.gdc_wait()"


def waiting(name: str, source: str) -> str:
    """The source of a kernel of Inductor, with a wait as its first statement if it is launched early.

    Args:
        name: of the function.
        source: of its module. One whose function is not found is not launched early.
    """
    if "'launch_pdl': True" not in source:
        return source
    found = re.search(rf"^def {re.escape(name)}\(.*\):\n", source, re.MULTILINE)
    if found is None:
        return source.replace("'launch_pdl': True", "'launch_pdl': False")
    return f"{source[: found.end()]}    {WAIT}\n{source[found.end() :]}"


def wait_first() -> None:
    """Has all kernels that Inductor launches early wait first, from the next compilation on."""
    from torch._dynamo.callback import callback_handler

    if patch_loader not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(patch_loader)


def patch_loader(*_: Any) -> None:
    """Once the compiler is in use: to import it takes seconds."""
    from torch._inductor.async_compile import AsyncCompile

    load = AsyncCompile.triton
    if hasattr(load, "waits"):
        return

    def triton(self: AsyncCompile, kernel_name: str, source_code: str, *args: Any, **options: Any) -> Any:
        return load(self, kernel_name, waiting(kernel_name, source_code), *args, **options)

    triton.waits = True  # pyright: ignore[reportFunctionMemberAccess]
    AsyncCompile.triton = triton


class Pair(NamedTuple):
    """How two calls of an operator become one launch."""

    kind: Callable[[Node], Hashable]
    """What both calls have in common, their input too; None for a call that is left alone."""
    join: Callable[[Graph, Node, Node], tuple[Node, Node]]
    """Adds the joint call and returns the results of both."""

    def replaces(self, graph: Graph, first: Node, second: Node) -> bool:
        """Makes one call in the place of the second; False where that depends on the first."""
        later, node = [first], first.next
        while node is not second:
            if not set(later).isdisjoint(node.all_input_nodes):
                later.append(node)
            node = node.next
        if not set(later).isdisjoint(second.all_input_nodes):
            return False
        with graph.inserting_before(second):
            results = self.join(graph, first, second)
        for old, new in zip((first, second), results, strict=True):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        place = max(results, key=list(graph.nodes).index)
        for each in later[1:]:
            place.append(each)
            place = each
        return True


_PAIRS: dict[Any, Pair] = {}


def pair(
    operator: Any, kind: Callable[[Node], Hashable], join: Callable[[Graph, Node, Node], tuple[Node, Node]]
) -> None:
    """Has two calls of an operator in one compiled function made together; see :class:`Pair`."""
    _PAIRS[operator] = Pair(kind, join)


def call(graph: Graph, function: Any, *args: Any) -> Node:
    """Adds a call, with the shape and dtype of its result."""
    node = graph.call_function(function, args)
    node.meta["val"] = function(*torch.fx.node.map_arg(args, lambda arg: arg.meta["val"]))
    return node


def join_pairs(graph: Graph) -> None:
    """Makes one call of each two that are alike and do not depend on each other."""
    waiting: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        known = _PAIRS.get(node.target) if node.op == "call_function" else None
        kind = None if known is None else known.kind(node)
        if known is None or kind is None:
            continue
        first = waiting.pop((node.target, kind), None)
        if first is None or not known.replaces(graph, first, node):
            waiting[node.target, kind] = node


def part_seeds(graph: Graph) -> None:
    """Gives backward passes of attention a seed of their own, in a graph that holds the forward pass as well.

    Inductor takes the seed and the offset that the forward pass returns for numbers on the GPU, and writes later
    results into their memory. PyTorch returns them on the CPU unless a CUDA graph is captured, where Triton then
    refuses them. Without dropout nothing reads them. With dropout they are needed, and are left. So are those of flash
    attention, uint64 and on the GPU at all times.
    """
    own: Node | None = None
    for node in list(graph.nodes):
        names = [arg.name for arg in getattr(getattr(node.target, "_schema", None), "arguments", ())]
        if not {"philox_seed", "dropout_p"} <= set(names) or node.args[names.index("dropout_p")] != 0.0:
            continue
        for place in map(names.index, ("philox_seed", "philox_offset")):
            seed = node.args[place]
            if not isinstance(seed, Node) or seed.target is not operator.getitem:
                continue  # an input of this graph, into which nothing else is written
            value = seed.meta["val"]
            if value.dtype != torch.int64:
                continue
            if own is None:
                with graph.inserting_before(node):
                    of = {"dtype": value.dtype, "device": value.device}
                    own = graph.call_function(torch.ops.aten.full.default, ([], 0), of)
                own.meta["val"] = value
            node.update_arg(place, own)
            if not seed.users:
                graph.erase_node(seed)


def graph_pass() -> Any:
    """:func:`join_pairs` and :func:`part_seeds` as Inductor takes them, with a name that its cache knows them by."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Passes(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            join_pairs(graph)
            part_seeds(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,), repr(sorted(map(str, _PAIRS))))

    return Passes()
