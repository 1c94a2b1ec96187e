"""Action selection of every agent, by rows: one by one, TorchRL's modules, ours; and the losses of C51 and IQN.

A policy for one sample, as many programs have it, is called for each row in turn, with the action left on the device or
taken to the host each time. It acts greedily, in plain PyTorch if that is a simple function, which favours it; all
others explore and also write their further outputs, such as log-probabilities. Before anything is timed, it is checked
that all rows together get the same results as each alone, and that a compiled policy draws from the same distribution.
``us`` is the time of a call among calls that are queued without a wait, ``latency_us`` that of a single call until its
result is available. A ``graph x 16`` holds sixteen steps of action selection, like the graph of a rollout; the time is
that of one step, without the host's share of a launch.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.bench.policies_agents import AGENTS, CHOICES, Agent, build
from torchrl_perf.bench.policies_losses import UPDATES, C51Losses, iqn_updates
from torchrl_perf.bench.report import Sheet, format_table
from torchrl_perf.bench.transfer import wall
from torchrl_perf.runtime import (
    Acceleration,
    CaptureError,
    HostSyncError,
    Stopwatch,
    capture,
    compiled,
    synchronize,
    time_cuda,
)

Choose = Callable[[], tuple[Tensor, ...]]

COLUMNS = ("agent", "N", "variant", "us", "p10_us", "p90_us", "latency_us", "per_second", "off_by")
VERDICT_COLUMNS = ("target", "measured", "verdict")
CUDA_SIZES, CPU_SIZES, QUICK_SIZES = (1, 16, 256, 4096, 65_536), (1, 16, 256, 4096), (1, 64)
LOOP, HOST_LOOP = "loop", "loop, .cpu().numpy()"
ROLLOUT = 16
"""Steps of action selection in the graph that stands for a rollout."""
CAPTURED = ("graph", "compiled + graph", f"graph x {ROLLOUT}", f"compiled + graph x {ROLLOUT}")
BUDGET_S = 0.1
"""Time that the calls of one row take together, beyond the least number of them."""
TOLERANCE, LOSS_TOLERANCE = 1e-5, {"cpu": 1e-4, "cuda": 1e-2}
"""Largest difference of a row alone from the same among all; of loss and gradients, relative, from TorchRL's: our
networks multiply in TF32 on CUDA, where TorchRL's copy may run layer by layer in float32."""
DRAWS, MOST_APART = 16, 2.5
"""Calls whose actions are compared, and how far those of a compiled policy may be apart; see :func:`apart`."""
FRESH_ROWS = 256
"""Rows of which some act otherwise at the next replay."""
BATCH, QUICK_BATCH = 256, 32
TARGET_N, TARGET_US, TARGET_TIMES, TARGET_UPDATES = 4096, 40.0, 20.0, 4000.0


@dataclass(frozen=True)
class BenchPolicies:
    """Options of ``torchrl-perf bench policies``."""

    agents: tuple[str, ...] = tuple(AGENTS)
    """Agents whose actions are timed."""
    sizes: tuple[int, ...] = ()
    """Rows (N); 1 to 65,536 on CUDA and to 4,096 on a CPU by default."""
    compile_sizes: tuple[int, ...] = (TARGET_N,)
    """Sizes at which the policies are compiled, which takes seconds each."""
    loop_rows: int = 64
    """Most rows that are taken one by one; the time of a row does not depend on their number."""
    losses: tuple[str, ...] = ("c51", "iqn")
    """Losses that are timed."""
    repeats: int = 100
    """Timed calls, fewer of the slow ones."""
    quick: bool = False
    """Few rows and no compiler, written only where --out says so."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for policies.json; the package's bench/results by default."""


@dataclass
class Bench:
    """One session: the options, the device, and the rows measured so far."""

    options: BenchPolicies
    device: torch.device
    sheet: Sheet = field(default_factory=lambda: Sheet((*COLUMNS, "note")))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows so far."""
        return self.sheet.rows

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the timed policies."""
        if self.options.sizes or not self.options.quick:
            return self.options.sizes or (CUDA_SIZES if self.device.type == "cuda" else CPU_SIZES)
        return QUICK_SIZES

    @property
    def batch(self) -> int:
        """Batch of the loss of C51."""
        return QUICK_BATCH if self.options.quick else BATCH

    def compiles(self, num_rows: int) -> bool:
        """Whether the policies are compiled for this number of rows."""
        return not self.options.quick and num_rows in self.options.compile_sizes

    def add(self, agent: str, num_rows: int, variant: str, **found: Any) -> None:
        """Notes a row, prints and writes it."""
        self.sheet.add({"agent": agent, "N": num_rows, "variant": variant, **found})

    def time(
        self, agent: str, num_rows: int, variant: str, call: Callable[[], Any], *, updates: int = 0, steps: int = 1,
        **found: Any,
    ) -> None:  # fmt: skip
        """Times a call, and notes the row; the times are those of one update, or step, where a call makes several."""
        call()
        synchronize(self.device)
        with Stopwatch(self.device) as watch:
            call()
        repeats = max(3, min(self.options.repeats, int(BUDGET_S / max(watch.seconds, 1e-6))))
        timing = time_cuda(call, repeats, warmup=min(3, repeats - 2), device=self.device)
        latency = wall(call, min(repeats, 20), self.device)["us"] if repeats > 3 else timing.median
        times = {"us": timing.median, "p10_us": timing.p10, "p90_us": timing.p90, "latency_us": latency}
        times = {name: us / max(1, updates, steps) for name, us in times.items()}
        per_second = (updates or num_rows * steps) / timing.median * 1e6
        self.add(agent, num_rows, variant, **times, per_second=per_second, repeats=repeats, **found)

    def best(self, agent: str, num_rows: int, *variants: str) -> float | None:
        """The least time of some variants in microseconds; None where none of them was measured."""
        own = [row for row in self.rows if (row["agent"], row["N"]) == (agent, num_rows) and "us" in row]
        return min((row["us"] for row in own if row["variant"] in variants), default=None)


# -- action selection -------------------------------------------------------------------------------------------------


def one_by_one(act: Callable[[TensorDictBase], Tensor], rows: list[TensorDictBase], *, to_host: bool) -> list[Any]:
    """The action of each row in turn."""
    if to_host:
        return [act(row).cpu().numpy() for row in rows]
    return [act(row) for row in rows]


def difference(agent: Agent, num_rows: int) -> float:
    """Largest difference of the first rows, taken one by one, from the same among all rows; no exploration."""
    rows = list(agent.td[:num_rows].split(1))

    def reseeded(fn: Callable[[TensorDictBase], Tensor], td: TensorDictBase) -> Tensor:
        torch.manual_seed(0)  # levels are drawn at each call
        return fn(td).double()

    def written(td: TensorDictBase) -> Tensor:
        out = agent.policy(td.copy())
        parts = [out.get(key) for key in agent.keys]
        return torch.cat([part.reshape(len(td), -1).double() for part in parts], -1)

    worst = 0.0
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        actions = reseeded(written, agent.td)[:num_rows]
        for single, together in ((agent.outputs, reseeded(agent.outputs, agent.td)[:num_rows]), (agent.plain, actions)):
            alone = torch.cat([reseeded(single, row) for row in rows])
            worst = max(worst, float((alone.view_as(together) - together).abs().max()))
    return worst


def chooser(policy: TensorDictModuleBase, agent: Agent) -> Choose:
    """The actions of all rows, exploring."""

    def act() -> tuple[Tensor, ...]:
        out = policy(agent.td.copy())
        return tuple(out.get(key) for key in agent.keys)

    return act


def apart(call: Choose, other: Choose) -> float:
    """How far the actions of a policy are from another's, as distributions, for each row.

    The squared difference of the mean actions over some calls, summed over rows, as a multiple of its expectation under
    chance: about 1 for equal distributions. Draws are not compared one by one, because a compiled function may draw
    them in another order, and rounding in TF32 makes a choice between two nearly equal values go either way.
    """
    means, chance = [], torch.zeros(())
    for fn in (call, other):
        draws = torch.stack([_columns(fn()) for _ in range(DRAWS)])
        means.append(draws.mean(0))
        chance = chance.to(draws.device) + draws.var(0).sum() / DRAWS
    return float((means[0] - means[1]).square().sum() / chance.clamp_min(1e-12))


def _columns(parts: tuple[Tensor, ...]) -> Tensor:
    """Actions ``[N, C]`` as numbers that can be averaged; a choice becomes one-hot."""
    columns = [part if part.is_floating_point() else one_hot(part, CHOICES) for part in parts]
    return torch.cat([column.reshape(len(column), -1).double() for column in columns], -1)


@torch.no_grad()
def actions(bench: Bench, name: str) -> None:
    """All variants of one agent, at all sizes."""
    for num_rows in bench.sizes:
        agent = build(name, num_rows, bench.device)
        # beyond, FusedMLP takes its rows in larger blocks, whose products in TF32 are not the same bit for bit
        off_by = difference(agent, min(num_rows, bench.options.loop_rows)) if num_rows <= TARGET_N else None
        if off_by is not None and not off_by <= TOLERANCE:
            bench.add(name, num_rows, "eager", off_by=off_by, ok=False, note=f"rows alone differ by {off_by:.1e}")
            continue
        with Acceleration().active(bench.device), set_exploration_type(ExplorationType.RANDOM):
            if num_rows <= bench.options.loop_rows:
                loops(bench, name, agent)
            if agent.peer is not None:
                bench.time(name, num_rows, "torchrl", chooser(agent.peer, agent))
            ours(bench, name, agent, off_by)
        del agent
        gc.collect()


def loops(bench: Bench, name: str, agent: Agent) -> None:
    """A policy for one sample, called for each row in turn."""
    rows: list[TensorDictBase] = list(agent.td.split(1))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        for variant in (LOOP, HOST_LOOP):
            call = partial(one_by_one, agent.plain, rows, to_host=variant == HOST_LOOP)
            bench.time(name, len(rows), variant, call)


def ours(bench: Bench, name: str, agent: Agent, off_by: float | None) -> None:
    """Our policy: eager, compiled, and both in a graph."""
    num_rows, act = len(agent.td), chooser(agent.policy, agent)
    calls = {"eager": act}
    bench.time(name, num_rows, "eager", act, off_by=off_by)
    if bench.compiles(num_rows):
        start = Stopwatch("cpu").start()
        calls["compiled"] = compiled(act)
        calls["compiled"]()
        start.stop()
        far = apart(calls["compiled"], act)
        found = {"apart": far, "ok": far <= MOST_APART, "start_s": start.seconds}
        bench.time(name, num_rows, "compiled", calls["compiled"], **found)
    if bench.device.type == "cuda":
        for variant, call in calls.items():
            _captured(bench, name, num_rows, variant, call)


def _captured(bench: Bench, name: str, num_rows: int, variant: str, call: Choose) -> None:
    label, graph = graph_of(variant), capture(call, device=bench.device, audit=variant == "eager")
    try:
        for _ in range(4):
            graph()
        draws = [[part.clone() for part in graph()] for _ in range(2)]
        same = all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
        # a few rows may draw the same action again
        bench.time(name, num_rows, label, graph, fresh=not same, ok=not same or num_rows < FRESH_ROWS)
        if bench.compiles(num_rows):
            _rollout(bench, name, num_rows, f"{label} x {ROLLOUT}", call)
    except (CaptureError, HostSyncError) as error:  # only this variant failed: time the others
        bench.add(name, num_rows, label, ok=False, note=f"not captured: {error}")
    finally:
        graph.release()


def _rollout(bench: Bench, name: str, num_rows: int, label: str, call: Choose) -> None:
    """Many steps of action selection in one graph."""

    def steps() -> tuple[tuple[Tensor, ...], ...]:
        return tuple(call() for _ in range(ROLLOUT))

    graph = capture(steps, device=bench.device, audit=False)
    try:
        for _ in range(4):
            graph()
        bench.time(name, num_rows, label, graph, steps=ROLLOUT)
    finally:
        graph.release()


def graph_of(variant: str) -> str:
    """Name of a variant in a graph."""
    return "graph" if variant == "eager" else f"{variant} + graph"


# -- losses -----------------------------------------------------------------------------------------------------------


def c51(bench: Bench) -> None:
    """Loss and gradients of C51: a plain loop, TorchRL, and this package's."""
    losses, own = C51Losses(bench.batch, bench.device), ["eager"] if bench.options.quick else ["eager", "compiled"]
    graphs = [graph_of(variant) for variant in own] if bench.device.type == "cuda" else []
    for variant in ("loop", "torchrl", *own, *graphs):
        start = Stopwatch("cpu").start()
        try:
            losses.prepare(variant)
            off_by = losses.off_by(variant)
        except CaptureError as error:
            bench.add("c51 loss", bench.batch, variant, ok=False, note=f"not captured: {error}")
            continue
        start.stop()
        if off_by <= LOSS_TOLERANCE[bench.device.type]:
            call = losses.calls[variant]
            bench.time("c51 loss", bench.batch, variant, call, off_by=off_by, start_s=start.seconds)
        else:
            note = f"differs from TorchRL by {off_by:.1e}"
            bench.add("c51 loss", bench.batch, variant, off_by=off_by, ok=False, note=note)


def iqn(bench: Bench) -> None:
    """Whole updates of IQN at batch 256 with 8 x 32 quantiles; N is the batch, the time that of one update."""
    variants = ["eager"] if bench.options.quick else ["eager", "compiled"]
    for variant in [*variants, *(["compiled + graph"] if bench.device.type == "cuda" else [])]:
        call, close, seconds = iqn_updates(variant, bench.device)
        bench.time("iqn update", BATCH, variant, call, updates=UPDATES, start_s=seconds)
        close()
        gc.collect()


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(bench: Bench) -> list[dict[str, str]]:
    """The verdict of the rows on the targets for an H100; without CUDA, only the measured times."""
    cuda = bench.device.type == "cuda"
    variants = CAPTURED if cuda else ("eager", "compiled")

    def verdict(target: str, value: float | None, words: str, holds: Callable[[float], bool]) -> dict[str, str]:
        if value is None or not cuda:
            measured = "" if value is None else words.format(value)
            return {"target": target, "measured": measured, "verdict": "n/a: not captured"}
        return {
            "target": target,
            "measured": words.format(value),
            "verdict": "holds" if holds(value) else "does not hold",
        }

    found = []
    for name in bench.options.agents:
        target = f"{name}: {TARGET_N:,} actions in at most {TARGET_US:g} us, captured"
        us = bench.best(name, TARGET_N, *variants)
        found.append(verdict(target, us, "{:,.1f} us", lambda value: value <= TARGET_US))
    if "c51" in bench.options.losses:
        theirs, own = bench.best("c51 loss", bench.batch, "torchrl"), bench.best("c51 loss", bench.batch, *variants)
        target = f"C51 loss and gradients at least {TARGET_TIMES:g} times as fast as TorchRL's, captured"
        times = theirs / own if theirs and own else None
        found.append(verdict(target, times, "{:.1f} times", lambda value: value >= TARGET_TIMES))
    if "iqn" in bench.options.losses:
        us = bench.best("iqn update", BATCH, *variants)
        target = f"IQN: at least {TARGET_UPDATES:,.0f} updates/s, captured"
        found.append(
            verdict(target, 1e6 / us if us else None, "{:,.0f} a second", lambda value: value >= TARGET_UPDATES)
        )
    return found


def _jobs(bench: Bench) -> Iterator[Callable[[], None]]:
    for name in bench.options.agents:
        yield partial(actions, bench, name)
    if "c51" in bench.options.losses:
        yield partial(c51, bench)
    if "iqn" in bench.options.losses:
        yield partial(iqn, bench)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the tables and writes ``policies.json`` (``policies_cpu.json`` on a CPU).

    Returns:
        1 where a result was not what it has to equal, or could not be captured; 2 for an unknown agent or loss.
    """
    import tyro

    options = tyro.cli(BenchPolicies, args=argv, prog="torchrl-perf bench policies")
    for what, names, known in (("agents", options.agents, AGENTS), ("losses", options.losses, ("c51", "iqn"))):
        if unknown := [name for name in names if name not in known]:
            print(f"{what}: expected names among {', '.join(known)}, received {', '.join(unknown)}", file=sys.stderr)
            return 2
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.empty(0, device=name).device
    file = "policies" if device.type == "cuda" else "policies_cpu"
    writes = not options.quick or options.out is not None
    bench = Bench(options, device, Sheet((*COLUMNS, "note"), file if writes else None, options.out))
    for job in _jobs(bench):
        job()
    table = verdicts(bench)
    print("\n" + format_table(bench.rows, COLUMNS))
    print("\n" + format_table(table, VERDICT_COLUMNS))
    bench.rows.extend({"part": "verdict", **row} for row in table)
    bench.sheet.write()
    if writes:
        print(f"written to {bench.sheet.path}")
    return 0 if all(row.get("ok", True) for row in bench.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
