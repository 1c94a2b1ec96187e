"""Envs that reset themselves under TorchRL's mark ``_torchrl_native_autoreset``, and transforms above them.

Such an env (a GPU simulator, ``IsaacLabWrapper``, ``MJLabEnv``) returns, where an episode ends, the first observation
of the next episode in place of the final one, which it has lost. TorchRL's convention: the observation under "next" is
then NaN (zero where it is no float), the returned one goes to the next root, and nothing is reset.
"""

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import RandomTruncationTransform, StepCounter, Transform

from torchrl_perf.collectors.env_state import chain
from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.runtime.upstream.envs import complete_done, hide_observations_of_ends, inner_step_of, members_of

MARK = "_torchrl_native_autoreset"


def is_native(env: EnvBase) -> bool:
    """Whether ``env``, or an env below its transforms, has the mark and so resets itself."""
    return any(_marked(each) for each in chain(env))


def _marked(env: EnvBase) -> bool:
    # its own attribute or its class's: TransformedEnv hands out those of the envs below
    return bool(vars(env).get(MARK, getattr(type(env), MARK, False)))


def transforms_of(env: EnvBase) -> list[Transform]:
    """All transforms above the innermost env, outermost env first."""
    outer = [each for each in chain(env) if isinstance(each, TransformedEnv)]
    return [module for each in outer for module in each.transform.modules() if isinstance(module, Transform)]


def check_native(env: EnvBase) -> None:
    """Refuse envs and transforms that the mark cannot be combined with.

    Raises:
        ValueError: if the mark is on or around an env of this package, which keeps its final observations, or below
            transforms that end episodes, of which the env would not learn.
    """
    base = chain(env)[-1]
    if not is_native(env):
        return
    if isinstance(base, AutoResetEnv):
        raise ValueError(
            f"env: expected no mark {MARK!r} on or around {type(base).__name__}, which keeps its final observations "
            "and needs none, received one. Remedy: remove the mark."
        )
    for transform in transforms_of(env):
        limit = isinstance(transform, StepCounter) and transform.max_steps is not None
        if limit or isinstance(transform, RandomTruncationTransform):
            raise ValueError(
                f"env: expected no transform that ends episodes above {type(base).__name__}, which resets itself and "
                f"would not hear of it, received {type(transform).__name__}. Remedy: the env's own time limit."
            )


def check_members(env: EnvBase) -> None:
    """Refuse members of a ``SerialEnv`` that have the mark, since it would reset them a second time.

    The members exist only after the first reset.

    Raises:
        ValueError: for such a member.
    """
    marked = [each for each in members_of(chain(env)[-1]) if is_native(each)]
    if marked:
        raise ValueError(
            f"env: expected members of a batch that leave resets to it, received {type(marked[0]).__name__} with the "
            f"mark {MARK!r}, which would be reset twice. Remedy: give the env itself, or switch its auto-reset off."
        )


class NativeResets:
    """Stands between the innermost env and its transforms, and returns the resets that have already happened.

    With :attr:`methods` in place of the env's own, a step keeps the observation that the env has returned for the next
    root, and the masked reset that follows returns it. Transforms thus see a step and a reset as above any other env,
    while the env itself is only stepped.

    Args:
        base: the innermost env.

    Attributes:
        methods: ``_step`` and ``_reset``, by name.
    """

    def __init__(self, base: EnvBase) -> None:
        self._base = base
        self._step_below: Callable[..., TensorDictBase] = inner_step_of(base)
        self._fresh: dict[Any, Tensor] = {}
        self.methods = {"_step": self._step, "_reset": self._reset}

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following = self._step_below(tensordict)
        complete_done(self._base, following)
        # an env that knows its final observations overrides this method, and keeps them under "next"
        stepped = tensordict.empty().set("next", following)
        self._fresh = hide_observations_of_ends(self._base, stepped)
        return stepped.get("next")

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        root = self._base.full_done_spec.zero()
        for key, value in self._fresh.items():
            root.set(key, value)
        return root
