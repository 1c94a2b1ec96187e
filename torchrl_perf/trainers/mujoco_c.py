"""The task of a policy that learnt on MuJoCo Warp in MuJoCo's own C code: Gymnasium's env of the same name."""

import logging
from typing import Any

from torchrl_perf.registry import ROBOTS
from torchrl_perf.trainers.evaluation import OTHER_SEEDS, Episodes, Evaluation, below
from torchrl_perf.trainers.sources import gymnasium_source

__all__ = ["episodes_in_c", "names_in_c", "task_in_c"]

logger = logging.getLogger("torchrl_perf")
VERSION = "-v5"


def task_in_c(env: Any) -> str:
    """Gymnasium's id of the task that an env on MuJoCo Warp is; an empty text for any other env.

    A subclass of a task is another task, unless it has a ``gymnasium_id`` in its own body.

    Args:
        env: a TorchRL env, also with transforms, or a name of ``--env``.
    """
    if isinstance(env, str):
        return env + VERSION if env in ROBOTS else ""
    return vars(type(_innermost(env))).get("gymnasium_id", "")


def _innermost(env: Any) -> Any:
    """The env below transforms."""
    while env is not None and (lower := below(env)) is not None:
        env = lower
    return env


def names_in_c(robot: str) -> set[str]:
    """The arguments that a task on MuJoCo Warp and Gymnasium's env of it both have.

    Args:
        robot: name of the task.
    """
    import torchrl_perf.envs.mujoco as robots

    return getattr(robots, robot).names_in_c()


def episodes_in_c(trainer: Any) -> Episodes | None:
    """Whole episodes of a trainer's policy in MuJoCo's C code, ``eval_episodes`` of them; None for any other env.

    They are of the task with the arguments that the env has of it. Physics settings, and noise of masses, friction and
    gains, are none of the task.

    Args:
        trainer: at the end of its run.
    """
    if not (name := task_in_c(getattr(trainer, "env", None))):
        return None
    from gymnasium.error import Error

    config = trainer.config
    try:
        arguments = getattr(_innermost(trainer.env), "arguments_in_c", dict)()
        source = gymnasium_source(name, config.eval_episodes, trainer.device, **arguments)
    except (ImportError, Error) as error:  # a run that has learnt for an hour does not fail because of its last line
        logger.warning(
            "%s cannot be made in MuJoCo's C code: %s. Remedy: pip install 'torchrl_perf[mujoco]'.", name, error
        )
        return None
    seed = config.seed + OTHER_SEEDS
    evaluation = Evaluation(source, trainer.policy, seed=seed, acceleration=trainer.acceleration)
    try:
        return evaluation.run()
    finally:
        evaluation.close()
