"""Rollouts of a batched environment into preallocated, time-major storage, captured as a whole where possible."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.torch_version import TorchVersion
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.collectors import validation
from torchrl_perf.collectors.env_state import (
    ConstantFlags,
    env_state_dict,
    fused_parts,
    honours_reset_mask,
    load_env_state_dict,
    substituted,
)
from torchrl_perf.collectors.random_actions import RandomActions
from torchrl_perf.collectors.stepping import (
    autoreset_step,
    is_tensor_env,
    masked_reset,
    masked_step,
    resets_inside_step,
    unreset_step,
)
from torchrl_perf.collectors.trajectories import TrajectoryIds
from torchrl_perf.functional.copies import copy_all_
from torchrl_perf.runtime import Captured, capture, host_syncs
from torchrl_perf.runtime.compile import CompileMode, compiled

Mode = Literal["auto", "eager", "compile", "graph"]
COMPILES_ANY_STEP = TorchVersion(torch.__version__) >= "2.13"
"""Whether the compiler traces the step of TorchRL's base class, whose specs are cached in the env's ``__dict__``."""


class DeviceCollector(BaseCollector):
    """Collects ``[N, T]`` batches with every step on the device and no host wait.

    A drop-in for ``torchrl.collectors.Collector`` (also in TorchRL's trainers) where the environment is one batch of N
    environments. The batch is allocated once, time-major (``[T, N]`` contiguous, seen as ``[N, T]``); each step writes
    its rows in place.

    Args:
        env: a TorchRL env with ``batch_size [N]``, or a function that makes one.
        policy: a TensorDict module on the env's device, or None for random actions. It is shared, not copied: weights
            that an optimiser updates in place are used at the next step.
        frames_per_batch: N * T, a multiple of N.
        total_frames: after how many frames iteration ends, rounded up to a whole batch; -1 never.
        init_random_frames: the first steps take random actions until at least this many frames are collected: rounded
            up to a whole step of N frames, also within a batch.
        mode: ``"eager"``; ``"compile"``: the step is one compiled function (below transforms on torch before 2.13 the
            policy and the env's own arithmetic are); ``"graph"``: the compiled rollout is one CUDA graph; ``"auto"``:
            ``"graph"`` on CUDA where nothing waits for the host, else ``"eager"``, and a warning that names what waits.
        compile_mode: how long the compiler searches in the other modes than ``"eager"``, as for
            :func:`~torchrl_perf.runtime.compile.compiled`.
        postproc: called on each batch that iteration yields.
        exclude_keys: policy outputs or root keys not to store, such as ``("logits",)``.

    Keys written, beside those of env and policy: ``("collector", "traj_ids")`` int64 ``[N, T]``, an own number for each
    episode.

    Resets are masked by ``torch.where`` where ``_step`` and ``_reset`` of the env are functions of tensors
    (:func:`~torchrl_perf.collectors.stepping.masked_reset`): nothing waits. Other envs reset through
    ``env.maybe_reset``, which asks the host at each step whether a row is done: all in mode ``"eager"``, and in mode
    ``"compile"`` those whose ``_reset`` disregards its mask. The first batch of mode ``"auto"`` finds out which one an
    env is.

    Raises:
        ValueError: at construction, for a frame count that N does not divide, a policy whose keys, shapes, dtypes or
            device do not fit, ``"graph"`` without CUDA, a policy, step or reset that waits for the host under
            ``"graph"`` or ``"compile"``.
    """

    trajs_per_batch = None
    _iterator = None
    _weight_updater = None
    _weight_sync_schemes = None

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        init_random_frames: int = 0,
        mode: Mode = "auto",
        compile_mode: CompileMode = "default",
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        exclude_keys: Sequence[NestedKey] = (),
    ) -> None:
        self.env = env if isinstance(env, EnvBase) else env()
        validation.check_env(self.env)
        self._random_actions = RandomActions(self.env)
        self.policy = policy if policy is not None else self._random_actions
        self.num_envs = self.env.batch_size[0]
        self.num_steps = validation.steps_per_batch(frames_per_batch, self.num_envs)
        self.requested_frames_per_batch = self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.init_random_frames = init_random_frames
        self.postproc = postproc
        self.replay_buffer = None
        self.exploration_type = ExplorationType.RANDOM
        self.closed = False
        self._random_steps = -(-init_random_frames // self.num_envs)
        self._frames = 0
        self._iter = -1
        self.device = self.env.device
        self._tensor_env = is_tensor_env(self.env)
        self.mode = validation.resolve_mode(mode, self.device)
        self._compile_mode = compile_mode
        capturable = self.mode in ("graph", "compile")
        validation.check_policy(self.policy, self.env, sync_free=capturable)
        self._constant_flags = ConstantFlags(self.env)
        self._masked = self._tensor_env
        if capturable and not resets_inside_step(self.env):
            with self._constant_flags():
                self._masked = validation.check_masked_reset(self.env, self.mode)
        self._audit_pending = self.mode == "auto"
        if self._audit_pending and self._tensor_env and self.device.type == "cpu":
            self.mode, self._audit_pending = "eager", False  # what it is there, whatever an audit finds
        self._allocate(set(exclude_keys))
        self._select_step()

    # -- construction -------------------------------------------------------------------------------------------------

    def _allocate(self, excluded: set[NestedKey]) -> None:
        """Buffers from the specs and one policy call on a fake state: roots have T + 1 rows, everything else T."""
        if ("next", "done") in excluded:
            raise ValueError("exclude_keys: expected ('next', 'done') to be kept, which numbers the episodes.")
        root, out = validation.probe_keys(self.policy, self.env)
        self._root_keys = list(root.keys(True, True))
        # the root of a step is never done, since the row has been reset: its flags stay the zeros they are made of
        self._constant_keys = () if self.env._allow_done_after_reset else tuple(self.env.done_keys)
        self._out_keys = [key for key in out.keys(True, True) if key not in excluded]
        steps, n = self.num_steps, self.num_envs
        self._roots = [
            torch.zeros((steps + 1, *v.shape), dtype=v.dtype, device=self.device)
            for v in map(root.get, self._root_keys)
        ]
        self._outs = [
            torch.zeros((steps, *v.shape), dtype=v.dtype, device=self.device) for v in map(out.get, self._out_keys)
        ]
        self._root_rows = [[buffer[t] for buffer in self._roots] for t in range(steps + 1)]
        self._out_rows = [[buffer[t] for buffer in self._outs] for t in range(steps)]
        self._traj_ids = TrajectoryIds(n, steps, self.device)
        self._frames_on_device = torch.zeros((), dtype=torch.int64, device=self.device)
        batch = TensorDict({}, batch_size=[n, steps], device=self.device, names=[None, "time"])
        for key, buffer in [
            *zip(self._root_keys, self._roots, strict=True),
            *zip(self._out_keys, self._outs, strict=True),
        ]:
            if key not in excluded:
                batch.set(key, buffer[:steps].transpose(0, 1))
        batch.set(("collector", "traj_ids"), self._traj_ids.ids.transpose(0, 1))
        self._done = batch.get(("next", "done"))
        self.batch = batch
        self._started = False

    def _select_step(self) -> None:
        fuse = partial(compiled, mode=self._compile_mode) if self.mode in ("graph", "compile") else _as_it_is
        self._act_fn, self._base_fns = self._act, {}
        if resets_inside_step(self.env):
            self._env_step = autoreset_step
        else:
            self._env_step = masked_step if self._masked else unreset_step
            if not COMPILES_ANY_STEP and fuse is not _as_it_is:
                # what lies between the policy and the env's own arithmetic stays eager
                self._act_fn, self._base_fns = fuse(self._act), fused_parts(self.env, fuse)
                fuse = _as_it_is
        self._advance_fn = fuse(self._advance)
        self._step_fn = self._host_reset_step if self._env_step is unreset_step else fuse(self._step)
        self._run = capture(self._rollout, device=self.device, audit=False) if self.mode == "graph" else self._rollout

    # -- collection ---------------------------------------------------------------------------------------------------

    def _act(self, td: TensorDictBase) -> TensorDictBase:
        return self.policy(td)

    def _advance(self, root: list[Tensor], out: list[Tensor], random: bool = False) -> TensorDictBase:
        """Act and step from the ``root`` row and write this step's row; returns the next root."""
        # one by one: the compiler cannot trace a constructor that makes nested TensorDicts
        td = TensorDict({}, self.env.batch_size, device=self.device)
        for key, row in zip(self._root_keys, root, strict=True):
            td.set(key, row)

        def store(stepped: TensorDictBase) -> None:
            values = [stepped.get(key, None) for key in self._out_keys]
            if random:  # a random action has no log-probability
                values = [torch.zeros_like(row) if v is None else v for row, v in zip(out, values, strict=True)]
            copy_all_(out, values)

        act = self._random_actions if random else self._act_fn
        return self._env_step(self.env, act(td), store)

    def _write_root(self, following: TensorDictBase, next_root: list[Tensor]) -> None:
        keys = zip(self._root_keys, next_root, strict=True)
        written = [(row, following.get(key)) for key, row in keys if key not in self._constant_keys]
        copy_all_(*map(list, zip(*written, strict=True)))

    def _step(self, root: list[Tensor], out: list[Tensor], next_root: list[Tensor], random: bool = False) -> None:
        """One step that resets without a host read."""
        self._write_root(self._advance(root, out, random), next_root)

    def _host_reset_step(
        self, root: list[Tensor], out: list[Tensor], next_root: list[Tensor], random: bool = False
    ) -> None:
        """One step after which the host asks whether a row is done."""
        following = self._advance(root, out, True) if random else self._advance_fn(root, out)
        self._write_root(self.env.maybe_reset(following), next_root)

    def _audited_step(self, root: list[Tensor], out: list[Tensor], next_root: list[Tensor]) -> None:
        """First step of mode ``"auto"``: takes it, and settles whether anything waits and how to reset."""
        self._audit_pending = False
        if not resets_inside_step(self.env):
            self._env_step = unreset_step
        with host_syncs(self.device) as report:
            following = self._advance(root, out)
        if self._env_step is unreset_step:
            # an env that waits may be a simulator, which a reset under an empty mask would disturb
            self._masked = self._tensor_env or (not report.total and honours_reset_mask(self.env))
            if self._masked:
                with host_syncs(self.device) as report_reset:
                    following = masked_reset(self.env, following)
                report = report if report.total else report_reset
            else:
                following = self.env.maybe_reset(following)
        self._write_root(following, next_root)
        fastest = validation.fastest_mode(self.device)
        blocked = report.total or not (self._masked or fastest == "eager")
        self.mode = "eager" if blocked else fastest
        if blocked:
            validation.warn_not_captured(self.env, report)

    def _rollout(self, random_steps: int = 0) -> None:
        compiled_parts = substituted(self.env, self._base_fns)
        with torch.no_grad(), set_exploration_type(self.exploration_type), self._constant_flags(), compiled_parts:
            copy_all_(self._root_rows[0], self._root_rows[-1])
            for t in range(self.num_steps):
                rows = self._root_rows[t], self._out_rows[t], self._root_rows[t + 1]
                if t < random_steps:
                    (self._host_reset_step if self._env_step is unreset_step else self._step)(*rows, random=True)
                elif self._audit_pending:
                    self._audited_step(*rows)
                    self._select_step()
                else:
                    self._step_fn(*rows)
            self._traj_ids.update(self._done)
            self._frames_on_device += self.frames_per_batch

    def _start(self) -> None:
        # the public reset asks the host whether a fresh row is done, which a DeviceEnv's never is
        root = self.env._reset(None) if self._tensor_env else self.env.reset()
        for key, row in zip(self._root_keys, self._root_rows[-1], strict=True):
            row.copy_(root.get(key))
        if self._iter >= 0:
            self._traj_ids.restart()
        self._started = True

    def collect(self) -> TensorDictBase:
        """Collects N * T frames into the one preallocated batch and returns it; the next call overwrites it.

        May be called inside a function given to :func:`~torchrl_perf.runtime.capture`.
        """
        if not self._started:
            self._start()
        if self._random_steps:
            self._refuse_recording()
            random_steps = min(self._random_steps, self.num_steps)
            self._rollout(random_steps)
            self._random_steps -= random_steps
        elif self._audit_pending:
            self._rollout()
        else:
            self._run()
        self._frames += self.frames_per_batch
        self._iter += 1
        return self.batch

    def _refuse_recording(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "init_random_frames: expected them to be over before a CUDA graph is recorded, received "
                f"{self._random_steps} random steps to go, which every replay would repeat. Remedy: call collect() "
                "until then, or capture with a longer warmup."
            )

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yields batches ``[N, T]`` that own their data (copies of the preallocated one), until ``total_frames``."""
        while self.total_frames < 0 or self._frames < self.total_frames:
            batch = self.collect().clone()
            yield batch if self.postproc is None else self.postproc(batch)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host is asked at each step if a row is done, which no graph can hold."""
        return self._env_step is unreset_step

    @property
    def frames(self) -> Tensor:
        """Frames collected so far, as an int64 scalar on the device; counts graph replays too."""
        return self._frames_on_device

    # -- TorchRL's collector interface ------------------------------------------------------------------------------

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        """The one rule: the policy is shared, so None is nothing to do; given weights are copied in place."""
        if policy_or_weights is None or policy_or_weights is self.policy:
            return
        weights: Any = policy_or_weights
        if isinstance(weights, torch.nn.Module):
            weights = TensorDict.from_module(weights)
        elif isinstance(weights, dict):
            weights = TensorDict(weights).unflatten_keys(".")
        params: Any = TensorDict.from_module(self.policy)
        params.data.update_(weights.data)

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seeds the env, whose episodes begin anew; returns the seed for a next one, as TorchRL does."""
        self._started = False
        return self.env.set_seed(seed, static_seed=static_seed)

    def reset(self) -> None:
        """Abandons the running episodes: the next batch starts with a reset of all envs."""
        self._started = False

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Releases the captured graph and closes the env."""
        if self.closed:
            return
        self.closed = True
        if isinstance(self._run, Captured):
            self._run.release()
        if close_env and not self.env.is_closed:
            self.env.close(raise_if_closed=raise_on_error)

    def state_dict(self) -> OrderedDict:
        """Env state, the state the next step starts from, counters and trajectory ids: enough to go on bit for bit.

        All tensors are copies. The random state is torch's own (``torch.get_rng_state`` or
        ``torch.cuda.get_rng_state``): save it beside this. Of an env whose state is not in its ``state_dict``, the
        episodes begin anew after loading.
        """
        frames = int(self._frames_on_device)  # the device's count holds graph replays too
        return OrderedDict(
            env=env_state_dict(self.env),
            root=[row.clone() for row in self._root_rows[-1]],
            traj_ids=self._traj_ids.state_dict(),
            frames=frames,
            iter=frames // self.frames_per_batch - 1,
            random_steps=self._random_steps,
            started=self._started,
        )

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Restores :meth:`state_dict`, in place: captured graphs stay valid.

        Raises:
            ValueError: for the state of a collector with other root entries or another number of envs.
        """
        expected = [tuple(row.shape) for row in self._root_rows[-1]]
        received = [tuple(row.shape) for row in state_dict["root"]]
        if expected != received:
            raise ValueError(
                f"state_dict: expected root entries {dict(zip(self._root_keys, expected, strict=True))}, received "
                f"shapes {received}. Remedy: the env, transforms and number of envs that it was saved with."
            )
        load_env_state_dict(self.env, state_dict["env"])
        for row, value in zip(self._root_rows[-1], state_dict["root"], strict=True):
            row.copy_(value)
        self._traj_ids.load_state_dict(state_dict["traj_ids"])
        self._frames = state_dict["frames"]
        self._frames_on_device.fill_(self._frames)
        self._iter = state_dict["iter"]
        self._random_steps = state_dict["random_steps"]
        # an env without tensors to restore has to begin its episodes anew
        self._started = state_dict["started"] and self._tensor_env


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn
