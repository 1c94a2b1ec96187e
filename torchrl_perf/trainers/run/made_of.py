"""Description of a run's parts, as plain values: its env's class, specs and arguments, and its networks' classes.

A checkpoint holds it, so that it can only be loaded with the same parts.
"""

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_perf.modules.chains import class_name
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.run.saved_specs import plain_specs

__all__ = ["check_made_of", "describe", "describe_env", "describe_networks", "env_name", "same_specs"]

LEFT_OUT = {"self", "device", "seed", "num_envs", "batch_size", "args", "kwargs", "env", "envs", "create_env_fn"}
LARGEST_DIGEST = 2**24  # elements of a tensor that is compared by its content
MOST_NAMED = 4


def env_name(config: RunConfig, env: Any) -> str:
    """The name of an env that a trainer was given: of its task, or of its class.

    Args:
        config: its own name for the env wins where the env is the class of its tasks.
        env: a TorchRL env, whatever it is wrapped in, or a collector of Gymnasium envs; None is the config's.
    """
    name = _class_name(_innermost(env))
    return config.env if not name or name == (config.env_class or config.env) else name


def describe(env: Any, parts: Mapping[str, Any], *, own_env: bool) -> dict[str, Any]:
    """Env and networks of a trainer.

    Args:
        env: of the trainer, or a collector where there is none.
        parts: what a checkpoint holds; the modules among them are described.
        own_env: whether the env was given, and not made as the config says.
    """
    return {"env": describe_env(env, given=own_env), "networks": describe_networks(parts)}


def describe_env(env: Any, *, given: bool) -> dict[str, Any]:
    """Class, transforms, specs and arguments of an env; empty for None.

    The specs are there as text, which is compared, and as the plain values that networks can be made from. Arguments
    are those of the constructor that the env keeps under their names, with or without an underscore.

    Args:
        env: a TorchRL env or a collector.
        given: stored with it.
    """
    if env is None:
        return {}
    inner = _innermost(env)
    return {
        "given": given,
        "name": _class_name(inner),
        "module": type(inner).__module__,
        "transforms": [_transform(each) for each in _transforms(env)],
        "specs": _specs(env),
        "arguments": dict(sorted(_arguments(inner).items())),
        "plain_specs": plain_specs(env if isinstance(env, EnvBase) else getattr(env, "specs", None)),
    }


def describe_networks(parts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """For each module among ``parts``, the class of each module within it, by path."""
    return {
        name: {path: class_name(module) for path, module in part.named_modules()}
        for name, part in parts.items()
        if isinstance(part, nn.Module)
    }


def check_made_of(own: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Why a checkpoint cannot be loaded, or an empty text; entries unknown on either side are not compared.

    Args:
        own: :func:`describe` of the trainer that loads.
        saved: the same of the one that saved.
    """
    if own.get("env") and saved.get("env") and (found := _env_difference(own["env"], saved["env"])):
        return found
    ours, theirs = own.get("networks", {}), saved.get("networks", {})
    for name in sorted(set(ours) & set(theirs)):
        if differing := _differences(ours[name], theirs[name]):
            return (
                f"expected in {name} the network that the trainer has, {_listed(differing)}. Nothing was changed. "
                f"Remedy: the trainer with the {name} that the run was made with, passed from Python."
            )
    return ""


def same_specs(own: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether the envs of two descriptions have the same specs, as far as both are known."""
    mine, theirs = (side.get("env", {}).get("specs") for side in (own, saved))
    return mine == theirs or mine is None or theirs is None


def _env_difference(own: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    name, other = own["name"], saved["name"]
    remedy = "Nothing was changed. Remedy: the trainer with env= (or collector=) of the run, passed from Python."
    mine, theirs = own["module"], saved["module"]
    # a script's main module has another name than the same file imported
    if name != other or (mine != theirs and "__main__" not in (mine, theirs)):
        return f"expected one of the env {name} of {mine}, received one of {other} of {theirs}. {remedy}"
    groups = ["transforms", "specs"]
    # for envs that the config makes, the config's rules say which settings may change
    groups += ["arguments"] if own["given"] or saved["given"] else []
    for group in groups:
        mine, theirs = (_numbered(side[group]) for side in (own, saved))
        if differing := _differences(mine, theirs):
            return f"expected one of {name} with {group} {_listed(differing)}. {remedy}"
    return ""


def _numbered(values: Any) -> Mapping[str, Any]:
    return dict(enumerate(values)) if isinstance(values, list) else values


def _differences(own: Mapping[Any, Any], saved: Mapping[Any, Any]) -> list[str]:
    keys = [key for key in {**own, **saved} if own.get(key) != saved.get(key)]
    return [f"{key or 'the whole'}: {own.get(key)}, received {saved.get(key)}" for key in keys]


def _listed(differing: list[str]) -> str:
    return "; ".join(differing[:MOST_NAMED]) + ("; ..." if differing[MOST_NAMED:] else "")


# -- of an env --------------------------------------------------------------------------------------------------------


def _innermost(env: Any) -> Any:
    """The env below transforms and wrappers of TorchRL, or the Gymnasium envs of a collector."""
    while isinstance(inner := getattr(env, "base_env", None), EnvBase):
        env = inner
    if not isinstance(env, EnvBase) and (groups := getattr(env, "groups", None)):
        vector_env = getattr(groups[0], "envs", env)
        singles = getattr(vector_env, "envs", None)  # of one that steps them here
        has_name = getattr(vector_env, "spec", None) is not None or not singles
        return vector_env if has_name else singles[0].unwrapped
    return env


def _class_name(env: Any) -> str:
    """The id of a Gymnasium env, or the name of a class, without characters that do not fit into a folder's name."""
    if env is None:
        return ""
    spec = getattr(env, "spec", None)
    name = getattr(spec, "id", None) if not isinstance(spec, TensorSpec) else None
    name = name or getattr(env, "env_name", None)
    return re.sub(r"[^\w.+-]+", "-", name if isinstance(name, str) and name else type(env).__name__)


def _transforms(env: Any) -> Iterator[Any]:
    while isinstance(env, TransformedEnv):
        yield from getattr(env.transform, "transforms", [env.transform])
        env = env.base_env


def _transform(transform: Any) -> str:
    """Class and plain arguments of a transform."""
    options = ", ".join(f"{name}={value}" for name, value in sorted(_arguments(transform).items()))
    return f"{type(transform).__name__}({options})"


def _specs(env: Any) -> dict[str, str]:
    """Shape, dtype and range of each entry that a network reads or writes, without the batch."""
    source = env if isinstance(env, EnvBase) else getattr(env, "specs", None)
    if source is None:
        return {}
    found: dict[str, str] = {}
    for part in ("observation_spec", "full_action_spec", "full_reward_spec", "full_done_spec"):
        spec = getattr(source, part, None)
        if isinstance(spec, Composite):
            dims = len(spec.shape)
            for key, leaf in spec.items(True, True):
                found["/".join([key] if isinstance(key, str) else key)] = _spec(leaf, dims)
    return dict(sorted(found.items()))


def _spec(spec: TensorSpec, dims: int) -> str:
    space: Any = spec.space
    size = f" of {space.n}" if isinstance(getattr(space, "n", None), int) else ""
    bounds = ""
    if not size and hasattr(space, "low"):
        bounds = f" in {_plain(space.low.flatten(0, dims - 1)[0] if dims else space.low)}"
        bounds += f" to {_plain(space.high.flatten(0, dims - 1)[0] if dims else space.high)}"
    return f"{type(spec).__name__}{size} {list(spec.shape[dims:])} {spec.dtype}{bounds}"


def _arguments(owner: Any) -> dict[str, Any]:
    """Arguments of the constructor that an object keeps, as plain values."""
    found: dict[str, Any] = {}
    for name in _parameters(type(owner)):
        for attribute in (name, f"_{name}"):
            kept, value = _kept(owner, attribute)
            if kept:
                found[name] = _plain(value)
                break
    kwargs = getattr(getattr(owner, "spec", None), "kwargs", None)
    return found | {f"make({key})": _plain(value) for key, value in (kwargs or {}).items()}


def _parameters(kind: type) -> list[str]:
    """Names of the constructor's parameters, and of those of the bases that it passes others on to."""
    names: list[str] = []
    for base in kind.__mro__:
        if base in (EnvBase, nn.Module, object):
            break
        if "__init__" in vars(base):
            try:
                parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            except (TypeError, ValueError):
                break
            names += [each.name for each in parameters if each.name not in {*LEFT_OUT, *names}]
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return names


def _kept(owner: Any, attribute: str) -> tuple[bool, Any]:
    """Whether an object itself has an attribute, and its value; properties are not evaluated."""
    for place in (vars(owner), vars(owner).get("_buffers", {}), vars(owner).get("_parameters", {})):
        if attribute in place:
            return True, place[attribute]
    return False, None


def _plain(value: Any) -> Any:
    """A value as text, number, or list and dict of such."""
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, Tensor):
        return _digest(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Composite):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping | Composite):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [_plain(entry) for entry in value]
        return sorted(entries, key=str) if isinstance(value, set | frozenset) else entries
    if isinstance(value, torch.dtype | torch.Size):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def _digest(value: Tensor) -> Any:
    """The numbers of a small tensor, or shape and a digest of them."""
    value = value.detach()
    if value.numel() <= 8:
        return value.tolist()
    if value.numel() > LARGEST_DIGEST or value.is_meta:
        return f"{list(value.shape)} {value.dtype}"
    content = value.contiguous().to("cpu").view(torch.uint8).numpy().tobytes()
    return f"{list(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()[:12]}"
