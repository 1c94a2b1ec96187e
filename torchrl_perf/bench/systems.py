"""The envs of whole systems alone, and a planner's decision: eager, in a CUDA graph, compiled.

A call steps every env ``ROLLOUT`` times, episodes that end and begin included, under one action drawn beforehand, or
with a break in a free cell at random. The graph of it is replayed as a collector replays its own. That eager and
captured steps agree is tested with the envs.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from torchrl_perf.bench.report import CONFIRMED, NOT_HERE, NOT_REPRODUCED, Sheet, format_table
from torchrl_perf.runtime import Captured, Stopwatch, capture, compiled, synchronize, time_cuda

COLUMNS = ("system", "size", "variant", "us", "p10_us", "p90_us", "per_second", "of", "note")
VERDICT_COLUMNS = ("target", "measured", "verdict")
ROLLOUT = 4
"""Steps of a call."""
BUDGET_S = 0.5
"""Time that the calls of one row take together, beyond the least number of them."""


class Work(NamedTuple):
    """What is timed."""

    size: str
    """Numbers of envs and what they hold, as the table shows it."""
    call: Callable[[], Any]
    """The eager call, which is also captured and compiled."""
    count: int
    """Steps, or decisions, of one call."""
    of: str
    """What is counted."""


class System(NamedTuple):
    """One line of the table."""

    make: Callable[[bool, torch.device], Work]
    """Of whether sizes are small, and the device."""
    target: float
    """Least count in a second on CUDA."""
    words: str


def rollout(env: EnvBase, act: Callable[[TensorDictBase], object] | None = None) -> Callable[[], list[TensorDictBase]]:
    """Steps of all envs, from where they are, under the action at the start or what ``act`` writes.

    Everything that the steps write is returned, since a compiler drops unused results.
    """
    start, keys = env.rand_action(env.reset()), tuple(env.action_keys)

    def again(td: TensorDictBase) -> None:
        for key in keys:
            td.set(key, start.get(key))

    def call() -> list[TensorDictBase]:
        td, steps = start.copy(), []
        for _ in range(ROLLOUT):
            (act or again)(td)
            stepped, td = env.step_and_maybe_reset(td)
            steps.append(stepped)
        return steps

    return call


def marine(small: bool, device: torch.device) -> Work:
    """Five vessels and four obstacles in each env."""
    from torchrl_perf.envs.marine import Curriculum, MarineNavigation

    count = 16 if small else 4096
    env = MarineNavigation(count, curriculum=Curriculum.fixed(5, 4, 0, 40.0), device=device, seed=0)
    return Work(f"{count} x 5 vessels", rollout(env), ROLLOUT * count, "env steps")


def durotaxis(small: bool, device: torch.device) -> Work:
    """The whole colony, actions at random."""
    from torchrl_perf.envs.durotaxis import Durotaxis

    count = 16 if small else 4096
    return Work(f"{count} colonies", rollout(Durotaxis(count, device=device, seed=0)), ROLLOUT * count, "env steps")


def fuel_breaks(small: bool, device: torch.device) -> Work:
    """20 x 20 cells, 8 neighbours, 16 fires after each placement."""
    from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape

    count = 4 if small else 1024
    ground = Landscape.uniform(0.4, 20)
    env = FuelBreaks(count, landscape=ground, budget=20, reward="shaped", fires=16, device=device, seed=0)

    def place(td: TensorDictBase) -> None:
        free = td.get("action_mask")
        td.set("action", (torch.rand(free.shape, device=free.device) + free).argmax(-1))

    return Work(f"{count} x 16 fires", rollout(env, place), ROLLOUT * count, "placements")


def market(small: bool, device: torch.device) -> Work:
    """Synthetic regimes, the default window."""
    from torchrl_perf.envs.market import OptionMarket

    count = 16 if small else 65_536
    return Work(f"{count} markets", rollout(OptionMarket(count, device=device, seed=0)), ROLLOUT * count, "env steps")


def latent_field(small: bool, device: torch.device) -> Work:
    """The limit cycle, seen by 20 channels of counts."""
    from torchrl_perf.envs.latent_field import LatentField

    count = 16 if small else 65_536
    return Work(f"{count} points", rollout(LatentField(count, device=device, seed=0)), ROLLOUT * count, "env steps")


def planner(small: bool, device: torch.device) -> Work:
    """A decision of iCEM (arXiv:2008.06389): 32 candidates, 10 steps ahead, 10 rounds, inputs of most information."""
    from torchrl_perf.systems.active_dynamics import ACTIVE_DYNAMICS_PRESETS, ActiveDynamicsTrainer

    envs, rounds = (2, 2) if small else (64, 10)
    config = replace(
        ACTIVE_DYNAMICS_PRESETS["limit_cycle"],
        **{"num_envs": envs, "candidates": 32, "plan_horizon": 10, "plan_rounds": rounds, "elites": 10},
        **{"device": str(device), "mode": "eager", "logger": "none"},
    )
    trainer = ActiveDynamicsTrainer(config)
    inputs = trainer.policy.inputs
    state = trainer.env.reset()
    belief = torch.randn(envs, config.latent_size, device=device)
    td = TensorDict({"belief": belief, **{key: state[key] for key in (*inputs.state_keys, "is_init")}}, [envs])

    def call() -> torch.Tensor:
        with torch.no_grad():
            return inputs(td.copy()).get("action")

    return Work(f"{envs} envs, {rounds} rounds", call, 1, "decisions")


SYSTEMS: dict[str, System] = {
    "marine": System(marine, 4e6, "navigation: 4 M env steps/s"),
    "durotaxis": System(durotaxis, 1e6, "colony: 1 M env steps/s"),
    "fuel-breaks": System(fuel_breaks, 1e5, "fire breaks: 100 k placements/s"),
    "market": System(market, 2e7, "market: 20 M env steps/s"),
    "latent-field": System(latent_field, 2e7, "latent field: 20 M env steps/s"),
    "planner": System(planner, 200, "iCEM: a decision in 5 ms at most"),
}
"""What is timed, by name."""


@dataclass(frozen=True)
class BenchSystems:
    """Options of ``torchrl-perf bench systems``."""

    only: tuple[str, ...] = tuple(SYSTEMS)
    """What is timed: envs of whole systems, and a planner."""
    compile: bool = True
    """Whether the compiled forms are timed, too, which take up to a minute each to make."""
    repeats: int = 100
    """Timed calls, fewer of the slow ones."""
    quick: bool = False
    """Small sizes, written only where --out says so."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for systems.json; the package's bench/results by default."""


def forms_of(work: Work, device: torch.device, compile: bool) -> dict[str, Callable[[], Any]]:
    """The call by the name of its form; nothing is recorded or compiled yet."""
    if device.type != "cuda":
        return {"eager": work.call} | ({"compiled": compiled(work.call)} if compile else {})
    forms: dict[str, Callable[[], Any]] = {"eager": work.call, "graph": capture(work.call, device=device, audit=False)}
    if compile:
        forms["compiled + graph"] = capture(work.call, device=device, compile=True, audit=False)
    return forms


def measure(name: str, options: BenchSystems, device: torch.device, sheet: Sheet) -> None:
    """Makes all forms of one system, then times them; one that cannot be made leaves a row that says so."""
    work = SYSTEMS[name].make(options.quick, device)
    ready = {}
    for variant, call in forms_of(work, device, options.compile).items():
        try:
            for _ in range(4):  # a graph is recorded in the third
                call()
            ready[variant] = call
        except Exception as error:
            note = f"failed: {type(error).__name__}: {str(error)[:200]}"
            sheet.add({"system": name, "size": work.size, "variant": variant, "note": note})
    synchronize(device)
    for variant, call in ready.items():
        with Stopwatch(device) as watch:
            call()
        repeats = max(5, min(options.repeats, int(BUDGET_S / max(watch.seconds, 1e-6))))
        timing = time_cuda(call, repeats, warmup=2, device=device)
        row: dict[str, Any] = {"system": name, "size": work.size, "variant": variant, "of": work.of}
        times = {"us": timing.median, "p10_us": timing.p10, "p90_us": timing.p90}
        sheet.add({**row, **times, "per_second": work.count / timing.median * 1e6, "repeats": repeats})
        if isinstance(call, Captured):
            call.release()


def verdicts(rows: list[dict[str, Any]], device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Whether the best form of each reaches its target, which is one for a GPU and for whole sizes."""
    found = []
    for name in dict.fromkeys(row["system"] for row in rows):
        best = max((row["per_second"] for row in rows if row["system"] == name and "per_second" in row), default=0.0)
        here = device.type == "cuda" and not quick
        word = (CONFIRMED if best >= SYSTEMS[name].target else NOT_REPRODUCED) if here else NOT_HERE
        found.append({"part": "verdict", "target": SYSTEMS[name].words, "measured": f"{best:,.0f}/s", "verdict": word})
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; 1 where a form could not be made, 2 for an unknown name."""
    import tyro

    options = tyro.cli(BenchSystems, args=argv, prog="torchrl-perf bench systems")
    if wrong := [name for name in options.only if name not in SYSTEMS]:
        print(f"only: expected names among {', '.join(SYSTEMS)}, received {', '.join(wrong)}", file=sys.stderr)
        return 2
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.empty(0, device=name).device
    writes = not options.quick or options.out is not None
    file = ("systems" if device.type == "cuda" else "systems_cpu") if writes else None
    sheet = Sheet(COLUMNS, file, options.out)
    for system in options.only:
        torch.manual_seed(0)
        measure(system, options, device, sheet)
    lines = verdicts(sheet.rows, device, options.quick)
    print(format_table(sheet.rows, COLUMNS), format_table(lines, VERDICT_COLUMNS), sep="\n\n")
    failed = any("per_second" not in row for row in sheet.rows)
    sheet.rows += lines
    sheet.write()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
