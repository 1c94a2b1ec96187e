"""Wall time until a trainer has learnt, without compilation and capture."""

from typing import Any

from torchrl_perf.runtime import Stopwatch, synchronize


def time_to_return(trainer: Any, target: float, *, warmup: int, every: int) -> dict[str, Any]:
    """Trains until the last 100 finished episodes have a mean return of ``target``; closes the trainer.

    Args:
        trainer: a trainer that has taken no step.
        target: mean return.
        warmup: steps that compile and record; the state before them is restored.
        every: steps between two reads of the return, each of which waits for the device.

    Returns:
        ``seconds`` (None if the run ended before), ``steps`` of the envs, ``mean_return`` and ``start_s``, the
        seconds of the warm-up.
    """
    config = trainer.config
    start = Stopwatch("cpu").start()
    initial = trainer.state_dict()
    for _ in range(warmup):
        trainer.step()
    synchronize(trainer.device)
    start.stop()
    trainer.load_state_dict(initial)
    watch = Stopwatch("cpu").start()
    for done in range(1, config.iterations + 1):
        trainer.step()
        if done % every == 0 and float(trainer.episodes.mean_return) >= target:
            break
    watch.stop()
    reached = float(trainer.episodes.mean_return)
    trainer.close()
    return {
        "seconds": watch.seconds if reached >= target else None,
        "steps": done * config.batch_size,
        "mean_return": reached,
        "start_s": start.seconds,
    }
