"""The claims of options_market on its loop from end to end, and on what the card does in it.

Steps a second by number of envs are in :mod:`~studies.options_market.rates`, the switches of an update in
:mod:`~studies.options_market.ablation`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.options_market import ablation as market_ablation
from studies.options_market import rates as market_rates
from studies.options_market.agents import ENVS, STEPS, UPDATES, PlainUpdate, outputs_of, same_steps, settings
from studies.options_market.rates import STEP_RATE
from studies.options_market.runs import (
    AFTER,
    BEFORE,
    COMPILED,
    EAGER,
    WHOLE,
    PackageLoop,
    original,
    size_note,
    sizes,
)
from studies.sitting import (
    CONFIRMED,
    NOT_HERE,
    NOT_REPRODUCED,
    PARTLY,
    Sitting,
    Variant,
    as_tuple,
    difference,
    gpu_reading,
    judge,
    times_text,
)
from torchrl_perf.runtime import CaptureError, HostSyncError
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer

# -- from end to end --------------------------------------------------------------------------------------------------


def end_to_end(sitting: Sitting) -> None:
    """Env steps a second of the original's loop, of its rewrite and of the package's, two updates a step in each."""
    _same_market(sitting)
    _same_update(sitting)
    _same_values(sitting)
    config = settings(sitting.device, **sizes(sitting))
    loops = {name: original(config, sitting.device, name == AFTER) for name in (BEFORE, AFTER)}
    modes = {EAGER: "eager"} | ({WHOLE: "whole"} if sitting.cuda else {})
    modes |= {COMPILED: "compiled"} if sitting.cuda and sitting.compile else {}
    made: dict[str, PackageLoop] = {}
    case = f"E={ENVS}"
    for name, mode in modes.items():
        try:
            made[name] = PackageLoop(config, mode)
        except (CaptureError, HostSyncError) as error:  # of this variant alone: the others are worth a figure
            sitting.add("end-to-end", case, name, note=f"not captured: {str(error)[:120]}")
    note = "market, update and rewards are compared above"
    steps = config.num_steps
    variants = [
        Variant(name, partial(loop.iteration, steps), compared=False, note=note) for name, loop in loops.items()
    ]
    variants += [Variant(name, loop.iteration, compared=False) for name, loop in made.items()]
    rows = sitting.compare("end-to-end", case, variants)
    for row in rows.values():
        row["steps_per_second"] = config.batch_size / row["us"] * 1e6
    for loop in made.values():
        loop.close()
    _end_to_end_verdicts(sitting, rows)


def _end_to_end_verdicts(sitting: Sitting, rows: dict[str, dict[str, Any]]) -> None:
    after = sitting.ratio_of("end-to-end", BEFORE, AFTER)
    sitting.verdict(
        "end-to-end",
        "training throughput 2.5-3x (the original's batches)",
        times_text(after),
        judge(after, 2.5, 1.1),
        "two updates of 256 rows a step stay as they are",
    )
    ours = {name: sitting.ratio_of("end-to-end", BEFORE, name) for name in (EAGER, WHOLE, COMPILED)}
    ours = {name: values[0] for name, values in ours.items() if values}
    sitting.verdict(
        "end-to-end",
        "training throughput 2.5-3x (the package)",
        ", ".join(f"{value:.3g}x {name}" for name, value in ours.items()),
        judge(max(ours.values(), default=None), 2.5, 1.1),
        "the same updates to data",
    )
    rates = {name: row["steps_per_second"] for name, row in rows.items()}
    for name, which in ((AFTER, "the original's batches"), (max(rates, key=lambda key: rates[key]), "the fastest")):
        if name in rates:
            sitting.verdict(
                "end-to-end",
                f"900-1,200 steps/s with {ENVS} envs ({which})",
                f"{rates[name]:,.0f} steps/s",
                judge(rates[name], STEP_RATE[0], STEP_RATE[0] / 2),
                size_note(sitting),
            )


def _same_market(sitting: Sitting) -> None:
    """Whether the market in NumPy is that in tensors, step by step."""
    one, other = same_steps(sitting.device)
    apart = difference(as_tuple(one), as_tuple(other))
    sitting.add("end-to-end", "the same bars", "market", off_by=apart, tolerance=1e-3, ok=apart <= 1e-3)


def _same_update(sitting: Sitting, count: int = 3) -> None:
    """Whether updates by autograd and Adam move all networks as the package's do, from the same rows and numbers."""
    config = settings(sitting.device, hidden_size=32, minibatch_size=64, precision="ieee", learning_starts=256)
    ours, theirs = (OptionsMarketTrainer(config) for _ in range(2))
    plain = PlainUpdate(theirs)
    theirs.load_state_dict(ours.state_dict())
    before = outputs_of(ours)
    for _ in range(config.fill_iterations + 4):
        ours.fill()
    for number in range(count):
        sample = ours.buffer.sample(64)
        torch.manual_seed(number)
        ours.update(sample.clone())
        torch.manual_seed(number)
        rows = theirs.controller.write_following(sample.clone())
        plain.update(rows, ours.choices.sample(64))
    after = [as_tuple(outputs_of(trainer)) for trainer in (ours, theirs)]
    moved = difference(after[0], as_tuple(before))
    apart, most = difference(*after), 0.05 * moved
    note = f"of {moved:.1e} that {count} updates move what the networks say"
    entries = {"off_by": apart, "tolerance": most, "ok": moved > 0 and apart <= most, "note": note}
    sitting.add("end-to-end", "the same update", "autograd, Adam", **entries)
    for trainer in (ours, theirs):
        trainer.close()


def _same_values(sitting: Sitting) -> None:
    """Rewards and values of short runs of both loops, several seeds each: within five standard errors."""
    iterations, seeds = sitting.pick(1, 8, 3), range(3)
    config = settings(sitting.device, hidden_size=32, minibatch_size=64, learning_starts=256)
    found: dict[str, list[list[float]]] = {BEFORE: [], EAGER: []}
    for seed in seeds:
        loop = original(config, sitting.device, False, seed)
        first = len(loop.rewards)
        loop.iteration(iterations * STEPS)
        values = loop.records["value"][-UPDATES:]
        found[BEFORE].append([float(np.mean(loop.rewards[first:])), float(np.mean(values))])
        found[EAGER].append(_package_values(replace(config, seed=seed), iterations))
    one, other = (torch.tensor(found[name], dtype=torch.float64) for name in (BEFORE, EAGER))
    apart, error = (one.mean(0) - other.mean(0)).abs(), ((one.var(0) + other.var(0)) / len(seeds)).sqrt()
    for index, name in enumerate(("reward of a step", "value of the critics")):
        means = [float(column.mean(0)[index]) for column in (one, other)]
        off_by, most = float(apart[index]), 5 * float(error[index])
        note = f"{means[0]:.3g} in the original's loop, {means[1]:.3g} in the package"
        sitting.add("end-to-end", name, EAGER, off_by=off_by, tolerance=most, ok=off_by <= most, note=note)


def _package_values(config: OptionsMarketConfig, iterations: int) -> list[float]:
    """Mean reward of the steps with updates, and the critics' mean value in the last of them."""
    trainer = OptionsMarketTrainer(config)
    for _ in range(config.fill_iterations):
        trainer.step()
    rewards: list[Tensor] = []
    for number in range(iterations):
        trainer.metrics.flush(number)
        batch = trainer.collect()
        rewards.append(batch["next", "reward"].mean())
        trainer.digest(batch)
    row = trainer.metrics.flush(iterations) or {}
    trainer.close()
    return [float(torch.stack(rewards).mean()), float(row["train/value"])]


# -- utilisation ------------------------------------------------------------------------------------------------------


def utilisation(sitting: Sitting) -> None:
    """What NVML says of the GPU while the loops run."""
    claims = ("GPU utilisation 20% -> 70-80%", "GPU utilisation of the package above 70%", "temperature below 80 C")
    if not sitting.cuda:
        for claim in claims:
            sitting.verdict("utilisation", claim, "", NOT_HERE, "no GPU")
        return
    config = settings(sitting.device, **sizes(sitting))
    package = PackageLoop(config, "whole")
    calls: dict[str, Callable[[], Any]] = {
        BEFORE: partial(original(config, sitting.device, False).iteration, 1),
        AFTER: partial(original(config, sitting.device, True).iteration, 1),
        WHOLE: package.iteration,
    }
    found = {name: gpu_reading(call, sitting) for name, call in calls.items()}
    package.close()
    for name, reading in found.items():
        text = ", ".join(f"{key.removeprefix('gpu/')} {value:,.0f}" for key, value in reading.items())
        sitting.add("utilisation", f"E={ENVS}", name, note=text or "no reading", **reading)
    before, after, ours = (found[name].get("gpu/utilization") for name in (BEFORE, AFTER, WHOLE))
    remark = "a kernel that runs says nothing of how full the GPU is"
    known = before is not None and after is not None
    sitting.verdict(
        "utilisation",
        claims[0],
        f"{before:.0f}% -> {after:.0f}% of the time a kernel ran" if known else "",
        NOT_HERE if before is None or after is None else _rise(before, after),
        remark,
    )
    text = "" if ours is None else f"{ours:.0f}%"
    sitting.verdict("utilisation", claims[1], text, judge(ours, 70.0, 40.0), remark)
    hottest = max(
        (reading["gpu/temperature_c"] for reading in found.values() if "gpu/temperature_c" in reading), default=None
    )
    text = "" if hottest is None else f"{hottest:.0f} C"
    word = judge(None if hottest is None else 80.0 - hottest, 0.0, 0.0)
    sitting.verdict("utilisation", claims[2], text, word, "of another card than the original's")


def _rise(before: float, after: float) -> str:
    return CONFIRMED if after >= 70.0 and before <= 50.0 else PARTLY if after > 1.1 * before else NOT_REPRODUCED


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "end-to-end": end_to_end,
    "utilisation": utilisation,
    **market_rates.EXPERIMENTS,
    **market_ablation.EXPERIMENTS,
}
"""Experiments by name."""
