"""The claims of durotaxis, a colony under PPO, that need no env: deletion, reward parts, entropy, advantages."""

import math
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate as torchrl_gae

from studies.counts import counts
from studies.originals import advantages as gae
from studies.originals import rewards, sampled, selection
from studies.sitting import (
    CONFIRMED,
    NOT_REPRODUCED,
    PARTLY,
    Sitting,
    Variant,
    as_tuple,
    difference,
    judge,
    times_text,
)
from torchrl_perf.functional import generalized_advantage_estimate, leftmost_k
from torchrl_perf.functional.losses.hybrid import normal_entropy, normal_kl, squashed_normal_entropy
from torchrl_perf.runtime import compiled

SORT, PARTITION, ONE_COPY = "list sort, .item() a node", "argpartition, .item() a node", "argpartition, one copy"
RANKS, TOPK = "rank mask, all at once", "topk, all at once"
LITERAL, TEMPLATE, COLUMNS = "dict literal", "dict(template)", "columns of one tensor"
LIST, STEPS, FLOATS = "list, insert(0)", "tensors, step by step", "floats, one read"
TORCHRL, PACKAGE = "torchrl vectorised", "package"
AXES = 5


# -- deletion ---------------------------------------------------------------------------------------------------------


def deletion(sitting: Sitting) -> None:
    """The k leftmost nodes: sorted, partitioned, ranked on the device; and what each does with equal positions."""
    sizes = sitting.pick((20, 48, 200), (20, 48, 100, 200, 1000, 10_000))
    batches, most = sitting.pick((1, 64), (1, 64, 4096)), sitting.pick(20_000, 1_000_000, 50_000_000)
    for size in sizes:
        for batch in batches:
            if size * batch <= most:
                _deletion_case(sitting, size, batch)
    _ties(sitting)
    large = [f"N={size}, B=1" for size in sizes if size > 100]
    found = sitting.ratio_of("deletion", SORT, PARTITION, large)
    sitting.verdict(
        "deletion",
        "argpartition deletes 2-3x faster above 100 nodes",
        times_text(found),
        judge(found, 2.0, 1.1),
        "each node's position is still read on its own, and that is most of the time",
    )
    small = sitting.ratio_of("deletion", SORT, PARTITION, [f"N={size}, B=1" for size in sizes if size <= 100])
    sitting.verdict(
        "deletion",
        "argpartition costs nothing on small colonies",
        times_text(small),
        judge(small, 1.0, 0.9),
    )
    whole = sitting.ratio_of("deletion", SORT, RANKS, [f"N={size}, B={batches[-1]}" for size in sizes])
    sitting.verdict(
        "deletion",
        f"a rank mask deletes in {batches[-1]:,} colonies at once, faster than one by one",
        times_text(whole),
        judge(whole, 2.0, 1.0),
    )


def _deletion_case(sitting: Sitting, size: int, batch: int) -> None:
    # a permutation has no equal values, so that all forms have one answer
    x = torch.stack([torch.randperm(size) for _ in range(min(batch, 64))]).float().to(sitting.device)
    x = x.repeat(-(-batch // len(x)), 1)[:batch].contiguous()
    nodes, k = torch.nn.functional.pad(x[0].unsqueeze(-1), (0, 10)), int(0.4 * size)
    alive = torch.ones_like(x, dtype=torch.bool)
    ks = torch.full((batch,), k, device=sitting.device)
    ranked, many = partial(leftmost_k, x, alive, ks), float(batch)

    def loop(name: str, choose: Callable[[Tensor, int], set[int]]) -> Variant:
        outputs = lambda: selection.as_mask(choose(nodes, k), size)  # noqa: E731
        return Variant(name, partial(choose, nodes, k), outputs, scale=many)

    variants = [
        loop(SORT, selection.by_sort),
        loop(PARTITION, selection.by_partition),
        loop(ONE_COPY, selection.by_partition_of_one_copy),
        Variant(RANKS, ranked, lambda: ranked()[0]),
        Variant(TOPK, lambda: selection.by_topk(x, k), lambda: selection.by_topk(x, k)[0]),
    ]
    graph = sitting.graph(ranked) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(f"{RANKS}, in a graph", graph, lambda: graph()[0]))
    sitting.compare("deletion", f"N={size}, B={batch}", variants)
    if graph is not None:
        graph.release()


def _ties(sitting: Sitting) -> None:
    """The share of colonies in which another set is deleted where positions are whole numbers, as stiffness has it."""
    count, size, k = sitting.pick(50, 200), 48, 19
    x = torch.randint(0, 12, (count, size), generator=torch.Generator().manual_seed(1)).float().to(sitting.device)
    nodes = x.unsqueeze(-1)
    want = torch.stack([selection.as_mask(selection.by_sort(row, k), size) for row in nodes])
    forms: dict[str, Callable[[], Tensor]] = {
        PARTITION: lambda: torch.stack([selection.as_mask(selection.by_partition(row, k), size) for row in nodes]),
        TOPK: lambda: selection.by_topk(x, k).cpu(),
        RANKS: lambda: leftmost_k(x, torch.ones_like(x, dtype=torch.bool), k).cpu(),
    }
    shares = {name: float((form() != want).any(-1).double().mean()) for name, form in forms.items()}
    for name, share in shares.items():
        entries = {"ok": share == 0.0} if name == RANKS else {}
        note = f"another set in {share:.0%} of {count} colonies with equal positions"
        sitting.add("deletion", f"N={size}, ties", name, differs=share, note=note, **entries)
    sitting.verdict(
        "deletion",
        "the same nodes are deleted",
        f"argpartition takes others in {shares[PARTITION]:.0%} of colonies with equal positions, the rank mask in 0%",
        CONFIRMED if shares[PARTITION] == 0 else PARTLY,
        "holds without equal positions",
    )


# -- reward parts -----------------------------------------------------------------------------------------------------


def reward_parts(sitting: Sitting) -> None:
    """A dict of 14 parts made anew, copied from a template, and columns of one tensor for all envs."""
    values = tuple(0.5 * index for index in range(len(rewards.SCALARS)))
    base = rewards.template()
    for batch in sitting.pick((1, 64), (1, 64, 4096)):
        columns = torch.tensor(values, device=sitting.device).repeat(batch, 1).unbind(-1)
        out = torch.empty(batch, len(values), device=sitting.device)

        def stack(columns: Any = columns, out: Tensor = out) -> Tensor:
            return torch.stack(columns, -1, out=out)

        def loop(name: str, make: Callable[[], dict[str, Any]], batch: int = batch) -> Variant:
            return Variant(name, make, lambda: torch.tensor([make()[key] for key in rewards.SCALARS]), scale=batch)

        variants = [
            loop(LITERAL, partial(rewards.literal, values)),
            loop(TEMPLATE, partial(rewards.from_template, base, values)),
            Variant(COLUMNS, stack, lambda stack=stack: stack()[0].clone()),
        ]
        sitting.compare("rewards", f"B={batch}", variants)
    size = {
        LITERAL: _python_bytes(partial(rewards.literal, values)),
        TEMPLATE: _python_bytes(partial(rewards.from_template, base, values)),
    }
    for name, count in size.items():
        sitting.add("rewards", "memory", name, python_bytes=count, note=f"{count:,.0f} bytes a step")
    shared = rewards.from_template(base, values)
    shared["node_rewards"].append(1.0)
    leaked = bool(rewards.from_template(base, values)["node_rewards"])
    found = sitting.ratio_of("rewards", LITERAL, TEMPLATE, ["B=1"])
    remark = "all entries are written again; the list of node rewards is one list for all steps" if leaked else ""
    sitting.verdict(
        "rewards", "a dict from a template is 1.05-1.1x faster", times_text(found), judge(found, 1.05, 1.0), remark
    )
    saved = 1 - size[TEMPLATE] / size[LITERAL]
    sitting.verdict("rewards", "5-10% less memory", f"{saved:.0%} less", judge(saved, 0.05, 0.01))
    last = sitting.pick("B=64", "B=4096")
    many = sitting.ratio_of("rewards", LITERAL, COLUMNS, [last])
    one = sitting.ratio_of("rewards", LITERAL, COLUMNS, ["B=1"])
    sitting.verdict(
        "rewards",
        f"columns of one tensor are faster at {last}",
        f"{times_text(many)}; at B=1 {times_text(one)}",
        judge(many, 1.05, 1.0),
    )


def _python_bytes(make: Callable[[], Any], count: int = 1000) -> float:
    """Bytes of Python's memory for each result that is kept."""
    tracing = tracemalloc.is_tracing()
    kept: list[Any] = [None] * count
    if not tracing:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for index in range(count):
        kept[index] = make()
    after = tracemalloc.get_traced_memory()[0]
    if not tracing:
        tracemalloc.stop()
    return (after - before) / count if kept else math.nan


# -- entropy and divergence -------------------------------------------------------------------------------------------


def entropy(sitting: Sitting) -> None:
    """Closed forms of entropy and divergence against 1 to 64 samples; what the entropy is and is not."""
    samples = sitting.pick((1, 64), (1, 4, 16, 64))
    sizes = sitting.pick((64,), (64, 4096))
    for batch in sizes:
        for count in samples:
            _entropy_case(sitting, batch, count)
            _divergence_case(sitting, batch, count)
    for kind, after in (("entropy", "Normal.entropy"), ("divergence", "package")):
        one, most = (
            sitting.ratio_of(kind, "samples", after, [f"B={batch}, S={count}" for batch in sizes])
            for count in (samples[0], samples[-1])
        )
        word = judge(one, 5.0, math.inf)
        word = PARTLY if word == NOT_REPRODUCED and min(most, default=0.0) >= 5.0 else word
        sitting.verdict(
            kind,
            f"closed-form {kind} is 5-10x faster than samples",
            f"{times_text(one)} against 1 sample, {times_text(most)} against {samples[-1]}",
            word,
            "of the unsquashed normal; a single sample has a standard error of 1.6 nats" if kind == "entropy" else "",
        )
    _entropy_facts(sitting)


def _normals(batch: int, device: torch.device) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(2)
    loc, other = (torch.randn(batch, AXES, generator=draw).to(device) for _ in range(2))
    scale, other_scale = (torch.rand(batch, AXES, generator=draw).add(0.5).to(device) for _ in range(2))
    return loc, scale, loc + 0.3 * other, other_scale


def _entropy_case(sitting: Sitting, batch: int, count: int) -> None:
    loc, scale, *_ = _normals(batch, sitting.device)
    few = loc[:4], scale[:4]
    variants = [
        Variant("samples", partial(sampled.entropy, loc, scale, count), partial(sampled.entropy, *few, 40_000)),
        Variant(
            "Normal.entropy",
            lambda: Normal(loc, scale, validate_args=False).entropy().sum(-1),
            lambda: Normal(*few).entropy().sum(-1),
        ),
        Variant("package", partial(normal_entropy, scale), partial(normal_entropy, few[1])),
    ]
    error = math.sqrt(AXES / 2 / count)
    # five standard errors of 40,000 samples
    sitting.compare("entropy", f"B={batch}, S={count}", variants, tolerance=0.04, standard_error=error)


def _divergence_case(sitting: Sitting, batch: int, count: int) -> None:
    normals = _normals(batch, sitting.device)
    few = [part[:4] for part in normals]

    def library(parts: Any) -> Tensor:
        p, q = (Normal(*parts[i : i + 2], validate_args=False) for i in (0, 2))
        return torch.distributions.kl_divergence(p, q).sum(-1)

    variants = [
        Variant("samples", partial(sampled.divergence, *normals, count), partial(sampled.divergence, *few, 40_000)),
        Variant("kl_divergence", partial(library, normals), partial(library, few)),
        Variant("package", partial(normal_kl, *normals), partial(normal_kl, *few)),
    ]
    error = float(torch.stack([sampled.divergence(*few, samples=count) for _ in range(64)]).std(0).mean())
    sitting.compare("divergence", f"B={batch}, S={count}", variants, tolerance=0.15, standard_error=error)


def _entropy_facts(sitting: Sitting) -> None:
    narrow = float(normal_entropy(torch.full((AXES,), 0.1)))
    plain = float(normal_entropy(torch.ones(1)))
    # sigmoid(x) is (1 + tanh(x / 2)) / 2
    bounded = float(squashed_normal_entropy(torch.zeros(1), torch.full((1,), 0.5), 0.0, 0.5))
    sitting.add("entropy", "scale=0.1", "package", value=narrow, note=f"{narrow:.3f} nats")
    sitting.verdict("entropy", "an entropy is positive", f"{narrow:.2f} nats at a scale of 0.1", NOT_REPRODUCED)
    sitting.verdict(
        "entropy",
        "the closed form is exact for the policy",
        f"{plain:.4f} nats of the normal, {bounded:.4f} of the bounded action",
        NOT_REPRODUCED,
        "the divergence is exact, for it does not change under the squash",
    )


# -- advantages -------------------------------------------------------------------------------------------------------


def advantages(sitting: Sitting) -> None:
    """Advantages by lists, step by step, by TorchRL and by a scan."""
    whole = [(t, b) for t in (32, 128, 512, 2048) for b in (1, 16, 256, 4096)]
    grid = sitting.pick([(32, 1), (128, 16)], [(t, b) for t, b in whole if t * b <= 2**20], whole)
    for steps, batch in grid:
        _advantages_case(sitting, steps, batch)
    cases = [f"T={steps}, B=1" for steps, batch in grid if batch == 1]
    found = sitting.ratio_of("advantages", LIST, STEPS, cases)
    sitting.verdict(
        "advantages",
        "preallocated tensors make GAE 2-3x faster",
        times_text(found),
        judge(found, 2.0, 1.1),
        "the loop over the steps, about five operations each, is still there",
    )
    scan = sitting.ratio_of("advantages", LIST, PACKAGE)
    sitting.verdict("advantages", "the package's scan is 2-3x faster", times_text(scan), judge(scan, 2.0, 1.1))
    _advantages_memory(sitting)
    one = gae.normalized(torch.ones(1))
    sitting.verdict(
        "advantages",
        "numerical stability: normalisation",
        f"an episode of one step gives {float(one):.0f}",
        NOT_REPRODUCED if not bool(one.isfinite().all()) else CONFIRMED,
        "divided by the deviation with nothing added to it",
    )


def _episodes(steps: int, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """Values, next values, rewards ``[B, T, 1]``, and flags: the last step of each row is a terminal."""
    draw = torch.Generator().manual_seed(3)
    values, rewards_ = (torch.randn(batch, steps, 1, generator=draw) for _ in range(2))
    following = torch.cat([values[:, 1:], torch.zeros(batch, 1, 1)], 1)
    done = torch.zeros(batch, steps, 1, dtype=torch.bool)
    done[:, -1] = True
    return tuple(part.to(device) for part in (values, following, rewards_, done))


def _advantages_case(sitting: Sitting, steps: int, batch: int) -> None:
    values, following, reward, done = _episodes(steps, batch, sitting.device)
    one = [part[0, :, 0] for part in (values, following, reward)]
    wide: list[Any] = [part.double() for part in one]
    exact = torch.stack(gae.by_floats(0.99, 0.95, wide[0], wide[1], wide[2])).cpu()
    loops: dict[str, Callable[..., Any]] = {LIST: gae.by_list, STEPS: gae.by_steps, FLOATS: gae.by_floats}
    variants = [Variant(name, partial(loop, 0.99, 0.95, *one), scale=float(batch)) for name, loop in loops.items()]

    def whole(fn: Callable[..., Any]) -> Callable[[], tuple[Tensor, Tensor]]:
        return partial(fn, 0.99, 0.95, values, following, reward, done, done)

    def first(call: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], list[Tensor]]:
        return lambda: [part[0, :, 0].clone() for part in call()]

    calls = {TORCHRL: whole(torchrl_gae), PACKAGE: whole(generalized_advantage_estimate)}
    graph = sitting.graph(calls[PACKAGE]) if sitting.cuda else None
    if graph is not None:
        calls[f"{PACKAGE}, in a graph"] = graph
    if sitting.compile and (steps, batch) == (128, 256):
        calls[f"{PACKAGE}, compiled"] = compiled(calls[PACKAGE])
    # TorchRL's convolution rounds to TF32 on CUDA
    variants += [
        Variant(name, fn, first(fn), tolerance=0.05 if name == TORCHRL else None) for name, fn in calls.items()
    ]
    rows = sitting.compare("advantages", f"T={steps}, B={batch}", variants, tolerance=1e-3)
    for variant in variants:
        if variant.name in rows:
            outputs = as_tuple((variant.outputs or variant.call)())
            rows[variant.name]["float64_off_by"] = difference(outputs, tuple(exact))
    if graph is not None:
        graph.release()


def _advantages_memory(sitting: Sitting) -> None:
    """Bytes and operations at one size: the peak on CUDA, elsewhere the bytes of all new tensors."""
    steps = 128
    values, following, reward, done = _episodes(steps, 1, sitting.device)
    one = [part[0, :, 0] for part in (values, following, reward)]
    calls: dict[str, Callable[[], Any]] = {
        LIST: partial(gae.by_list, 0.99, 0.95, *one),
        STEPS: partial(gae.by_steps, 0.99, 0.95, *one),
        PACKAGE: partial(generalized_advantage_estimate, 0.99, 0.95, values, following, reward, done, done),
    }
    size = {}
    for name, call in calls.items():
        found = counts(call, sitting.device)
        size[name] = found.get("peak_bytes", found["bytes"])
        note = f"{size[name]:,} bytes, {found['operations']:,} operations, {found['reads']} reads"
        sitting.add("advantages", f"T={steps}, memory", name, **found, note=note)
    saved = 1 - size[STEPS] / max(1, size[LIST])
    sitting.verdict("advantages", "GAE needs 20% less memory", f"{saved:.0%} less", judge(saved, 0.2, 0.05))


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "deletion": deletion,
    "rewards": reward_parts,
    "entropy": entropy,
    "advantages": advantages,
}
"""Experiments by name."""
