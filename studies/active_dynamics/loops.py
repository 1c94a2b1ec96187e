"""The claims of active_dynamics on its loop, from end to end: speed, memory, and what has been learnt."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from studies.active_dynamics.loss import memory_events
from studies.originals.latent_agent import LoopTraining
from studies.sitting import CONFIRMED, NOT_HERE, PARTLY, Sitting, Variant, busy_share, judge, times_text
from torchrl_perf.runtime import Captured, CaptureError, HostSyncError, capture, synchronize
from torchrl_perf.runtime.memory import MIB, heap_bytes
from torchrl_perf.systems.active_dynamics import MultiStepELBOLoss
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.evaluation import record
from torchrl_perf.systems.active_dynamics.networks import make_field_env
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE
from torchrl_perf.systems.active_dynamics.trainer import ActiveDynamicsTrainer

LEGACY, OPTIMISED, PACKAGE, GRAPH = "the original's loop", "with its optimisations", "package", "package, in a graph"
MANY = 256
"""Points of the package's loop on CUDA beside those that the others have."""
WARM_UP = 4
"""Calls of a captured function until its graph replays."""


def settings_of(sitting: Sitting, seed: int) -> ActiveDynamicsConfig:
    """Settings that all loops have: the same steps, updates, windows and plans."""
    steps, num_envs = (10, 2) if sitting.quick else (20, 4)
    return ActiveDynamicsConfig.without_task(
        num_envs=num_envs,
        num_steps=steps,
        window=steps,
        prediction_horizon=steps // 2,
        random_steps=steps * num_envs,
        max_episode_steps=0,
        history=200,
        minibatch_size=sitting.pick(4, 16),
        updates=sitting.pick(4, 10),
        plan_horizon=sitting.pick(4, 10),
        candidates=sitting.pick(16, 32),
        plan_rounds=sitting.pick(2, 5),
        beta_anneal=20,
        mode="eager",
        device=str(sitting.device),
        seed=seed,
    )


def trained(
    config: ActiveDynamicsConfig, device: torch.device, iterations: int
) -> tuple[ActiveDynamicsTrainer, Callable[[], Any], str]:
    """The package's trainer after some iterations, one more of them as a call, on CUDA in a graph, and a note."""
    trainer, note = ActiveDynamicsTrainer(config), ""
    iterate: Callable[[], Any] = trainer.iteration
    if device.type == "cuda":
        iterate, note = capture(trainer.iteration, device=device, audit=False), "the iteration in one graph"
    try:
        for _ in range(iterations):
            iterate()
    except (CaptureError, HostSyncError) as error:  # of the graph alone: the loop is worth a figure without it
        trainer, note = ActiveDynamicsTrainer(config), f"not captured: {str(error)[:120]}"
        iterate = trainer.iteration
        for _ in range(iterations):
            iterate()
    return trainer, iterate, note


def release(iterate: Callable[[], Any]) -> None:
    """Releases a graph, if it is one."""
    if isinstance(iterate, Captured):
        iterate.release()


@torch.no_grad()
def lower_bound(model: SeqVAE, config: ActiveDynamicsConfig, device: torch.device) -> float:
    """The evidence lower bound of fresh data, in nats a step: the same data and draws for each model."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        env = make_field_env(config, device, 32, 0)
        batch = record(model, env, steps=20, seed=99)
        loss = MultiStepELBOLoss(model, horizon=config.kl_horizon, decay=config.kl_decay, samples=config.samples)
        torch.manual_seed(0)
        found = loss(batch)
    return -float(found["loss_recon"] + found["loss_kl"])


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A loop that has been made.

    Attributes:
        iterate: one iteration.
        learn: its updates alone, which is where memory peaks.
    """

    iterate: Callable[[], Any]
    learn: Callable[[], Any]


def make_loop(name: str, config: ActiveDynamicsConfig, device: torch.device) -> Loop:
    """The original's loop, before or after, or the package's."""
    if name == PACKAGE:
        trainer = ActiveDynamicsTrainer(config)
        return Loop(trainer.iteration, trainer.learn)
    loop = LoopTraining(config, device, optimised=name == OPTIMISED)
    return Loop(loop.iteration, loop.update)


def peak_bytes(make: Callable[[], Loop], device: torch.device) -> int | None:
    """Most memory that a loop needs above what there was before it was made, in two iterations.

    On CUDA of all tensors. On a CPU the heap that it holds behind them, and on top of it the most that its updates have
    at once, of the profiler; None where the C library does not say what the heap is.

    Args:
        make: makes the loop.
        device: of the loop.
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loop = make()
        for _ in range(2):
            loop.iterate()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    empty = heap_bytes()
    loop = make()
    for _ in range(2):
        loop.iterate()
    gc.collect()
    held = heap_bytes()
    if empty is None or held is None:
        return None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        loop.learn()
    return held - empty + max(accumulate((size for _, size in memory_events(found)), initial=0))


def memory(sitting: Sitting) -> None:
    """The peak of memory of each loop, from its making on."""
    config, device = settings_of(sitting, 0), sitting.device
    makers = {name: partial(make_loop, name, config, device) for name in (LEGACY, OPTIMISED, PACKAGE)}
    for make in makers.values():
        make().iterate()  # what is loaded at the first use belongs to no loop
    sizes = {name: peak_bytes(make, device) for name, make in makers.items()}
    for name, size in sizes.items():
        note = "no reading" if size is None else f"{size / MIB:.2f} MiB"
        sitting.add("memory", f"N={config.num_envs}", name, peak_bytes=size, note=note)
    before, after, ours = (sizes[name] for name in makers)
    claim = "total memory is 0.6-0.8x"
    if not before or not after or not ours:
        sitting.verdict("memory", claim, "", NOT_HERE, "no reading of the heap")
        return
    text = f"{after / before:.2f}x; the package {ours / before:.2f}x"
    remark = "the peak is in the gradient of the loss, which no change touches"
    sitting.verdict("memory", claim, text, judge(before / after, 1.25, 1.05), remark)


# -- speed, and what has been learnt ----------------------------------------------------------------------------------


def end_to_end(sitting: Sitting) -> None:
    """Training with the same seeds, steps, updates and windows; the bound that is reached, and time."""
    iterations, seeds = sitting.pick((3, 3), (10, 3), (6, 3))
    ours = GRAPH if sitting.cuda else PACKAGE
    bounds: dict[str, list[float]] = {LEGACY: [], OPTIMISED: [], ours: []}
    loops: dict[str, Callable[[], Any]] = {}
    closing: list[Callable[[], None]] = []
    untrained, note = math.nan, ""
    for seed in range(seeds):
        config = settings_of(sitting, seed)
        for name in (LEGACY, OPTIMISED):
            loop = LoopTraining(config, sitting.device, optimised=name == OPTIMISED)
            untrained = lower_bound(loop.model, config, sitting.device)
            for _ in range(iterations):
                loop.iteration()
            bounds[name].append(lower_bound(loop.model, config, sitting.device))
            loops[name] = loop.iteration
        for close in closing:
            close()
        trainer, loops[ours], note = trained(config, sitting.device, iterations)
        closing = [partial(release, loops[ours]), trainer.close]
        bounds[ours].append(lower_bound(trainer.model, config, sitting.device))
    _bound_rows(sitting, bounds, untrained, iterations)
    config, variants = settings_of(sitting, 0), []
    for name, iterate in loops.items():
        off = 5 * _error(bounds[LEGACY], bounds[name])
        mean = torch.tensor([float(np.mean(bounds[name]))])
        said = note if name == ours else ""
        variants.append(
            Variant(name, iterate, lambda mean=mean: mean, tolerance=off, compared=name != OPTIMISED, note=said)
        )
    if sitting.cuda:
        variants.append(_many(config, sitting, closing))
    rows = sitting.compare("end-to-end", f"N={config.num_envs}", variants)
    for row in rows.values():
        row["steps_per_second"] = config.batch_size / row["us"] * 1e6
    for close in closing:
        close()
    gc.collect()
    _speed_verdicts(sitting, ours)


def _many(config: ActiveDynamicsConfig, sitting: Sitting, closing: list[Callable[[], None]]) -> Variant:
    """The package with more points and as many windows for each, its time as that of the others' steps."""
    trainer, iterate, note = trained(wide_settings(config), sitting.device, WARM_UP)
    closing += [partial(release, iterate), trainer.close]
    name, scale = f"{GRAPH}, {MANY} points", config.num_envs / MANY
    return Variant(name, iterate, compared=False, scale=scale, note=f"{note}; the time of as many steps")


def wide_settings(config: ActiveDynamicsConfig) -> ActiveDynamicsConfig:
    """The same for :data:`MANY` points, with as many windows for each."""
    factor = MANY // config.num_envs
    sizes = {"minibatch_size": config.minibatch_size * factor, "random_steps": config.random_steps * factor}
    return replace(config, num_envs=MANY, **sizes)


def _error(one: list[float], other: list[float]) -> float:
    """Standard error of the difference of two means."""
    return float(np.sqrt(np.var(one, ddof=1) / len(one) + np.var(other, ddof=1) / len(other)))


def _bound_rows(sitting: Sitting, bounds: dict[str, list[float]], untrained: float, iterations: int) -> None:
    """What each loop has learnt, and whether the same."""
    sitting.add("end-to-end", "bound", "untrained", bound=untrained, note=f"{untrained:.2f} nats a step")
    apart = {}
    for name, values in bounds.items():
        off, limit = abs(float(np.mean(values) - np.mean(bounds[LEGACY]))), 5 * _error(bounds[LEGACY], values)
        apart[name] = off <= limit
        note = f"{np.mean(values):.2f} +- {np.std(values, ddof=1):.2f} nats a step after {iterations} iterations"
        entries: dict[str, Any] = {} if name == OPTIMISED else {"ok": off <= limit}
        found = {"bound": float(np.mean(values)), "off_by": off, "tolerance": limit}
        sitting.add("end-to-end", "bound", name, **found, **entries, note=note)
    means = ", ".join(f"{np.mean(values):.2f} {name}" for name, values in bounds.items())
    learns = float(np.mean(bounds[LEGACY])) > untrained
    alike = all(apart.values())
    word = CONFIRMED if alike and learns else PARTLY
    remark = "within five standard errors of the seeds" if alike else "not the same within the noise of the seeds"
    sitting.verdict("end-to-end", "training convergence is unchanged", f"{means} nats a step", word, remark)


def _speed_verdicts(sitting: Sitting, ours: str) -> None:
    after = sitting.ratio_of("end-to-end", LEGACY, OPTIMISED)
    remark = "plan, loss and gradient take most of the time; the correction that is dropped is what is saved"
    sitting.verdict(
        "end-to-end", "training loops are 25-40% faster", times_text(after), judge(after, 1.33, 1.05), remark
    )
    found = sitting.ratio_of("end-to-end", LEGACY, ours)
    sitting.verdict("end-to-end", "the package's loop is 25-40% faster", times_text(found), judge(found, 1.33, 1.05))


# -- utilisation ------------------------------------------------------------------------------------------------------


def utilisation(sitting: Sitting) -> None:
    """Share of an iteration in which a kernel of the loop ran on the GPU."""
    claims = "better GPU utilisation", "the package uses more of the GPU"
    if not sitting.cuda:
        for claim in claims:
            sitting.verdict("utilisation", claim, "", NOT_HERE, "no GPU")
        return
    config, found = settings_of(sitting, 0), {}
    for name in (LEGACY, OPTIMISED):
        found[name] = busy_share(make_loop(name, config, sitting.device).iterate, sitting)
    for name, several in ((GRAPH, config), (f"{GRAPH}, {MANY} points", wide_settings(config))):
        trainer, iterate, _ = trained(several, sitting.device, WARM_UP)
        found[name] = busy_share(iterate, sitting)
        release(iterate)
        trainer.close()
    for name, share in found.items():
        sitting.add("utilisation", "", name, utilisation=100 * share, note=f"{share:.0%}")
    remark = "a kernel that runs says nothing of how full the GPU is"
    text = f"{found[LEGACY]:.0%} -> {found[OPTIMISED]:.0%} of the time a kernel ran"
    sitting.verdict("utilisation", claims[0], text, judge(found[OPTIMISED] / found[LEGACY], 1.1, 1.02), remark)
    text = f"{found[GRAPH]:.0%}; with {MANY} points {found[f'{GRAPH}, {MANY} points']:.0%}"
    sitting.verdict("utilisation", claims[1], text, judge(found[GRAPH] / found[LEGACY], 1.1, 1.02))
