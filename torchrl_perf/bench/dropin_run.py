"""One variant of one loop, timed in a process of its own: ``python -m torchrl_perf.bench.dropin_run`` prints JSON.

The clock starts before the parts are made, when imports and the CUDA context are there, so that compilation and the
recording of graphs count. On a CPU it is the process's own time on one thread, which other programs do not lengthen.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrl_perf.bench.dropin_loops import LOOPS, READ_EVERY, Loop, PPOLoop, Sizes
from torchrl_perf.bench.report import json_text
from torchrl_perf.runtime import synchronize
from torchrl_perf.trainers import DQNConfig, DQNTrainer, PPOConfig, PPOTrainer, SACConfig, SACTrainer

THEIRS, FIRST, ALL, CAPTURED, TRAINER = "torchrl", "first", "all", "captured", "trainer"
"""Variants beside the parts' own: none replaced; the loop's first parts; all; all in one graph; our trainer."""
LEAST_MARKS = 8
"""Iterations after which a run may be cut: the last half of fewer is no steady state."""


@dataclass(frozen=True)
class RunOptions:
    """Options of ``python -m torchrl_perf.bench.dropin_run``."""

    algorithm: str
    """ppo, dqn or sac."""
    variant: str
    """A part of the loop, or one of torchrl, first, all, captured, trainer."""
    device: str = "cpu"
    """Device."""
    limit: float = 5.0
    """Seconds after which the run is cut, once the first frames are through."""
    frames: int = 0
    """Frames of the run; 0 is the example's number."""


def variants_of(algorithm: str) -> tuple[str, ...]:
    """The variants of an algorithm, those that say most first."""
    loop = LOOPS[algorithm]
    return (THEIRS, ALL, CAPTURED, *((FIRST,) if loop.first_parts else ()), *loop.parts, TRAINER)


def replaced_by(algorithm: str, variant: str) -> tuple[str, ...]:
    """The parts that a variant replaces.

    Raises:
        ValueError: for a variant that the algorithm does not have.
    """
    loop = LOOPS[algorithm]
    if variant not in variants_of(algorithm):
        raise ValueError(
            f"variant: expected one of {', '.join(variants_of(algorithm))} for {algorithm}, received {variant!r}. "
            "Remedy: one of these."
        )
    whole = {THEIRS: (), FIRST: loop.first_parts, ALL: loop.parts, CAPTURED: loop.parts, TRAINER: loop.parts}
    return whole.get(variant, (variant,))


def sizes_of(algorithm: str, frames: int) -> Sizes:
    """The example's sizes, with another number of frames unless it is 0."""
    sizes = LOOPS[algorithm].default
    if not frames:
        return sizes
    return replace(sizes, total_frames=frames, first_frames=min(sizes.first_frames, max(1, frames // 2)))


# -- trainers ---------------------------------------------------------------------------------------------------------


def make_trainer(algorithm: str, sizes: Sizes, device: torch.device) -> Any:
    """This package's trainer with the settings of a loop."""
    shared = {
        "num_envs": sizes.num_envs,
        "num_steps": sizes.frames_per_batch // sizes.num_envs,
        "total_steps": sizes.total_frames,
        "seed": sizes.seed,
        "device": str(device),
        "logger": "none",
        "log_interval": READ_EVERY,
        "activation": "tanh",
    }
    if algorithm == "ppo":
        epochs = PPOLoop.epochs
        ppo = PPOConfig.without_task(
            **shared, epochs=epochs, minibatches=sizes.updates // epochs, learning_rate=sizes.learning_rate,
            anneal_learning_rate=False, max_grad_norm=PPOLoop.max_grad_norm,
        )  # fmt: skip
        return PPOTrainer(ppo)
    replay = {
        "hidden_size": 128,
        "capacity": sizes.capacity,
        "minibatch_size": sizes.batch_size,
        "updates_per_iteration": sizes.updates,
        "learning_starts": sizes.batch_size,
    }
    if algorithm == "dqn":
        dqn = DQNConfig.without_task(
            **shared, **replay, learning_rate=sizes.learning_rate, double=False, tau=0.01, target_interval=1,
            eps_frames=20_000,
        )  # fmt: skip
        return DQNTrainer(dqn)
    rates = dict.fromkeys(
        ("actor_learning_rate", "critic_learning_rate", "temperature_learning_rate"), sizes.learning_rate
    )
    return SACTrainer(SACConfig.without_task(**shared, **replay, **rates, env="Pendulum", loss_function="smooth_l1"))


def iterations_of_trainer(trainer: Any) -> Iterator[None]:
    """Yields after each iteration of a trainer, without an end."""
    while True:
        trainer.step()
        yield


# -- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """How far a run has come."""

    frames: int
    """Frames collected and learnt from."""
    seconds: float
    """Seconds since the parts began to be made, all work of the device done."""


def marks_of(
    iterations: Iterator[None], sizes: Sizes, now: Callable[[], float], every: int, limit: float
) -> list[Mark]:
    """The marks of a run: each iteration of the first ``READ_EVERY``, then each ``every``-th.

    Args:
        iterations: the run, one item an iteration.
        sizes: of the loop.
        now: seconds since the beginning, once the device has done its work.
        every: iterations from one mark to the next, where the host runs ahead of the device in between.
        limit: seconds after which the run is cut, once the first frames and enough marks are there.
    """
    marks: list[Mark] = []
    for count, _ in enumerate(iterations, start=1):
        frames = count * sizes.frames_per_batch
        is_over = frames >= sizes.total_frames
        if not is_over and count > READ_EVERY and count % every:
            continue
        marks.append(Mark(frames, now()))
        enough = frames >= sizes.first_frames and len(marks) >= LEAST_MARKS
        if is_over or (enough and marks[-1].seconds > limit):
            break
    return marks


def figures_of(marks: list[Mark], sizes: Sizes) -> dict[str, Any]:
    """Speed from the start and in the last half of a run.

    Args:
        marks: of the run, at least two.
        sizes: of the loop.

    Returns:
        ``first_frames`` and ``first_per_second`` (frames a second until they were through), ``frames_per_second`` and
        ``updates_per_second`` in the last half of the frames, ``start_s`` (seconds until an iteration took less than
        twice as long as one does then), ``run_s`` (seconds of the whole run) and ``extrapolated`` (whether the run was
        cut, so that its rest is reckoned at the speed of the last half).
    """
    last = marks[-1]
    middle = next(mark for mark in reversed(marks[:-1]) if mark.frames <= last.frames / 2 or mark is marks[0])
    steady = (last.frames - middle.frames) / (last.seconds - middle.seconds)
    first = next((mark for mark in marks if mark.frames >= sizes.first_frames), last)
    slow = 2 * sizes.frames_per_batch / steady
    pairs = zip([Mark(0, 0.0), *marks], marks, strict=False)
    fast = next((after for before, after in pairs if after.seconds - before.seconds < slow), last)
    rest = max(0, sizes.total_frames - last.frames)
    return {
        "frames": last.frames,
        "seconds": last.seconds,
        "first_frames": first.frames,
        "first_per_second": first.frames / first.seconds,
        "frames_per_second": steady,
        "updates_per_second": steady * sizes.updates / sizes.frames_per_batch,
        "start_s": fast.seconds,
        "run_s": last.seconds + rest / steady,
        "run_frames": last.frames + rest,
        "extrapolated": rest > 0,
    }


def measure(
    algorithm: str, variant: str, device: torch.device, limit: float = 5.0, sizes: Sizes | None = None
) -> dict[str, Any]:
    """The row of one variant.

    Args:
        algorithm: of :data:`LOOPS`.
        variant: of :func:`variants_of`.
        device: where everything runs.
        limit: seconds after which the run is cut.
        sizes: of the loop; by default the example's.
    """
    sizes = sizes or LOOPS[algorithm].default
    replaced = replaced_by(algorithm, variant)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    torch.zeros(1, device=device)  # makes the CUDA context
    synchronize(device)
    start = clock()

    def now() -> float:
        synchronize(device)
        return clock() - start

    made: Any
    if variant == TRAINER:
        made = make_trainer(algorithm, sizes, device)
        iterations = iterations_of_trainer(made)
    else:
        made = LOOPS[algorithm](sizes, device, replaced, captured=variant == CAPTURED)
        iterations = made.iterations()
    # the others look at the returns of each batch, which waits for the device
    every = READ_EVERY if variant in (CAPTURED, TRAINER) else 1
    figures = figures_of(marks_of(iterations, sizes, now, every, limit), sizes)
    mean_return = made.mean_return if isinstance(made, Loop) else None
    made.close()
    return {
        "algorithm": algorithm,
        "variant": variant,
        "replaced": list(replaced),
        **figures,
        "mean_return": mean_return,
        "clock": "wall" if device.type == "cuda" else "process, one thread",
    }


def main(argv: list[str] | None = None) -> int:
    """Times one variant and prints its row as the last line."""
    import tyro

    options = tyro.cli(RunOptions, args=argv, prog="python -m torchrl_perf.bench.dropin_run")
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes = sizes_of(options.algorithm, options.frames)
    row = measure(options.algorithm, options.variant, device, options.limit, sizes)
    print(json_text(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
