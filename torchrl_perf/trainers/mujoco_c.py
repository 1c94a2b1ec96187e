"""The task of a policy that learnt on MuJoCo Warp in MuJoCo's own C code: Gymnasium's env of the same name."""

import logging
from typing import Any

from torchrl_perf.registry import ROBOTS
from torchrl_perf.trainers.evaluation import OTHER_SEEDS, Episodes, Evaluation, below
from torchrl_perf.trainers.sources import gymnasium_source

__all__ = ["episodes_in_c", "task_in_c"]

logger = logging.getLogger("torchrl_perf")
VERSION = "-v5"


def task_in_c(env: Any) -> str:
    """Gymnasium's id of the task that an env on MuJoCo Warp is; an empty text for any other env.

    Args:
        env: a TorchRL env, also with transforms, or a name of ``--env``.
    """
    if isinstance(env, str):
        return env + VERSION if env in ROBOTS else ""
    while env is not None and (lower := below(env)) is not None:
        env = lower
    return getattr(type(env), "gymnasium_id", "")


def episodes_in_c(trainer: Any) -> Episodes | None:
    """Whole episodes of a trainer's policy in MuJoCo's C code, ``eval_episodes`` of them; None for any other env.

    Args:
        trainer: at the end of its run.
    """
    if not (name := task_in_c(getattr(trainer, "env", None))):
        return None
    from gymnasium.error import Error

    config = trainer.config
    try:
        source = gymnasium_source(name, config.eval_episodes, trainer.device)
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
