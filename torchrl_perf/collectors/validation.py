"""What a collector checks before the first frame."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import MultiOneHot, OneHot, TensorSpec
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from torchrl_perf.collectors.arguments import CastPolicy
from torchrl_perf.collectors.env_state import chain, device_of, honours_reset_mask
from torchrl_perf.collectors.stepping import in_graphs
from torchrl_perf.runtime import CaptureError, HostSyncError, HostSyncReport, capture, host_syncs, no_host_sync
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.runtime.upstream.envs import has_dynamic_specs, inner_reset

Policy = Callable[[TensorDictBase], TensorDictBase]
MODES = ("auto", "eager", "compile", "graph")


def acting(kind: ExplorationType) -> ExitStack:
    """Contexts, entered, in which a policy acts on one step of each env, whatever is set around the collector.

    A recurrent policy would else take the envs for the steps of one sequence within ``set_recurrent_mode(True)``, and
    pass the state of each env on to the next.
    """
    contexts = ExitStack()
    for each in (torch.no_grad(), set_exploration_type(kind), set_recurrent_mode(False)):
        contexts.enter_context(each)
    return contexts


def check_env(env: EnvBase) -> None:
    """Static shapes, and one done signal for each env."""
    if has_dynamic_specs(env):
        raise ValueError(
            f"env: expected static shapes, received {type(env).__name__}, some of whose specs have dims of -1. Remedy: "
            "pad to a fixed size, or use torchrl.collectors.Collector(use_buffers=False)."
        )
    shapes = {key: list(spec.shape) for key, spec in env.full_done_spec.items(True, True)}
    if shapes.get("done") != [*env.batch_size, 1]:
        raise ValueError(
            f"env: expected an entry 'done' of shape {[*env.batch_size, 1]} at the root of its done_spec, received "
            f"{shapes}. Remedy: end all members of a group together, under 'done'."
        )


def check_state(state: Mapping[str, Any], own: Mapping[str, Any], keys: Sequence[Any]) -> None:
    """Refuse a state that is incomplete, or of a collector with other root entries, envs or number of envs.

    Args:
        state: to be loaded.
        own: state of the collector that loads it.
        keys: of its root entries.
    """
    missing = sorted(own.keys() - state.keys() - {"policy_version"})
    if missing:
        raise ValueError(
            f"state_dict: expected entries {sorted(own)}, received {_names(state)}. Remedy: what state_dict() of a "
            "DeviceCollector returns; TorchRL's collectors store others."
        )
    expected, received = ([(tuple(row.shape), row.dtype) for row in each["root"]] for each in (own, state))
    if expected != received:
        raise ValueError(
            f"state_dict: expected root entries {dict(zip(keys, expected, strict=True))}, received shapes {received}. "
            "Remedy: the env, transforms and number of envs that it was saved with."
        )
    # transforms check their own states, some of which get entries in the first step
    parts = [(len(each["env"]), _layout(each["env"][-1]), _layout(each["traj_ids"])) for each in (own, state)]
    if parts[0] != parts[1]:
        raise ValueError(
            f"state_dict: expected envs, tensors of the innermost and numbers of episodes {parts[0]}, received "
            f"{parts[1]}. Remedy: the env, transforms and number of envs that it was saved with."
        )


def _layout(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value.shape) if isinstance(value, torch.Tensor) else None for name, value in state.items()}


def check_open(closed: bool) -> None:
    """Refuse to collect after a shutdown, which has closed the env."""
    if closed:
        raise RuntimeError("collect(): expected an open collector, received one that is shut down. Remedy: a new one.")


def refuse_recording(device: torch.device, name: str, received: str, remedy: str = "") -> None:
    """Refuse a call that a CUDA graph in recording would repeat never, or at each replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: expected nothing of it while a CUDA graph is recorded, received {received}. Remedy: "
            f"{remedy or 'call collect() outside the capture'}."
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
    """``"graph"`` on CUDA; ``"eager"`` elsewhere, where compiling takes longer than it soon saves."""
    return "graph" if device.type == "cuda" else "eager"


def resolve_eager_only(mode: str, names: Sequence[str]) -> str:
    """``"eager"`` for ``"auto"`` if there are ``names`` of arguments that need it; other modes are then refused."""
    if not names or mode not in ("auto", "compile", "graph"):
        return mode
    if mode != "auto":
        raise ValueError(
            f"{names[0]}: expected mode 'eager' or 'auto', since it asks the host at each step, received {mode!r}. "
            "Remedy: mode='eager', or leave it out."
        )
    return "eager"


def refuse_steps_in_reset(mode: str, steps_in_reset: bool) -> None:
    """Refuse to capture an env that a transform steps inside a reset."""
    if steps_in_reset and mode == "graph":
        raise ValueError(
            "env: expected no transform that steps the env inside a reset under mode 'graph', which resets at each "
            "step and keeps only the rows that ended, received one. Remedy: mode='eager'."
        )


def is_outside_graphs(env: EnvBase, mode: str) -> bool:
    """Whether no graph may hold the steps of an env, which mode ``"graph"`` then refuses."""
    if in_graphs(base := chain(env)[-1]):
        return False
    if mode == "graph":
        raise ValueError(
            f"mode: expected 'auto' or 'eager' for {type(base).__name__} around a simulator that may step outside of "
            "torch, received 'graph'. Remedy: in_graphs=True, if its step is a function of tensors."
        )
    return True


def resolve_mode(mode: str, device: torch.device | None) -> str:
    """Checks the mode against the device."""
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, received {mode!r}. Remedy: one of these.")
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
    # the action that a transform such as ActionDiscretizer makes of the policy's, for the env below
    inner = {key for each in chain(env)[1:] for key in each.action_keys} - actions
    inner -= set(env.observation_keys) if inner else set()
    root = with_open_masks(fake.exclude("next", *actions, *inner), env.done_keys)
    with seeded(None, device_of(env)), acting(ExplorationType.RANDOM):
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
    for key in inner & set(fake.keys(True, True)):
        out.set(key, fake.get(key))
    out.set("next", fake.get("next").update(out.get("next")) if "next" in out.keys() else fake.get("next"))
    return root, out


def with_open_masks(root: TensorDictBase, done_keys: Sequence[Any]) -> TensorDictBase:
    """``root``, a fake state of zeros, with masks that allow everything: a policy cannot draw from an empty mask."""
    flags = {key if isinstance(key, tuple) else (key,) for key in done_keys}
    for key in root.keys(True, True):
        path = key if isinstance(key, tuple) else (key,)
        value = root.get(key)
        if path not in flags and (value.dtype == torch.bool or "mask" in path[-1]):
            root.set(key, torch.ones_like(value))
    return root


def check_policy(policy: Policy, env: EnvBase, *, sync_free: bool) -> None:
    """Device, keys and action shape of the policy; with ``sync_free`` also that it does not wait for the host."""
    if isinstance(policy, torch.nn.Module):
        devices = {p.device for p in policy.parameters()}
        here = policy.policy_device if isinstance(policy, CastPolicy) else device_of(env)
        if any(device.type != here.type for device in devices):
            raise ValueError(
                f"policy: expected parameters on {here}, where it acts, received {_names(devices)}. Remedy: "
                f"policy.to('{here}'), or device='{here}', which copies it there."
            )
    needed = getattr(policy, "in_keys", [])
    root = env.fake_tensordict().exclude("next")
    # a CompositeDistribution reads "params", whose entries the module before it writes
    written = {key[:i] for key in getattr(policy, "out_keys", ()) if isinstance(key, tuple) for i in range(1, len(key))}
    absent = [
        key for key in needed if key not in root.keys(True) and ((key,) if isinstance(key, str) else key) not in written
    ]
    if absent:
        raise ValueError(
            f"policy: expected in_keys among {_names(root.keys(True, True))}, which the env gives, received {absent}. "
            "Remedy: set its in_keys, or the env's transforms."
        )
    try:
        with no_host_sync(device_of(env)) if sync_free else seeded(None, device_of(env)):
            _, out = probe_keys(policy, env)
    except HostSyncError as error:
        if not waits_outside_graphs_alone(policy, env):
            raise ValueError(
                f"policy: expected no host wait under mode 'graph' or 'compile', received one: {error}. Remedy: mend "
                "it, or mode='eager'."
            ) from error
        _, out = probe_keys(policy, env)
    for key in env.action_keys:
        spec, action = env.full_action_spec[key], out.get(key)
        if action.shape != spec.shape or not _fits(action.dtype, spec) or action.device != device_of(env):
            raise ValueError(
                f"policy: expected {key!r} of shape {list(spec.shape)} and dtype {spec.dtype} on {spec.device}, "
                f"received {list(action.shape)} and {action.dtype} on {action.device}. Remedy: fit the policy's output "
                "size or distribution to env.action_spec."
            )


def waits_outside_graphs_alone(policy: Policy, env: EnvBase) -> bool:
    """Whether a policy that waits for the host can be recorded, since it leaves its waits out while a graph records it.

    TorchRL's ``TanhNormal`` is one: it looks at its bounds wherever it is made, but for recordings.
    """
    device = device_of(env)
    if device.type != "cuda":
        return False
    root, _ = probe_keys(policy, env)
    trial = capture(lambda: policy(root.copy()), warmup=1, device=device, audit=False)
    try:
        with seeded(None, device), acting(ExplorationType.RANDOM):
            trial()
            trial()
    except CaptureError:
        return False
    finally:
        trial.release()
    return True


def waits_in_graphs(report: HostSyncReport, policy: Policy, env: EnvBase) -> HostSyncReport:
    """The host waits of a step, less those that its policy leaves out while a graph records it.

    Args:
        report: of one step in ``env``, the policy's call included.
        policy: what acted.
        env: where it acted.
    """
    if not report.total or not waits_outside_graphs_alone(policy, env):
        return report
    with host_syncs(device_of(env)) as of_policy:
        probe_keys(policy, env)
    return report.without(of_policy)


def _fits(dtype: torch.dtype, spec: TensorSpec) -> bool:
    """Whether an env with this spec takes actions of this dtype: any for one-hot, else the spec's kind of number."""
    if dtype == spec.dtype or isinstance(spec, OneHot | MultiOneHot):
        return True
    kinds = [(each.is_floating_point, each == torch.bool) for each in (dtype, spec.dtype)]
    return kinds[0] == kinds[1]


def check_masked_reset(env: EnvBase, mode: str) -> bool:
    """Whether the env can reset by mask inside a compiled step; resets and steps it once, and refuses host waits.

    Raises:
        ValueError: where step or reset wait for the host, or, under ``"graph"``, a reset disregards its mask.
    """
    with seeded(None, device_of(env)), torch.no_grad():
        td = env.rand_action(env.reset())  # TorchRL draws bounded actions with a host read
        try:
            with no_host_sync(device_of(env)):
                stepped = env.step(td)
            honoured = honours_reset_mask(env)
            with no_host_sync(device_of(env)):
                inner_reset(env, stepped.empty().set("_reset", stepped.get("next").get("done").clone()))
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


def warn_not_compiled(env: EnvBase, error: Exception, may_go_on: bool) -> None:
    """Says that a step in ``env`` cannot be compiled, and that it is taken eagerly.

    Raises:
        ValueError: unless ``may_go_on``, where the caller has asked for a compiled step.
    """
    reason = " ".join(str(error).strip().split("\n\n")[0].split()).rstrip(".")
    if not may_go_on:
        raise ValueError(
            f"mode: expected an env and a policy that the compiler traces, received "
            f"{type(env).__name__} and: {reason}. Remedy: mode='eager', or a policy without what is named here."
        ) from error
    warnings.warn(
        f"{type(env).__name__} is collected in eager mode, since a step cannot be compiled: {reason}. Remedy: a policy "
        "without what is named here.",
        stacklevel=5,
    )


def _described(td: TensorDictBase) -> str:
    entries = [f"{key!r} {list(value.shape)} {value.dtype}" for key, value in td.items(True, True)]
    device = td.device or next((value.device for value in td.values(True, True)), None)
    return f"{', '.join(entries)} on {device}"


def _names(keys: Iterable[object]) -> list[str]:
    return sorted(map(str, keys))


COMPILE_AFTER = 200_000
"""Steps of all envs at once that a compiled graph takes to repay its 15 s or so."""


def repays_compiling(frames: int, total_frames: int, num_envs: int) -> bool:
    """Whether as many steps have been taken, and are left, as repay the time of compiling.

    Args:
        frames: collected so far, of all envs.
        total_frames: to be collected; negative without an end.
        num_envs: envs that step together.
    """
    left = (total_frames - frames) // num_envs if total_frames >= 0 else COMPILE_AFTER
    return min(frames // num_envs, left) >= COMPILE_AFTER
