"""What a collector checks before the first frame."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.collectors.env_state import honours_reset_mask
from torchrl_perf.runtime import HostSyncError, HostSyncReport, no_host_sync

Policy = Callable[[TensorDictBase], TensorDictBase]
MODES = ("auto", "eager", "compile", "graph")


def check_env(env: EnvBase) -> None:
    """One batch dim, and one done signal for each env."""
    if len(env.batch_size) != 1:
        raise ValueError(
            f"env: expected batch_size [N], received {list(env.batch_size)}. Remedy: batch the env (a DeviceEnv, "
            "ParallelEnv or a vector env), or use torchrl.collectors.Collector."
        )
    if "done" not in env.done_keys:
        raise ValueError(
            f"env: expected a 'done' entry at the root of its done_spec, received done keys {env.done_keys}."
        )


def steps_per_batch(frames_per_batch: int, num_envs: int) -> int:
    """T, for a frame count that N divides."""
    steps, rest = divmod(frames_per_batch, num_envs)
    if rest or steps < 1:
        raise ValueError(
            f"frames_per_batch: expected a positive multiple of the number of envs ({num_envs}), received "
            f"{frames_per_batch}. Remedy: {max(steps, 1) * num_envs} or {(steps + 1) * num_envs}."
        )
    return steps


def fastest_mode(device: torch.device) -> str:
    """``"graph"`` on CUDA, where it pays; ``"eager"`` elsewhere, where compiling costs more than it gives at once."""
    return "graph" if device.type == "cuda" else "eager"


def resolve_mode(mode: str, device: torch.device | None) -> str:
    """Checks the mode against the device."""
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, received {mode!r}.")
    if device is None:
        raise ValueError(
            "env: expected a device, received an env whose device is None. Remedy: env.to('cpu') or env.to('cuda')."
        )
    if mode == "graph" and device.type != "cuda":
        raise ValueError(
            f"mode='graph': expected an env on CUDA, received one on {device}. Remedy: mode='compile' or 'eager'."
        )
    return mode


def probe_keys(policy: Policy, env: EnvBase) -> tuple[TensorDictBase, TensorDictBase]:
    """(root entries, entries written in a step), as fake values, from the specs and one policy call on zeros."""
    fake = env.fake_tensordict()
    actions = set(env.action_keys)
    root = fake.exclude("next", *actions)
    with _spared_generators(env), torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        try:
            acted = policy(root.copy())
        except HostSyncError:
            raise
        except (RuntimeError, TypeError, KeyError) as error:
            raise ValueError(
                f"policy: expected it to act on {_described(root)}, received {type(error).__name__}: {error}. Remedy: "
                "fit its in_keys, input size, dtype and device to the env's specs."
            ) from error
    missing = [key for key in actions if acted.get(key, None) is None]
    if missing:
        raise ValueError(
            f"policy: expected it to write {_names(actions)}, received {_names(acted.keys(True, True))}. Remedy: "
            "set its out_keys (or the action key of its ProbabilisticActor)."
        )
    out = acted.exclude(*root.keys(True, True))
    out.set("next", fake.get("next").update(out.get("next")) if "next" in out.keys() else fake.get("next"))
    return root, out


def check_policy(policy: Policy, env: EnvBase, *, sync_free: bool) -> None:
    """Device, keys and action shape of the policy; with ``sync_free`` also that it does not wait for the host."""
    if isinstance(policy, torch.nn.Module):
        devices = {p.device for p in policy.parameters()}
        if any(device.type != env.device.type for device in devices):
            raise ValueError(
                f"policy: expected parameters on {env.device}, where the env is, received {_names(devices)}. Remedy: "
                f"policy.to('{env.device}')."
            )
    needed = getattr(policy, "in_keys", [])
    root = env.fake_tensordict().exclude("next")
    absent = [key for key in needed if key not in root.keys(True)]
    if absent:
        raise ValueError(
            f"policy: expected in_keys among {_names(root.keys(True, True))}, which the env gives, received {absent}. "
            "Remedy: set its in_keys, or the env's transforms."
        )
    try:
        with no_host_sync(env.device) if sync_free else _spared_generators(env):
            _, out = probe_keys(policy, env)
    except HostSyncError as error:
        raise ValueError(
            f"policy: expected no host wait under mode 'graph' or 'compile', received one: {error}. Remedy: mend it, "
            "or mode='eager'."
        ) from error
    for key in env.action_keys:
        spec, action = env.full_action_spec[key], out.get(key)
        if action.shape != spec.shape or action.dtype != spec.dtype or action.device != spec.device:
            raise ValueError(
                f"policy: expected {key!r} of shape {list(spec.shape)} and dtype {spec.dtype} on {spec.device}, "
                f"received {list(action.shape)} and {action.dtype} on {action.device}. Remedy: fit the policy's output "
                "size or distribution to env.action_spec."
            )


def check_masked_reset(env: EnvBase, mode: str) -> bool:
    """Whether the env can reset by mask inside a compiled step; resets and steps it once, and refuses waits.

    Raises:
        ValueError: where step or reset wait for the host, or, under ``"graph"``, a reset disregards its mask.
    """
    with _spared_generators(env), torch.no_grad():
        td = env.rand_action(env.reset())  # TorchRL draws bounded actions with a host read
        try:
            with no_host_sync(env.device):
                stepped = env.step(td)
            honoured = honours_reset_mask(env)
            with no_host_sync(env.device):
                env._reset(stepped.empty().set("_reset", stepped.get("next").get("done").clone()))
        except HostSyncError as error:
            raise ValueError(
                f"env: expected a step and reset without host wait under mode {mode!r}, received one: {error}. Remedy: "
                "mend it, or mode='eager'."
            ) from error
    if mode == "graph" and not honoured:
        raise ValueError(
            f"env: expected {type(env).__name__}._reset to leave rows outside the mask '_reset' alone under mode "
            "'graph', received changes under an empty mask. Remedy: honour the mask by torch.where, or mode='compile' "
            "or 'eager'."
        )
    return honoured


def warn_not_captured(env: EnvBase, report: HostSyncReport) -> None:
    """Names what keeps an env, or the policy acting in it, from being captured."""
    if report.total:
        first = report.rows[0]
        reason = (
            f"a step waits for the host {report.total} times, first in {first.op} at "
            f"{first.library_file or first.file}:{first.library_line or first.line}"
        )
    else:
        reason = "its _reset changes rows outside the mask '_reset'"
    warnings.warn(
        f"{type(env).__name__} is collected in eager mode: {reason}. Remedy: a DeviceEnv, or masks and torch.where in "
        "place of reads.",
        stacklevel=4,
    )


def _spared_generators(env: EnvBase) -> AbstractContextManager[None]:
    """The default generators go on after the block as if it had drawn nothing."""
    return torch.random.fork_rng(devices=[env.device] if env.device.type == "cuda" else [])


def _described(td: TensorDictBase) -> str:
    entries = (f"{key!r} {list(value.shape)} {value.dtype}" for key, value in td.items(True, True))
    return f"{', '.join(entries)} on {td.device}"


def _names(keys: Iterable[object]) -> list[str]:
    return sorted(map(str, keys))
