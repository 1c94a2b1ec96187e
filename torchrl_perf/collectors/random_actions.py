"""Random actions without a host read: the draws of ``EnvBase.rand_action``, which reads bounds on the host."""

from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    BoundedContinuous,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)
from torchrl.data.tensor_specs import BoxList, StackedComposite
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import ActionMask

from torchrl_perf.collectors.native_autoreset import transforms_of

__all__ = ["RandomActions", "draw"]


class RandomActions:
    """Policy that acts at random, uniformly over the action spec, as ``EnvBase.rand_action`` does.

    With the same seed both draw the same numbers, see ``draw``. If an env overrides ``rand_action``, that is called.

    Args:
        env: the env to act in. Its action spec is read at each call, so that new masks take effect.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        # a mask above the env has its actions in the spec, which TorchRL does not pass on to a method of the env
        masked = any(isinstance(each, ActionMask) for each in transforms_of(env))
        self._own = _has_own_rand_action(env) and not masked

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write the action keys of the env into ``td``, of the shape, dtype and device that their specs have."""
        if self._own:
            return self._env.rand_action(td)
        td.update(draw(self._env.full_action_spec))
        return td


def _has_own_rand_action(env: EnvBase) -> bool:
    while isinstance(env, TransformedEnv) and type(env).rand_action is TransformedEnv.rand_action:
        env = env.base_env
    return type(env).rand_action is not EnvBase.rand_action


def draw(spec: TensorSpec) -> Any:
    """A uniform sample from a spec, drawn on its device without a host read.

    Args:
        spec: any spec. Masks restrict categories and one-hot actions; a row that allows none gets the first one.

    Returns:
        Tensor or TensorDict as ``spec.rand()`` returns it; with the same seed also the same numbers, except for
        ``MultiCategorical``. Kinds of specs that are unknown here draw with their own ``rand``.
    """
    if isinstance(spec, StackedComposite):
        return LazyStackedTensorDict.maybe_dense_stack(
            [draw(cast("TensorSpec", s)) for s in spec.unbind(spec.stack_dim)], spec.stack_dim
        )
    if isinstance(spec, Composite) and spec.data_cls in (None, TensorDict):
        entries = {key: draw(item) for key, item in spec.items() if item is not None}
        return TensorDict(entries, batch_size=spec.shape, device=spec.device)
    by_type = _DRAWS.get(type(spec))
    return spec.rand() if by_type is None else by_type(spec)


def _bounded(spec: Any) -> Tensor:
    if spec.dtype not in (torch.float32, torch.float64, torch.float16):
        return spec.rand()  # reads nothing on the host
    low, high = spec.space.low, spec.space.high
    unit = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device).uniform_()
    return (unit * (high - low) + low).clamp(low, high)


def _categorical(spec: Any) -> Tensor:
    return spec.rand() if spec.mask is None else _allowed(spec.mask).to(spec.dtype)


def _multi_categorical(spec: Any) -> Tensor:
    """One draw for each column, where TorchRL makes one for each number."""
    choices = [_numbers(box) for box in spec.space]
    if any(len(numbers) > 1 for numbers in choices):
        return spec.rand()  # the rows differ in their number of choices
    sizes = [n for numbers in choices for n in numbers]
    if spec.mask is None:
        columns = [torch.randint(n, spec.shape[:-1], device=spec.device) for n in sizes]
    else:
        columns = [_allowed(part) for part in spec.mask.split(sizes, -1)]
    return torch.stack(columns, -1).to(spec.dtype)


def _numbers(box: Any) -> set[int]:
    """The numbers of choices of a column, one where all rows have the same."""
    return {n for row in box for n in _numbers(row)} if isinstance(box, BoxList) else {box.n}


def _one_hot(spec: Any) -> Tensor:
    n = spec.space.n
    index = torch.randint(n, spec.shape[:-1], device=spec.device) if spec.mask is None else _allowed(spec.mask)
    return _hot(index, n).to(spec.dtype)


def _multi_one_hot(spec: Any) -> Tensor:
    sizes = [box.n for box in spec.space]
    if spec.mask is None:
        shape = (*spec.shape[:-1], 1)
        indices = [torch.randint(n, shape, device=spec.device).squeeze(-1) for n in sizes]
    else:
        indices = [_allowed(part) for part in spec.mask.split(sizes, -1)]
    return torch.cat([_hot(index, n) for index, n in zip(indices, sizes, strict=True)], -1).to(spec.dtype)


def _hot(index: Tensor, n: int) -> Tensor:
    """One-hot as bool ``[..., n]``; ``torch.nn.functional.one_hot`` checks its range on the host."""
    return index.unsqueeze(-1) == torch.arange(n, device=index.device)


def _allowed(mask: Tensor) -> Tensor:
    """An index, uniform over those that a mask ``[..., n]`` allows, as int64 ``[...]``.

    The smallest of independent exponential times is equally likely to be any; ``torch.multinomial`` does the same,
    after a check of its weights on the host.
    """
    weights = mask.float()
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


_DRAWS = cast(
    "dict[type, Callable[[Any], Tensor]]",
    {
        Bounded: _bounded,
        BoundedContinuous: _bounded,
        Categorical: _categorical,
        Binary: _categorical,
        MultiCategorical: _multi_categorical,
        OneHot: _one_hot,
        MultiOneHot: _multi_one_hot,
    },
)
