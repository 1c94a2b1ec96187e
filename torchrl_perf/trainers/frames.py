"""Pictures of a policy at work, step by step, for a film or a window."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.evaluation import Evaluation
from torchrl_perf.trainers.policies import LoadedPolicy, SavedRun
from torchrl_perf.trainers.variants import source_for

__all__ = ["frames"]


def frames(
    run: SavedRun,
    policy: LoadedPolicy,
    *,
    seed: int,
    episodes: int = 1,
    max_steps: int = 500,
    size: tuple[int, int] = (288, 432),
    changes: dict[str, Any] | None = None,
) -> Iterator[np.ndarray]:
    """One picture after each step of one env, for a number of episodes.

    An env of the package draws itself, one of Gymnasium's is asked for ``"rgb_array"``.

    Args:
        run: gives the env.
        policy: acts.
        seed: of the env.
        episodes: how many are shown.
        max_steps: at most so many pictures.
        size: height and width of an env's that draws itself.
        changes: variant of the task, as for :func:`~torchrl_perf.trainers.variants.env_for`.

    Yields:
        uint8 ``[H, W, 3]``.

    Raises:
        ValueError: for an env that has no picture.
    """
    source = source_for(run, 1, seed=seed, changes=changes, drawn=True)
    options: dict[str, Any] = {"acceleration": policy.acceleration, "mode": "eager", "steps": 1}
    evaluation = Evaluation(source, policy, seed=seed, max_steps=max_steps, **options)
    collector = evaluation.collector
    try:
        draw = _drawer(collector, size)
        with seeded(seed, evaluation.device):
            for _ in range(max_steps):
                following = collector.collect().get("next")
                episodes -= bool(following.get("done").all())
                if episodes == 0:
                    break
                yield draw()
    finally:
        evaluation.close()


def _drawer(collector: Any, size: tuple[int, int]) -> Any:
    """A function that gives the picture of the first env."""
    groups = getattr(collector, "groups", None)
    if groups is not None:
        envs = groups[0].envs
        return lambda: np.asarray(envs.render()[0], dtype=np.uint8)
    env = collector.env
    while not isinstance(env, AutoResetEnv) and getattr(env, "base_env", None) is not None:
        env = env.base_env
    if not isinstance(env, AutoResetEnv):
        raise ValueError(
            f"play: expected an env that draws itself, received {type(collector.env).__name__} without a render "
            "method. Remedy: an env of the package or of Gymnasium."
        )
    height, width = size
    return lambda: env.render(height=height, width=width)[0].to("cpu").numpy()
