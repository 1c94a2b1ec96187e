"""One step of an environment with its resets, in four forms.

Each takes ``(env, td, store)``, steps, hands the stepped TensorDict to ``store`` **before** anything is reset, since an
env may return its own buffers and overwrite them at a reset, and returns the root TensorDict of the next step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Compose, EnvBase, TransformedEnv

from torchrl_perf.collectors.env_state import chain
from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.modules.policy_state import PolicyState
from torchrl_perf.runtime.draws import Draw
from torchrl_perf.runtime.upstream.envs import inner_reset

Store = Callable[[TensorDictBase], None]
Step = Callable[[EnvBase, TensorDictBase, Store], TensorDictBase]


def autoreset_step(env: EnvBase, td: TensorDictBase, store: Store) -> TensorDictBase:
    """An env that :func:`resets_inside_step`."""
    stepped, root = env.step_and_maybe_reset(td)
    store(stepped)
    return root


def stateful_step(
    base: EnvBase, initial: dict[str, float], env: EnvBase, td: TensorDictBase, store: Store
) -> TensorDictBase:
    """An env that only carries the state of a policy above ``base``: what its transforms do, as a part of that step.

    Args:
        base: env that :func:`resets_inside_step`.
        initial: the number that fills an entry at a reset.
        env: with the transforms.
        td: a root on which the policy, or a random one, has acted.
        store: takes the stepped TensorDict.
    """
    written, acted = td.get("next", None), TensorDict({}, td.batch_size, device=td.device)
    for key, value in td.items():
        if key != "next":  # preset, it would send the env's step the long way
            acted.set(key, value)
    stepped, root = base.step_and_maybe_reset(acted)
    following, done = stepped.get("next"), stepped.get(("next", "done"))
    for key, value in () if written is None else written.items(True, True):
        following.set(key, value)
    for key, number in initial.items():
        state = following.get(key, None)
        if state is None:  # a random action
            state = torch.full_like(td.get(key), number)
            following.set(key, state)
        mask = done.reshape(base.batch_size + (1,) * (state.ndim - base.batch_dims))
        root.set(key, torch.where(mask, number, state))
    store(stepped)
    return root


def unreset_step(env: EnvBase, td: TensorDictBase, store: Store) -> TensorDictBase:
    """The first half of TorchRL's own step, which works for every env; call ``env.maybe_reset`` on the result.

    The second half asks the host whether any row is done, and so stays outside a compiled function.
    """
    stepped = env.step(td)
    store(stepped)
    return env.step_mdp(stepped)


def masked_step(env: EnvBase, td: TensorDictBase, store: Store) -> TensorDictBase:
    """:func:`unreset_step` and :func:`masked_reset`: no host read, static shapes."""
    return masked_reset(env, unreset_step(env, td, store))


def masked_reset(env: EnvBase, root: TensorDictBase) -> TensorDictBase:
    """Reset of the rows that are done in ``root``, merged by ``torch.where``; the counterpart of ``env.maybe_reset``.

    The reset is called whether or not a row is done, with the mask under ``"_reset"``, so it has to be a function
    of tensors that leaves the other rows' state alone, as TorchRL asks of partial resets. Transforms see the reset as
    they do in ``env.reset``.
    """
    done = root.get("done").clone()
    fresh = inner_reset(env, root.empty().set("_reset", done))
    for key in root.keys(True, True):
        old = root.get(key)
        if key in env.done_keys:
            root.set(key, torch.zeros_like(old))  # a root state is never done: the row has been reset
            continue
        value = fresh.get(key, None)
        if value is not None:
            mask = done.reshape(env.batch_size + (1,) * (old.ndim - env.batch_dims))
            root.set(key, torch.where(mask, value, old))
    return root


def resets_inside_step(env: EnvBase) -> bool:
    """Whether ``env``, such as a :class:`DeviceEnv` without transforms, resets inside its step without a host wait.

    Such an env has a true attribute ``resets_inside_step``, and returns nothing by reference.
    """
    # the env's own attribute: TransformedEnv and SerialEnv also return those of the envs below, whose step is another
    return vars(env).get("resets_inside_step", getattr(type(env), "resets_inside_step", False))


def inside_step(env: EnvBase) -> Step | None:
    """The step of an env that :func:`resets_inside_step`, or carries a policy's state above one; None of another."""
    if resets_inside_step(env):
        return autoreset_step
    if not isinstance(env, TransformedEnv):
        return None
    base, parts = env.base_env, list(env.transform) if isinstance(env.transform, Compose) else [env.transform]
    own_step = not resets_inside_step(base) or getattr(base, "has_own_step", False)
    if own_step or not parts or any(type(part) is not PolicyState for part in parts):
        return None
    initial = {key: number for part in parts for key, number in cast("PolicyState", part).initial.items()}
    return partial(stateful_step, base, initial)


def in_graphs(env: EnvBase) -> bool:
    """Whether the steps of ``env`` may be a part of a CUDA graph: not of one whose attribute ``in_graphs`` is False."""
    return bool(vars(env).get("in_graphs", True))


def is_tensor_env(env: EnvBase) -> bool:
    """Whether ``env``, or the one below its transforms, keeps its state in tensors that a masked reset honours."""
    base = chain(env)[-1]
    return resets_inside_step(base) or isinstance(base, AutoResetEnv)


def draws_of(env: EnvBase) -> Sequence[Draw]:
    """Random numbers that a step of ``env`` takes through :mod:`torchrl_perf.runtime.draws`; none of most envs."""
    return getattr(env, "step_draws", ())
