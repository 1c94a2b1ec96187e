"""Pictures of a policy at work, step by step, for a film or a window."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Bounded

from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.envs.drawing import bars, cells, heights
from torchrl_perf.envs.mujoco.pictures import choose_opengl
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.evaluation import Evaluation, below
from torchrl_perf.trainers.mujoco_c import task_in_c
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

    An env of the package draws itself, one of Gymnasium's is asked for ``"rgb_array"``. Of one that has no picture the
    newest image of its observation is shown, or else its numbers as bars.

    Args:
        run: gives the env.
        policy: acts.
        seed: of the env.
        episodes: how many are shown.
        max_steps: at most so many pictures.
        size: height and width of pictures that are not the env's own.
        changes: variant of the task, as for :func:`~torchrl_perf.trainers.variants.env_for`.

    Yields:
        uint8 ``[H, W, 3]``.
    """
    if task_in_c(run.robot):
        choose_opengl()
    source = source_for(run, 1, seed=seed, changes=changes, drawn=True)
    options: dict[str, Any] = {"acceleration": policy.acceleration, "mode": "eager", "steps": 1}
    evaluation = Evaluation(source, policy, seed=seed, max_steps=max_steps, **options)
    collector = evaluation.collector
    try:
        draw = _drawer(collector, size)
        with seeded(seed, evaluation.device):
            for _ in range(max_steps):
                batch = collector.collect()
                episodes -= bool(batch.get(("next", "done")).all())
                if episodes == 0:
                    break
                yield draw(batch)
    finally:
        evaluation.close()


def _drawer(collector: Any, size: tuple[int, int]) -> Callable[[TensorDictBase], np.ndarray]:
    """A function that gives the picture of the first env, of a step ``[1, 1]``."""
    height, width = size
    groups, env = getattr(collector, "groups", None), getattr(collector, "env", None)
    while env is not None and not isinstance(env, AutoResetEnv):
        env = below(env)
    if env is not None:
        return lambda batch: env.render(height=height, width=width)[0].to("cpu").numpy()

    def draw(batch: TensorDictBase) -> np.ndarray:
        own = None if groups is None else _rendered(groups[0].envs)
        return _observed(collector, batch, height, width) if own is None else own

    return draw


def _rendered(envs: Any) -> np.ndarray | None:
    """The picture that the first of some vector envs gives; None for one that has none."""
    try:
        pictures = envs.render()
    except NotImplementedError:
        return None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "mujoco":
            raise
        raise ValueError(
            f"picture: expected OpenGL for MuJoCo's renderer, received {error}. Remedy: apt install libegl1, and "
            "MUJOCO_GL=egl."
        ) from error
    picture = None if not pictures else np.asarray(pictures[0])
    return picture.astype(np.uint8) if picture is not None and picture.ndim == 3 else None


def _observed(collector: Any, batch: TensorDictBase, height: int, width: int) -> np.ndarray:
    """The newest image that is observed, or the numbers as bars."""
    specs = getattr(collector, "specs", None) or collector.env
    shares = []
    for key, spec in specs.observation_spec.items(True, True):
        value = batch.get(key)[0, -1:]
        if spec.dtype == torch.uint8 and value.ndim > 2:
            return _image(value[0], height, width)
        bounds = (spec.space.low, spec.space.high) if isinstance(spec, Bounded) else ()
        shares.append(heights(value.reshape(1, -1), *(bound[:1].reshape(1, -1) for bound in bounds)))
    return bars(torch.cat(shares, -1), height, width)[0].cpu().numpy()


def _image(value: torch.Tensor, height: int, width: int) -> np.ndarray:
    """An image ``[H, W]``, ``[H, W, 3]`` or ``[..., H, W]``, the newest last, on a canvas of a size."""
    value = value.cpu()
    while value.ndim > 2 and value.shape[-1] != 3:
        value = value[-1]
    while value.ndim > 3:
        value = value[-1]
    coloured = value if value.ndim == 3 else value.unsqueeze(-1).expand(*value.shape, 3)
    return cells(coloured.unsqueeze(0), height, width)[0].numpy()
