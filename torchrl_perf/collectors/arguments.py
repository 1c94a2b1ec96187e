"""What the arguments of TorchRL's ``Collector`` stand for here: env, policy, devices, and those that are refused."""

import copy
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import CudaGraphModule, TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.transforms import StepCounter
from torchrl.envs.utils import RandomPolicy
from torchrl.modules.tensordict_module.exploration import set_exploration_modules_spec_from_env

from torchrl_perf.collectors.delivery import under_next
from torchrl_perf.collectors.stepping import inside_step
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.runtime.upstream.policies import with_transforms_of

Device = torch.device | str | int | None
Policy = Callable[[TensorDictBase], TensorDictBase]


class Refusal(NamedTuple):
    """Why an argument of TorchRL's collector has no meaning here.

    Attributes:
        accepted: values that change nothing, and are therefore accepted.
        reason: why any other is refused.
        remedy: what to do instead.
    """

    accepted: tuple[Any, ...]
    reason: str
    remedy: str


_WORKERS = "one process steps all envs as one batch, so there are no workers"
REFUSED = {
    "backend": Refusal((None, "direct"), _WORKERS, "more envs in the batch, or torchrl.collectors.Collector"),
    "backend_options": Refusal((None, {}), _WORKERS, "leave it out, or torchrl.collectors.Collector"),
    "num_collectors": Refusal((None,), _WORKERS, "num_envs of the env, or torchrl.collectors.Collector"),
    "sync": Refusal((None,), _WORKERS, "leave it out: each batch is complete when it is yielded"),
    "worker_idx": Refusal((None,), _WORKERS, "leave it out"),
    "weight_sync_schemes": Refusal((None,), _WORKERS, "update_policy_weights_(weights), or share the policy"),
    "weight_recv_schemes": Refusal((None,), _WORKERS, "update_policy_weights_(weights), or share the policy"),
    "interruptor": Refusal(
        (None,),
        "a batch is one loop of fixed length, one CUDA graph under mode 'graph', which nothing stops in the middle",
        "a smaller frames_per_batch, or torchrl.collectors.Collector",
    ),
    "reset_when_done": Refusal((True,), "TorchRL has deprecated False and refuses it too", "leave it out"),
    "traj_pool": Refusal((None,), "numbers of episodes are counted on the device", "leave it out"),
}
"""Arguments of TorchRL's ``Collector``, by name, that are accepted only at values that change nothing."""


def refuse(given: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of the :data:`REFUSED` arguments with a value that would change something."""
    for name, value in given.items():
        accepted, reason, remedy = REFUSED[name]
        if not any(value is each or (type(value) is type(each) and value == each) for each in accepted):
            raise ValueError(
                f"{name}: expected {' or '.join(map(repr, accepted))}, received {value!r}: {reason}. Remedy: {remedy}."
            )


def takes_draws(env: EnvBase, compile_policy: Any, cudagraph_policy: Any) -> bool:
    """Whether the steps of ``env`` can be supplied with numbers that were drawn ahead.

    Raises:
        ValueError: for a policy that is compiled or captured by itself, since it would keep the numbers of one step.
    """
    given = {"compile_policy": compile_policy, "cudagraph_policy": cudagraph_policy}
    if alone := [name for name, value in given.items() if value]:
        raise ValueError(
            f"draw_ahead: expected a policy that runs with its env, received {alone[0]}={given[alone[0]]!r}. Remedy: "
            "draw_ahead=False, or mode='compile' or 'graph'."
        )
    return inside_step(env) is not None and not getattr(env, "has_own_step", False)


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a name that the collector does not have, with the nearest that it has."""
    names = [name for name in known if name not in ("self", "unknown")]
    for name in unknown:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"{nearest[0]} (the nearest name)" if nearest else f"one of {sorted(names)}"
        raise TypeError(f"DeviceCollector: expected arguments that it has, received {name!r}. Remedy: {hint}.")


# -- env -----------------------------------------------------------------------------------------------------


def make_env(create_env_fn: Any, env: Any, kwargs: Mapping[str, Any] | None) -> EnvBase:
    """The env of the arguments ``create_env_fn`` (or its second name ``env``) and ``create_env_kwargs``.

    Args:
        create_env_fn: an env, a function or ``EnvCreator`` that makes one, or a sequence of these: several become one
            ``SerialEnv`` whose first dim counts them.
        env: the same, under its other name.
        kwargs: passed to each function; for an env that exists, only a batched env of TorchRL takes them.

    Raises:
        TypeError: if neither or both of the names are given, or the object does not make an env.
        ValueError: for an empty sequence, or for ``kwargs`` that no function accepts.
    """
    if (create_env_fn is None) == (env is None):
        both = "both" if env is not None else "neither"
        raise TypeError(f"expected create_env_fn or env, received {both}. Remedy: give the env once, in first place.")
    source = env if create_env_fn is None else create_env_fn
    kwargs = dict(kwargs or {})
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        if not source:
            raise ValueError("create_env_fn: expected at least one env, received an empty sequence. Remedy: add one.")
        if len(source) > 1:
            return SerialEnv(len(source), [lambda each=each: _one_env(each, kwargs) for each in source])
        source = source[0]
    return _one_env(source, kwargs)


def _one_env(source: Any, kwargs: dict[str, Any]) -> EnvBase:
    if isinstance(source, EnvBase):
        if kwargs and not isinstance(source, BatchedEnvBase):
            raise ValueError(
                f"create_env_kwargs: expected a function that takes {sorted(kwargs)}, received an env that is made "
                f"already, {type(source).__name__}. Remedy: its class in place of it."
            )
        if kwargs:
            source.update_kwargs(kwargs)
        return source
    if not callable(source):
        raise TypeError(
            f"create_env_fn: expected an env, a function that makes one, or a list of these, received "
            f"{type(source).__name__}. Remedy: CartPole(num_envs), or lambda: CartPole(num_envs)."
        )
    made = source(**kwargs)
    if not isinstance(made, EnvBase):
        raise TypeError(
            f"create_env_fn: expected it to make a TorchRL env, received {type(made).__name__}. Remedy: return an "
            "EnvBase; GymEnv and its kin wrap other libraries' envs."
        )
    return made


def limited(env: EnvBase, max_frames_per_traj: int | None) -> EnvBase:
    """``env`` under a ``StepCounter`` that truncates after so many steps; unchanged for None, 0 and below."""
    if max_frames_per_traj is None or max_frames_per_traj <= 0:
        return env
    keys = [key if isinstance(key, tuple) else (key,) for key in env.output_spec.keys(True, True)]
    if any("step_count" in key for key in keys):
        raise ValueError(
            "max_frames_per_traj: expected an env without a 'step_count' entry, received one whose StepCounter may "
            "have a limit of its own. Remedy: max_frames_per_traj=None and StepCounter(max_steps=…), or remove it."
        )
    return TransformedEnv(env, StepCounter(max_steps=int(max_frames_per_traj)))


def versioned(env: EnvBase, version: Any) -> tuple[EnvBase, Any]:
    """``env`` under TorchRL's ``PolicyVersion``, and that transform; ``env`` and None if versions are not tracked.

    Args:
        env: of the collector.
        version: a bool, or the transform.
    """
    if not version:
        return env, None
    if isinstance(env, BatchedEnvBase):
        raise ValueError(
            f"track_policy_version: expected an env that takes a transform, received {type(env).__name__}. "
            "Remedy: TransformedEnv(env, PolicyVersion()), and track_policy_version=False."
        )
    from torchrl.envs.llm.transforms.policy_version import PolicyVersion

    tracker = version if isinstance(version, PolicyVersion) else PolicyVersion()
    return env.append_transform(tracker), tracker


def observations_under_next(env: EnvBase) -> list[Any]:
    """Keys of what ``compact_obs`` leaves out: observations and states under "next"."""
    state = env.full_state_spec
    keys = [*env.full_observation_spec.keys(True, True), *(() if state is None else state.keys(True, True))]
    return [under_next(key) for key in keys]


def with_policy_state(env: EnvBase, policy: Any, register: bool | None) -> EnvBase:
    """``env`` with the transforms that carry a recurrent policy's state, where ``auto_register_policy_transforms``."""
    if not register:
        return env  # a state that the env lacks is refused as a missing in_key
    return with_transforms_of(env, policy)


# -- devices -------------------------------------------------------------------------------------------------


class Devices(NamedTuple):
    """The device of each part; None leaves a part on the device where it is."""

    env: torch.device | None
    policy: torch.device | None
    storing: torch.device | None


def resolve_devices(device: Device, env_device: Device, policy_device: Device, storing_device: Device) -> Devices:
    """TorchRL's rule: ``device`` stands for each of the three that is not given."""
    given = (env_device, policy_device, storing_device)
    return Devices(*(ordinal(device if each is None else each) for each in given))


def ordinal(device: Device) -> torch.device | None:
    """The device with its index, so that ``"cuda"`` and ``"cuda:0"`` are equal."""
    if device is None:
        return None
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a torch device, received {device!r}. Remedy: 'cpu' or 'cuda'.") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that is there, received {resolved} without CUDA. Remedy: 'cpu'.")
    return torch.device("cuda", torch.cuda.current_device()) if resolved == torch.device("cuda") else resolved


# -- policy --------------------------------------------------------------------------------------------------


def make_policy(policy: Any, policy_factory: Callable[[], Any] | None, env: EnvBase, trust: bool | None) -> Any:
    """The policy of the arguments ``policy``, ``policy_factory`` and ``trust_policy``; None stays None.

    A module or function of plain tensors, whose parameters are named as observations are, is wrapped as TorchRL wraps
    it. Exploration modules without a spec get the env's.

    Raises:
        TypeError: for a policy and a factory, or a module that cannot be wrapped.
    """
    if policy is not None and policy_factory is not None:
        raise TypeError("expected policy or policy_factory, received both. Remedy: leave one out.")
    policy = policy_factory() if policy_factory is not None else policy
    if isinstance(policy, RandomPolicy):
        policy.set_action_spec_from_env(env)
    if isinstance(policy, nn.Module):
        set_exploration_modules_spec_from_env(policy, env)
    return policy if policy is None or trust or _acts_on_tensordicts(policy) else _wrapped(policy, env)


def _acts_on_tensordicts(policy: Any) -> bool:
    """TorchRL's rule: a TensorDict module, or one argument that is called or declared a TensorDict."""
    if isinstance(policy, TensorDictModuleBase | RandomPolicy | CudaGraphModule) or hasattr(policy, "in_keys"):
        return True
    names = _parameters(policy)
    if len(names) != 1:
        return False
    name, annotation = next(iter(names.items()))
    declared = isinstance(annotation, type) and is_tensor_collection(annotation)
    return name in ("tensordict", "td") or declared or "TensorDict" in str(annotation)


def _parameters(policy: Any) -> dict[str, Any]:
    """Names of what has to be passed to a policy, with their annotations."""
    taken = inspect.signature(getattr(policy, "forward", policy)).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = (each for each in taken if each.default is inspect.Parameter.empty and each.kind not in kinds)
    return {each.name: each.annotation for each in needed}


def _wrapped(policy: Any, env: EnvBase) -> Any:
    """A module or function of tensors as a TensorDict module; its outputs are the actions, then output1, …."""
    names = list(_parameters(policy))
    observations = env.fake_tensordict().exclude("next")
    unknown = [name for name in names if name not in observations.keys()]
    if unknown and not isinstance(policy, nn.Module):
        return policy  # its argument is named like no observation: assume that it acts on TensorDicts
    if unknown or not names:
        raise TypeError(
            f"policy: expected a TensorDict module, or a forward whose arguments are named as observations are, among "
            f"{sorted(map(str, observations.keys()))}, received {type(policy).__name__} with {names}. Remedy: "
            "TensorDictModule(policy, in_keys=[…], out_keys=[…]), or trust_policy=True where it takes a TensorDict."
        )
    with torch.no_grad(), seeded(None):
        outputs = policy(**{name: observations.get(name) for name in names})
    more = len(outputs) - len(env.action_keys) if isinstance(outputs, tuple) else 0
    out_keys = [*env.action_keys, *(f"output{i + 1}" for i in range(more))]
    return TensorDictModule(policy, in_keys=names, out_keys=out_keys)


def placed(policy: Any, device: torch.device | None) -> Any:
    """``policy`` itself if it is on ``device``, else a copy there, as in TorchRL; the original is left alone."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if all(tensor.device == device for tensor in tensors):
        return policy
    return copy.deepcopy(policy).to(device)


class CastPolicy(nn.Module):
    """A policy on another device than the env: moves what it reads there, and what it writes back.

    Args:
        policy: on ``policy_device``.
        policy_device: where it acts.
        env_device: where its input comes from.
    """

    def __init__(self, policy: Policy, policy_device: torch.device, env_device: torch.device) -> None:
        super().__init__()
        self.policy = policy
        self.policy_device, self.env_device = policy_device, env_device
        for name in ("in_keys", "out_keys"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on ``tensordict``, in place; only what the policy wrote anew is moved back."""
        moved = tensordict.to(self.policy_device)
        before = {key: moved.get(key) for key in moved.keys(True, True)}
        acted = self.policy(moved)
        for key, value in acted.items(True, True):
            if value is not before.get(key):
                tensordict.set(key, value.to(self.env_device))
        return tensordict


COMPILE_OPTIONS = ("backend", "dynamic", "fullgraph", "mode", "options")


def accelerated(policy: Any, compile_policy: Any, cudagraph_policy: Any, mode: str, device: torch.device) -> Any:
    """The policy under the arguments ``compile_policy`` and ``cudagraph_policy``, each a bool or a dict of options.

    In the modes ``"compile"`` and ``"graph"`` the policy is compiled or captured with the env anyway, so it is
    returned unchanged.

    Raises:
        ValueError: for options that do not apply, or a CUDA graph without CUDA.
    """
    options = dict(compile_policy) if isinstance(compile_policy, Mapping) else {}
    options.pop("warmup", None)  # what is compiled here has the same layout from its first call on
    unknown = sorted(options.keys() - set(COMPILE_OPTIONS))
    if unknown:
        raise ValueError(
            f"compile_policy: expected options among {COMPILE_OPTIONS}, received {unknown}. Remedy: leave them out."
        )
    if cudagraph_policy and (device.type != "cuda" or mode == "compile"):
        raise ValueError(
            f"cudagraph_policy: expected an env on CUDA and another mode than 'compile', received one on {device} and "
            f"mode={mode!r}. Remedy: mode='graph' captures the policy with the env; compile_policy=True on a CPU."
        )
    if mode in ("compile", "graph"):
        if options:
            raise ValueError(
                f"compile_policy: expected True or False under mode {mode!r}, which compiles the policy with the env, "
                f"received {options}. Remedy: compile_mode=…, or mode='eager'."
            )
        return policy
    if compile_policy not in (None, False):
        policy = _Compiled(policy, options)
    if cudagraph_policy and mode == "eager":
        more = dict(cudagraph_policy) if isinstance(cudagraph_policy, Mapping) else {}
        policy = CudaGraphModule(policy, in_keys=[], out_keys=[], device=device, **more)
    return policy


class _Compiled(nn.Module):
    """A policy whose call is compiled; its keys and parameters are the policy's own."""

    def __init__(self, policy: Policy, options: dict[str, Any]) -> None:
        super().__init__()
        self.policy = policy
        for name in ("in_keys", "out_keys"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))
        self._call = compiled(_caller(policy), **{"fullgraph": False, **options})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict)


def _caller(policy: Policy) -> Policy:
    def call(tensordict: TensorDictBase) -> TensorDictBase:
        return policy(tensordict)

    return call


def weights_of(policy: Any) -> TensorDictBase:
    """Parameters and buffers of a module, or weights given as TensorDict or ``state_dict``, as a nested TensorDict."""
    if isinstance(policy, nn.Module):
        return TensorDict.from_module(policy).data
    weights = TensorDict(policy).unflatten_keys(".") if isinstance(policy, dict) else policy
    return weights.data
