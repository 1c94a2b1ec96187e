"""The claims of options_market on steps a second, the minutes of a run, memory of the card, and options in use."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from studies.options_market.agents import BATCH, ENVS, STEPS, settings
from studies.options_market.runs import EAGER, WHOLE, PackageLoop, size_note, sizes
from studies.sitting import CONFIRMED, NOT_HERE, NOT_REPRODUCED, PARTLY, Sitting, Variant, judge
from torchrl_perf.runtime import CaptureError, HostSyncError, Stopwatch, synchronize
from torchrl_perf.runtime.memory import MIB
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer

SAME_ROWS, FEWER = "as many rows learnt from a frame", "two updates of 256 rows a step"
STEP_RATE, MINUTES, FRAMES = (900.0, 1200.0), (15.0, 18.0), 100_000
"""Steps a second, and minutes for 100,000 of them, that the original gives for the same run."""


def throughput(sitting: Sitting) -> None:
    """Env steps a second, minutes for 100,000 of them and memory of the card, by number of envs."""
    grid = [(ENVS, SAME_ROWS), (2 * ENVS, FEWER)]
    if sitting.cuda:
        grid += [(64, SAME_ROWS), (1024, SAME_ROWS), (4096, SAME_ROWS), (4096, FEWER)]
    for envs, kind in grid:
        _throughput_case(sitting, envs, kind)
    first = _rate(sitting, ENVS, SAME_ROWS)
    minutes = None if first is None else FRAMES / first / 60
    sitting.verdict(
        "throughput",
        "100,000 steps in 15-18 minutes",
        "" if minutes is None else f"{minutes:.2g} minutes with {ENVS} envs",
        judge(None if minutes is None else MINUTES[1] / minutes, 1.0, 0.5),
        size_note(sitting),
    )
    at_rate = [FRAMES / rate / 60 for rate in reversed(STEP_RATE)]
    in_time = [FRAMES / minute / 60 for minute in reversed(MINUTES)]
    sitting.verdict(
        "throughput",
        "900-1,200 steps/s, and 100,000 steps in 15-18 minutes, of one run",
        f"at that rate they take {at_rate[0]:.1f}-{at_rate[1]:.1f} minutes; in that time it is "
        f"{in_time[0]:.0f}-{in_time[1]:.0f} steps/s",
        NOT_REPRODUCED,
        "the two differ by a factor of ten; 1,000 steps in 30 s are 33 steps/s",
    )
    more = _rate(sitting, 2 * ENVS, FEWER)
    sitting.verdict(
        "throughput",
        "n_envs: 32 in place of 16 is faster",
        "" if first is None or more is None else f"{more / first:.2f}x the steps/s",
        NOT_HERE if first is None or more is None else PARTLY if more > 1.05 * first else NOT_REPRODUCED,
        "two updates a step of all envs: half as many for each frame, and nothing is said of that",
    )
    _large_verdict(sitting, first)
    _quick_test(sitting)
    _card_verdict(sitting)


def _config_of(sitting: Sitting, envs: int, kind: str) -> OptionsMarketConfig:
    """The run of 16 envs, with more of them: larger batches, or as they are."""
    base = sizes(sitting)
    rows = base.get("minibatch_size", BATCH) * (envs // ENVS if kind == SAME_ROWS else 1)
    changes: dict[str, Any] = {"num_envs": envs, "minibatch_size": rows, "learning_starts": max(512, rows)}
    config = settings(sitting.device, **base, num_envs=ENVS)
    # all options of one iteration have to fit
    changes["option_capacity"] = max(config.option_capacity, envs * config.num_steps)
    return replace(config, **changes)


def _throughput_case(sitting: Sitting, envs: int, kind: str) -> None:
    case, mode = f"E={envs}, {kind}", "whole" if sitting.cuda else "eager"
    if sitting.cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(sitting.device)
    before = torch.cuda.memory_allocated(sitting.device) if sitting.cuda else 0
    try:
        loop = PackageLoop(_config_of(sitting, envs, kind), mode)
    except (CaptureError, HostSyncError) as error:  # of this variant alone: the others are worth a figure
        sitting.add("throughput", case, WHOLE, note=f"not captured: {str(error)[:120]}")
        return
    name = WHOLE if sitting.cuda else EAGER
    row = sitting.compare("throughput", case, [Variant(name, loop.iteration, compared=False)])[name]
    row["steps_per_second"] = loop.frames / row["us"] * 1e6
    row["minutes_per_100k"] = FRAMES / row["steps_per_second"] / 60
    row["utd_ratio"] = loop.trainer.config.utd_ratio
    row["note"] = f"{row['steps_per_second']:,.0f} steps/s, {row['minutes_per_100k']:.2g} minutes for 100,000"
    if sitting.cuda:
        row["peak_mib"] = (torch.cuda.max_memory_allocated(sitting.device) - before) / MIB
        row["reserved_mib"] = torch.cuda.max_memory_reserved(sitting.device) / MIB
        row["note"] += f", {row['peak_mib']:,.0f} MiB at most"
    loop.close()


def _row(sitting: Sitting, envs: int, kind: str) -> dict[str, Any]:
    own = [row for row in sitting.rows if row["experiment"] == "throughput" and row["case"] == f"E={envs}, {kind}"]
    return own[-1] if own else {}


def _rate(sitting: Sitting, envs: int, kind: str) -> float | None:
    return _row(sitting, envs, kind).get("steps_per_second")


def _large_verdict(sitting: Sitting, first: float | None) -> None:
    """What more envs bring where each frame is learnt from as often."""
    rates = {envs: _rate(sitting, envs, SAME_ROWS) for envs in (64, 1024, 4096)}
    found = {envs: rate for envs, rate in rates.items() if rate is not None}
    last = found.get(4096)
    sitting.verdict(
        "throughput",
        "4,096 envs on the card are faster than 16, each frame learnt from as often",
        ", ".join(f"{envs:,}: {rate:,.0f} steps/s" for envs, rate in found.items()),
        judge(None if last is None or first is None else last / first, 4.0, 1.1),
        "batches grow with the envs",
    )


def _quick_test(sitting: Sitting) -> None:
    """The original's short run of 1,000 steps, from the start of the program's objects on."""
    config = settings(sitting.device, **sizes(sitting, learning_starts=ENVS * STEPS))
    count = -(-1000 // config.batch_size)
    watch = Stopwatch("cpu").start()
    trainer = OptionsMarketTrainer(config)
    for _ in range(count):
        trainer.step()
    synchronize(sitting.device)
    watch.stop()
    trainer.close()
    seconds = watch.host_seconds
    sitting.add("throughput", "1,000 steps", EAGER, seconds=seconds, note=f"{seconds:.1f} s, construction included")
    sitting.verdict(
        "throughput",
        "1,000 steps in less than 30 s",
        f"{seconds:.1f} s",
        judge(30.0 / seconds, 1.0, 0.5),
        "nothing compiled; with updates from the first 128 steps on",
    )


def _card_verdict(sitting: Sitting) -> None:
    """The card's memory at 16 envs."""
    peak = _row(sitting, ENVS, SAME_ROWS).get("peak_mib")
    sitting.verdict(
        "throughput",
        "peak VRAM 7-8 GB",
        "" if peak is None else f"{peak / 1024:.2f} GiB with 200,000 steps and 50,000 options kept on the card",
        judge(None if peak is None else 8.0 / (peak / 1024), 1.0, 0.5),
        "" if sitting.cuda else "no GPU",
    )


# -- options ----------------------------------------------------------------------------------------------------------


def diversity(sitting: Sitting) -> None:
    """Shares of the steps that each option runs, by a policy that has not learnt, for half an episode."""
    trainer = OptionsMarketTrainer(settings(sitting.device, hidden_size=32, num_envs=4 * ENVS))
    for _ in range(sitting.pick(20, 42)):
        trainer.fill()
    row = trainer.metrics.flush(1) or {}
    trainer.close()
    shares = {name: float(row[f"option/usage_{name}"]) for name in trainer.options.names}
    total = sum(shares.values())
    text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    sitting.add("diversity", f"E={4 * ENVS}", EAGER, ok=abs(total - 1) < 1e-4, note=text, **shares)
    few = [name for name, share in shares.items() if share <= 0.1]
    sitting.verdict(
        "diversity",
        "each option above 10% of the steps",
        f"{len(shares) - len(few)} of {len(shares)}: {text}",
        CONFIRMED if not few else PARTLY if len(few) < len(shares) else NOT_REPRODUCED,
        "with a position nothing but closing it and waiting may begin in most bars, and closing ends with .02 a step",
    )


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {"throughput": throughput, "diversity": diversity}
"""Experiments by name."""
