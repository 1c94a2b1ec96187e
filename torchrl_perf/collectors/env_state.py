"""State of an environment through its transforms: saved, and compared around a reset."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import ObservationNorm

from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.runtime.upstream.envs import inner_reset


def chain(env: EnvBase) -> list[EnvBase]:
    """``env``, and the envs below its transforms, outermost first."""
    envs = [env]
    while isinstance(envs[-1], TransformedEnv):
        envs.append(envs[-1].base_env)
    return envs


def device_of(env: EnvBase) -> torch.device:
    """Where the tensors of an env are: its device, or, where it says None, that of its done flags."""
    return env.device if env.device is not None else next(iter(env.full_done_spec.zero().values(True, True))).device


def env_state_dict(env: EnvBase) -> list[dict[str, Any]]:
    """The ``state_dict`` of each env of the chain, copied: a ``TransformedEnv`` by itself saves only its transforms."""
    return [_copied(each.state_dict()) for each in chain(env)]


def load_env_state_dict(env: EnvBase, state: list[dict[str, Any]]) -> None:
    """Restores :func:`env_state_dict`."""
    for each, saved in zip(chain(env), state, strict=True):
        each.load_state_dict(saved)


def keeps_state(env: EnvBase) -> bool:
    """Whether the ``state_dict`` of ``env`` holds what episodes go on from; a class may say ``resumes = False``."""
    return bool(getattr(type(chain(env)[-1]), "resumes", True))


def honours_reset_mask(env: EnvBase) -> bool:
    """Whether ``env._reset`` with an empty mask leaves the env's tensors and numbers alone; they are restored after it.

    TorchRL requires this of every env, but an env that ends all its episodes together works without it.
    """
    base = chain(env)[-1]
    before = _own_state(base)
    mask = torch.zeros(*env.batch_size, 1, dtype=torch.bool, device=device_of(env))
    inner_reset(env, env.fake_tensordict().empty().set("_reset", mask))
    after = _own_state(base)
    same = before.keys() == after.keys() and all(_equal(before[name], after[name]) for name in before)
    if not same:
        for name, value in before.items():
            _restore(base, name, value)
    return same


def mark_rows(env: EnvBase, tensordict: TensorDictBase, index: Any) -> None:
    """Set the reset masks of ``tensordict``: True at ``index`` of the batch dims, False elsewhere."""
    for reset_key, done_keys in zip(env.reset_keys, env.done_keys_groups, strict=True):
        mask = torch.zeros_like(tensordict.get(done_keys[0]))
        mask[index] = True
        tensordict.set(reset_key, mask)


def fused_parts(env: EnvBase, fuse: Callable[..., Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """``tensor_parts`` of the innermost env through ``fuse``, by name; none where it is no :class:`AutoResetEnv`."""
    base = chain(env)[-1]
    return {name: fuse(getattr(base, name)) for name in base.tensor_parts} if isinstance(base, AutoResetEnv) else {}


class ConstantFlags:
    """Lets the ``ObservationNorm`` transforms of an env run without a host read.

    TorchRL keeps their choice of formula, ``standard_normal``, in a tensor and reads it at each call. Inside the
    context that is a Python bool, which a compiler and a CUDA graph take for a constant; outside it the buffer is back.
    """

    def __init__(self, env: EnvBase) -> None:
        outer = [each for each in chain(env) if isinstance(each, TransformedEnv)]
        norms = [module for each in outer for module in each.transform.modules() if isinstance(module, ObservationNorm)]
        self._flags = [(norm, bool(norm.standard_normal)) for norm in norms]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context; not reentrant."""
        buffers = [norm.standard_normal for norm, _ in self._flags]
        for norm, flag in self._flags:
            del norm.standard_normal
            norm.standard_normal = flag
        try:
            yield
        finally:
            for (norm, _), buffer in zip(self._flags, buffers, strict=True):
                del norm.standard_normal
                norm.register_buffer("standard_normal", buffer)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _own_state(env: EnvBase) -> dict[str, Any]:
    """Tensors and numbers that are attributes or buffers of the env, as copies."""
    own = {**vars(env), **dict(env.named_buffers(recurse=False))}
    state = {name: value for name, value in own.items() if isinstance(value, Tensor | int | float)}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) != isinstance(other, Tensor):
        return False
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def _restore(env: EnvBase, name: str, value: Any) -> None:
    current = getattr(env, name, None)
    if isinstance(value, Tensor) and isinstance(current, Tensor) and current.shape == value.shape:
        current.copy_(value)
    else:
        setattr(env, name, value)
