"""Transforms that step the env more than once, or inside a reset; an env that resets itself needs special care."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.transforms import ConditionalPolicySwitch, FrameSkipTransform, MultiAction, NoopResetEnv

from torchrl_perf.collectors.native_autoreset import transforms_of
from torchrl_perf.envs.repeated_steps import joined
from torchrl_perf.runtime.upstream.envs import inner_step_of, replaced

STEP_IN_RESET = (NoopResetEnv, ConditionalPolicySwitch)
"""Transforms that step the env inside a reset, whether or not a row of its mask is set: resets ask the host first."""


def frame_skips(env: EnvBase) -> list[FrameSkipTransform]:
    """The frame skips above ``env`` that repeat a step."""
    return [each for each in transforms_of(env) if isinstance(each, FrameSkipTransform) and each.frame_skip > 1]


def steps_in_reset(env: EnvBase) -> bool:
    """Whether a transform of ``env`` steps it inside a reset."""
    return any(isinstance(each, STEP_IN_RESET) for each in transforms_of(env))


def check_repeats(env: EnvBase, native: bool) -> None:
    """Refuse transforms that take several steps if an episode's end among them would be lost.

    Raises:
        ValueError: several actions a step, or steps in a reset, above an env that resets itself under TorchRL's mark.
    """
    kinds = (MultiAction, *STEP_IN_RESET, FrameSkipTransform)
    wrong = [each for each in transforms_of(env) if isinstance(each, kinds)] if native else []
    wrong = [each for each in wrong if getattr(each, "frame_skip", 2) > 1]
    if wrong:
        raise ValueError(
            "env: expected no transform that repeats steps above an env that resets itself, received "
            f"{type(wrong[0]).__name__}, which would go on into the next episode within one step. Remedy: repeat the "
            "action inside the env."
        )


def skipped_step(
    transform: FrameSkipTransform, tensordict: TensorDictBase, next_tensordict: TensorDictBase
) -> TensorDictBase:
    """TorchRL's frame skip, but a row that has ended no longer changes and gets no more reward.

    Args:
        transform: whose ``frame_skip`` and parent are used.
        tensordict: root of the step, with the action.
        next_tensordict: result of the first of the repeated steps.

    Returns:
        Result of the last step or, in a row that has ended, of the step that ended it; rewards are summed up to there.
    """
    parent = transform.parent
    rewards = [key for key in parent.reward_keys if next_tensordict.get(key, None) is not None]
    total = {key: next_tensordict.get(key) for key in rewards}
    for _ in range(transform.frame_skip - 1):
        before = dict(next_tensordict.items(True, True))
        next_tensordict = inner_step_of(parent)(tensordict)
        for key, value in joined(before, dict(next_tensordict.items(True, True)), rewards).items():
            next_tensordict.set(key, value)
        total = {key: value + next_tensordict.get(key) for key, value in total.items()}
    for key, value in total.items():
        next_tensordict.set(key, value)
    return next_tensordict


class EndsKept:
    """Inside the context the frame skips of an env stop at the ends of episodes, see :func:`skipped_step`."""

    def __init__(self, env: EnvBase) -> None:
        for skip in frame_skips(env):  # listed now, since the compiler cannot trace it
            _ = skip.parent.reward_keys, skip.parent.full_action_spec, skip.parent.full_done_spec
        self._skips: list[tuple[FrameSkipTransform, Callable[..., TensorDictBase]]] = [
            (skip, partial(skipped_step, skip)) for skip in frame_skips(env)
        ]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context; not reentrant."""
        with ExitStack() as stack:
            for skip, step in self._skips:
                stack.enter_context(replaced(skip, {"_step": step}))
            yield
