"""The meaning of ``--keep-schedules`` beside ``--resume``."""

from torchrl_perf.cli.resume import Start
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.run.schedules import stored_config, with_schedules_of

__all__ = ["kept_schedules"]


def kept_schedules(config: RunConfig, start: Start) -> RunConfig:
    """The settings of a resumed run, with the schedules that it was stored with.

    Args:
        config: settings that are asked for.
        start: the run to go on with; a new one, as of ``--resume auto``, has no others.

    Raises:
        ValueError: without a run to go on with, and for other settings of a schedule.
    """
    before = None if start.run_dir is None else stored_config(start.run_dir, type(config))
    if before is None:
        raise ValueError(
            "--keep-schedules: expected --resume of a run with its config.json, received none. Remedy: leave it out, "
            "or --schedule-steps for a new run."
        )
    return with_schedules_of(before, config)
