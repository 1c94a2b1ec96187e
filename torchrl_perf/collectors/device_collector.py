"""Rollouts of a batched environment into preallocated, time-major storage, captured as a whole where possible."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.torch_version import TorchVersion
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_perf.collectors import arguments, validation
from torchrl_perf.collectors.background import Background
from torchrl_perf.collectors.delivery import Delivery, Postproc, resolve_traj_format, truncation_keys, under_next
from torchrl_perf.collectors.env_state import (
    ConstantFlags,
    chain,
    device_of,
    env_state_dict,
    fused_parts,
    honours_reset_mask,
    keeps_state,
    load_env_state_dict,
    mark_rows,
)
from torchrl_perf.collectors.native_autoreset import NativeResets, check_members, check_native, is_native
from torchrl_perf.collectors.random_actions import RandomActions
from torchrl_perf.collectors.repeats import EndsKept, check_repeats, steps_in_reset
from torchrl_perf.collectors.rollout_graphs import RolloutGraphs
from torchrl_perf.collectors.shared_policy import SharedPolicyCollector
from torchrl_perf.collectors.step_rows import StepRows
from torchrl_perf.collectors.stepping import (
    draws_of,
    inside_step,
    is_tensor_env,
    masked_reset,
    masked_step,
    unreset_step,
)
from torchrl_perf.collectors.trajectories import TrajectoryIds
from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.functional.rows.copies import copy_all_
from torchrl_perf.runtime import host_syncs, is_capturing
from torchrl_perf.runtime.compile import FEW_LAUNCHES, CompileMode, compiled
from torchrl_perf.runtime.draws import Row, StepDraws, noted, supplied
from torchrl_perf.runtime.self_capture import plain_calls
from torchrl_perf.runtime.upstream.envs import inner_reset, may_be_done_after_reset, replaced

Mode = Literal["auto", "eager", "compile", "graph"]
COMPILES_ANY_STEP = TorchVersion(torch.__version__) >= "2.13"
"""Whether the compiler traces the step of TorchRL's base class, whose specs are cached in the env's ``__dict__``."""


class DeviceCollector(SharedPolicyCollector):
    """Collects ``[N, T]`` batches with every step on the device and no host wait.

    A drop-in for ``torchrl.collectors.Collector`` (also in TorchRL's trainers). The batch is allocated once, time-major
    (``[T, N]`` contiguous, seen as ``[N, T]``); each step writes its rows in place. An env without batch dims gives
    batches ``[T]``, one with several ``[*B, T]``, as TorchRL's do; N is then the number of all its envs.

    Args:
        create_env_fn: a TorchRL env, a function or ``EnvCreator`` that makes one, or a list of these: several are one
            ``SerialEnv``. Envs with TorchRL's mark ``_torchrl_native_autoreset`` are reset once (``"auto"`` is
            ``"eager"`` for them): NaN is under "next" where an episode ends, or what the env's override keeps there.
        policy: a TensorDict module, a module of tensors named like the observations, or None for random actions. It is
            shared, not copied: weights that an optimiser updates in place are used at the next step.
        policy_factory: makes the policy, in place of it.
        frames_per_batch: N * T, a multiple of N (TorchRL rounds up, with a warning).
        total_frames: after how many frames iteration ends, rounded up to a whole batch; -1 or None never.
        mode: ``"eager"``; ``"compile"``: the step is one compiled function (below transforms on torch before 2.13 the
            policy and the env's own arithmetic are); ``"graph"``: the compiled rollout is one CUDA graph; ``"auto"``:
            ``"graph"`` on CUDA where nothing waits for the host, else ``"eager"``, and a warning that names what waits.
            Its kernels are eager at first, compiled after 200,000 steps where as many are left (equal to rounding).
        compile_mode: how long the compiler searches in the other modes than ``"eager"``, as for
            :func:`~torchrl_perf.runtime.compile.compiled`.
        draw_ahead: where the env resets inside its step, random numbers of the policy and of resets are drawn for many
            steps at once: other numbers than those of single draws, and the same ones in each mode.
        compile_later: in the modes ``"compile"`` and ``"graph"`` steps are eager until :meth:`compile_steps` is called.
        exclude_keys: policy outputs or root keys not to store, such as ``("logits",)``.
        env: ``create_env_fn`` under another name.
        device: stands for each of the next three that is not given.
        storing_device: where batches are put, one copy a batch.
        policy_device: the policy is copied there if it is elsewhere, and ``update_policy_weights_()`` brings the copy
            up to date; another one than the env's is for mode ``"eager"``.
        env_device: the env is moved there.
        create_env_kwargs: passed to ``create_env_fn``.
        max_frames_per_traj: episodes are truncated at this length, by a ``StepCounter``; None, 0 and below: no limit.
        init_random_frames: the first steps take random actions until at least this many frames are collected: rounded
            up to a whole step of N frames, also within a batch (TorchRL: to whole batches); None and -1 are 0.
        reset_at_each_iter: all envs are reset before each batch, and begin episodes with numbers of their own.
        postproc: called on each batch that iteration yields.
        split_trajs: iteration yields ``[episodes, longest]``, padded with zeros, with ``("collector", "mask")``.
        track_traj_ids: whether batches hold ``("collector", "traj_ids")``.
        exploration_type: of the policy's distributions. None: that of a ``set_exploration_type`` around the call, else
            RANDOM. Each type has a captured graph of its own; an iteration captured around this keeps one type.
        return_same_td: iteration yields the one preallocated batch, which the next one overwrites.
        set_truncated: the last step of each batch is marked truncated and done.
        use_buffers: makes no difference: batches that iteration yields always own their data.
        replay_buffer: iteration writes each batch there and yields None.
        extend_buffer: True writes a batch with one ``extend``, False step by step with ``add``.
        trust_policy: a module is taken to act on TensorDicts.
        compile_policy: in mode ``"eager"`` the policy alone is compiled; a dict is passed to ``torch.compile``. The
            other modes compile it with the env.
        cudagraph_policy: in mode ``"eager"`` on CUDA the policy alone is a ``CudaGraphModule``; others capture the env.
        no_cuda_sync, weight_updater: without effect, since nothing is synchronised; called by
            ``update_policy_weights_``.
        track_policy_version: frames hold the number of weight updates, a host number; needs mode ``"eager"``.
        trajs_per_batch, trajs_per_write: whole episodes that iteration yields, on the host, and that are written at
            once with a replay buffer, as TorchRL does.
        traj_format: ``"padded"`` (also None) or ``"cat"``.
        auto_register_policy_transforms: True adds the transforms that carry the state of a recurrent policy.
        pre_collect_hook, post_collect_hook: called before each batch, and on each that iteration yields or writes.
        compact_obs: observations under "next" are not stored.
        backend, backend_options, num_collectors, sync, reset_when_done: TorchRL's, at values that change nothing
            (``collectors.arguments.REFUSED``).
        interruptor, weight_sync_schemes, weight_recv_schemes, worker_idx: likewise.

    Keys written beside those of env and policy: ``("collector", "traj_ids")`` int64 ``[N, T]``, one number an episode.

    Resets are masked by ``torch.where`` where ``_step`` and ``_reset`` of the env are functions of tensors
    (:func:`~torchrl_perf.collectors.stepping.masked_reset`): nothing waits. Other envs reset through
    ``env.maybe_reset``, which asks the host at each step whether a row is done: all in mode ``"eager"``, and in mode
    ``"compile"`` those whose ``_reset`` disregards its mask. The first batch of mode ``"auto"`` finds out which one an
    env is. ``FrameSkipTransform`` stops where an episode ends.

    Raises:
        ValueError: at construction, for a frame count that N does not divide, a policy whose keys, shapes, dtypes or
            device do not fit, ``"graph"`` without CUDA, a policy, step or reset that waits for the host under
            ``"graph"`` or ``"compile"``, arguments that have no meaning here or contradict each other.
        TypeError: for a name that is no argument, with the nearest one.
    """

    # fmt: off
    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self, create_env_fn: Any = None, policy: Any = None, *,
        frames_per_batch: int, total_frames: int | None = -1, mode: Mode = "auto",
        compile_mode: CompileMode = "default", exclude_keys: Sequence[NestedKey] = (), env: Any = None,
        policy_factory: Callable[[], Any] | None = None,
        device: arguments.Device = None, storing_device: arguments.Device = None,
        policy_device: arguments.Device = None, env_device: arguments.Device = None,
        create_env_kwargs: dict[str, Any] | None = None, max_frames_per_traj: int | None = None,
        init_random_frames: int | None = 0, reset_at_each_iter: bool = False, postproc: Postproc | None = None,
        split_trajs: bool | None = None, track_traj_ids: bool = True, exploration_type: ExplorationType | None = None,
        return_same_td: bool = False, reset_when_done: bool = True, interruptor: Any = None,
        set_truncated: bool = False, use_buffers: bool | None = None, replay_buffer: ReplayBuffer | None = None,
        extend_buffer: bool = True, trust_policy: bool | None = None,
        compile_policy: bool | dict[str, Any] | None = None, cudagraph_policy: bool | dict[str, Any] | None = None,
        no_cuda_sync: bool = False, weight_updater: Any = None, weight_sync_schemes: Any = None,
        weight_recv_schemes: Any = None, track_policy_version: Any = False, worker_idx: int | None = None,
        trajs_per_batch: int | None = None, trajs_per_write: int | None = None, traj_format: str | None = None,
        auto_register_policy_transforms: bool | None = None, pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None, compact_obs: bool = False,
        backend: str | None = None, backend_options: dict[str, Any] | None = None, num_collectors: int | None = None,
        sync: bool | None = None, traj_pool: Any = None, compile_later: bool = False, draw_ahead: bool = False,
        **unknown: Any,
    ) -> None:
        self.closed = True
        given = locals()
        arguments.refuse_unknown(unknown, DeviceCollector.__init__.__code__.co_varnames[: len(given) - 2])
        arguments.refuse({name: given[name] for name in arguments.REFUSED})
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        where = arguments.resolve_devices(device, env_device, policy_device, storing_device)
        self._delivery = Delivery(
            postproc=postproc, split_trajs=bool(split_trajs), track_traj_ids=track_traj_ids,
            replay_buffer=replay_buffer, extend_buffer=extend_buffer, return_same_td=return_same_td,
            use_buffers=use_buffers, storing_device=where.storing,
        )
        self.env_device, self.policy_device, self.storing_device = where
        self.trajs_per_batch, self.trajs_per_write = trajs_per_batch, trajs_per_write
        self.traj_format = resolve_traj_format(traj_format, trajs_per_batch, trajs_per_write)
        self.set_truncated, self.track_traj_ids = set_truncated, track_traj_ids
        self.reset_at_each_iter, self._may_go_on = reset_at_each_iter, compile_later or mode == "auto"
        self.init_random_frames, self.no_cuda_sync = max(init_random_frames or 0, 0), no_cuda_sync
        self.total_frames = -1 if total_frames is None or total_frames < 0 else int(total_frames)
        self._exploration = exploration_type
        self._make_env(arguments.make_env(create_env_fn, env, create_env_kwargs), where, track_policy_version)
        self._make_policy(arguments.make_policy(policy, policy_factory, self.env, trust_policy), where)
        self.env = arguments.with_policy_state(self.env, self.policy, auto_register_policy_transforms)
        self.max_frames_per_traj = max_frames_per_traj
        self.env = arguments.limited(self.env, max_frames_per_traj)
        self._check_env(frames_per_batch)
        self._draws_ahead = draw_ahead and arguments.takes_draws(self.env, compile_policy, cudagraph_policy)
        self._settle_mode(mode, compile_mode, compile_policy, cudagraph_policy)
        self._allocate({*exclude_keys, *(arguments.observations_under_next(self.env) if compact_obs else ())})
        is_here = where.storing in (None, arguments.ordinal(self.device))
        self._stored = None if is_here else self.batch.to(where.storing)
        self._select_step()
        self._background = Background(self._write_next)
        self.weight_updater = weight_updater
        self.closed = False
        for part in (self.policy, self.env):
            getattr(part, "register_collector", _as_it_is)(self)
    # fmt: on

    # -- construction -------------------------------------------------------------------------------------------------

    def _make_env(self, env: EnvBase, where: arguments.Devices, version: Any) -> None:
        if where.env is not None and arguments.ordinal(env.device) != where.env:
            env = env.to(where.env)
        self.env, self.policy_version_tracker = arguments.versioned(env, version)

    def _make_policy(self, policy: Any, where: arguments.Devices) -> None:
        self.policy = arguments.placed(policy, where.policy)
        self._original_policy = policy
        self.device, self._acting = device_of(self.env), self.policy
        if policy is not None and where.policy not in (None, arguments.ordinal(self.device)):
            self._acting = arguments.CastPolicy(self.policy, where.policy, self.device)

    def _check_env(self, frames_per_batch: int) -> None:
        check_native(self.env)
        validation.check_env(self.env)
        self._native = NativeResets(chain(self.env)[-1]) if is_native(self.env) else None
        check_repeats(self.env, self._native is not None)
        self._random_actions = RandomActions(self.env)
        if self.policy is None:
            self.policy = self._acting = self._random_actions
        self.num_envs = self.env.batch_size.numel()
        self.num_steps = validation.steps_per_batch(frames_per_batch, self.num_envs)
        self.requested_frames_per_batch = self.frames_per_batch = frames_per_batch
        self._random_steps = -(-self.init_random_frames // self.num_envs)
        self._frames, self._iter = 0, -1
        self._tensor_env = is_tensor_env(self.env)
        self._host_resets = steps_in_reset(self.env)
        self._inside_step = inside_step(self.env)
        self._whole = COMPILES_ANY_STEP or arguments.takes_draws(self.env, None, None)  # until the compiler refuses
        self._truncation = truncation_keys(self.env) if self.set_truncated else []
        self._constant_flags = ConstantFlags(self.env)
        self._ends_kept = EndsKept(self.env)

    def _settle_mode(self, mode: Mode, compile_mode: CompileMode, compile_policy: Any, cudagraph_policy: Any) -> None:
        self._compile_mode = compile_mode
        eager_only = {
            "track_policy_version": self.policy_version_tracker is not None,
            "policy_device": isinstance(self._acting, arguments.CastPolicy),
        }
        self.mode = validation.resolve_eager_only(mode, [name for name, given in eager_only.items() if given])
        self.mode = validation.resolve_mode(self.mode, self.device)
        capturable = self.mode in ("graph", "compile")
        validation.check_policy(self._acting, self.env, sync_free=capturable)
        self._masked = (self._tensor_env or self._native is not None) and not self._host_resets
        validation.refuse_steps_in_reset(self.mode, self._host_resets)
        if capturable and not (self._inside_step or self._native or self._host_resets):
            with self._constant_flags(), self._ends_kept():
                self._masked = validation.check_masked_reset(self.env, self.mode)
        self._audit_pending = self._auto = self.mode == "auto"
        self._compiles = not self._may_go_on  # "auto" compiles once that pays
        # a simulator may step outside torch, where no audit sees it and no graph repeats it: only on request
        outside = validation.is_outside_graphs(self.env, self.mode) or self._native is not None
        if self._audit_pending and (outside or (self._tensor_env and self.device.type == "cpu") or self._host_resets):
            self.mode, self._audit_pending = "eager", False  # the mode there, whatever an audit would find
        self._acting = arguments.accelerated(self._acting, compile_policy, cudagraph_policy, self.mode, self.device)

    def _allocate(self, excluded: set[NestedKey]) -> None:
        """Buffers from the specs and one policy call on a fake state: roots have T + 1 rows, everything else T."""
        if ("next", "done") in excluded:
            raise ValueError(
                "exclude_keys: expected no ('next', 'done'), which numbers the episodes, received it. Remedy: drop it."
            )
        with noted() as acted:
            root, out = validation.probe_keys(self._acting, self.env)
        self._root_keys = list(root.keys(True, True))
        # the root of a step is never done, since the row has been reset: its flags stay 0
        self._constant_keys = () if may_be_done_after_reset(self.env) else tuple(self.env.done_keys)
        self._out_keys = [key for key in out.keys(True, True) if key not in excluded]
        steps, n, dims = self.num_steps, self.num_envs, self.env.batch_dims
        place = {"device": self.device, "aligned": self.device.type == "cuda"}
        self._roots = StepRows([root.get(key) for key in self._root_keys], steps + 1, **place)
        self._outs = StepRows([out.get(key) for key in self._out_keys], steps, **place)
        self._root_rows, self._out_rows = self._roots.rows, self._outs.rows
        self._draws = StepDraws([*acted, *draws_of(self.env)] if self._draws_ahead else (), steps, self.device)
        self._traj_ids = TrajectoryIds(n, steps, self.device)
        self._frames_on_device = torch.zeros((), dtype=torch.int64, device=self.device)
        shape = [*self.env.batch_size, steps]
        batch = TensorDict({}, batch_size=shape, device=self.device, names=[None] * dims + ["time"])
        buffers = [*self._roots.buffers, *self._outs.buffers]
        for key, buffer in zip([*self._root_keys, *self._out_keys], buffers, strict=True):
            if key not in excluded:
                batch.set(key, buffer[:steps].movedim(0, dims))
        if self.track_traj_ids:
            ids = self._traj_ids.ids.view(steps, *self.env.batch_size)
            batch.set(("collector", "traj_ids"), ids.movedim(0, dims))
        outs = dict(zip(self._out_keys, self._outs.buffers, strict=True))
        self._done = outs["next", "done"].view(steps, n, 1).transpose(0, 1)
        pairs = [under_next(key) for pair in self._truncation for key in pair]
        self._last_flags = [outs[key][-1] for key in pairs if key in outs]
        self.batch, self._started = batch, False

    def _select_step(self) -> None:
        compiles = self._compiles and self.mode in ("compile", "graph")
        options = {"device": self.device, "mode": self._compile_mode}
        if self.device.type == "cuda" and isinstance(chain(self.env)[-1], DeviceEnv):
            options["options"] = FEW_LAUNCHES  # not for a world, of whose operations it would compare every pair
        fuse = partial(compiled, **options) if compiles else _as_it_is
        self._act_fn, self._base_fns = self._act, dict(self._native.methods) if self._native else {}
        self._env_step = self._inside_step or (masked_step if self._masked else unreset_step)
        if not self._whole and fuse is not _as_it_is:
            # what lies between the policy and the env's own arithmetic stays eager
            self._act_fn, self._base_fns = fuse(self._act), {**self._base_fns, **fused_parts(self.env, fuse)}
            fuse = _as_it_is
        self._advance_fn = fuse(self._advance)
        self._step_fn = self._host_reset_step if self._env_step is unreset_step else fuse(self._step)
        self._graphs = RolloutGraphs(self._rollout, self.device)

    # -- collection ---------------------------------------------------------------------------------------------------

    @property
    def exploration_type(self) -> ExplorationType:
        """How the policy's distributions are read: what was given, else that of the context, else RANDOM."""
        return self._exploration or exploration_type() or ExplorationType.RANDOM

    @exploration_type.setter
    def exploration_type(self, kind: ExplorationType | None) -> None:
        self._exploration = kind

    def _act(self, td: TensorDictBase) -> TensorDictBase:
        return self._acting(td)

    def _advance(self, root: list[Tensor], out: list[Tensor], random: bool = False) -> TensorDictBase:
        """Act and step from the ``root`` row and write this step's row; returns the next root."""
        # one by one: the compiler cannot trace a constructor that makes nested TensorDicts
        td = TensorDict({}, self.env.batch_size, device=self.env.device)
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

    def _step(
        self, root: list[Tensor], out: list[Tensor], next_root: list[Tensor], drawn: Row = (), random: bool = False
    ) -> None:
        """One step that resets without a host read, with random numbers that were ``drawn`` ahead."""
        with supplied(drawn):
            following = self._advance(root, out, random)
        self._write_root(following, next_root)

    def _host_reset_step(
        self, root: list[Tensor], out: list[Tensor], next_root: list[Tensor], drawn: Row = (), random: bool = False
    ) -> None:
        """One step after which the host asks whether a row is done."""
        following = self._advance(root, out, True) if random else self._advance_fn(root, out)
        self._write_root(self.env.maybe_reset(following), next_root)

    def _audited_step(self, root: list[Tensor], out: list[Tensor], next_root: list[Tensor], drawn: Row) -> None:
        """First step of mode ``"auto"``: takes it, and settles whether anything waits and how to reset."""
        self._audit_pending = False
        settled = self._inside_step is not None
        if not settled:
            self._env_step = unreset_step
        with host_syncs(self.device) as report, supplied(drawn):
            following = self._advance(root, out)
        report = validation.waits_in_graphs(report, self._acting, self.env)
        if not settled:
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

    def _fused_step(self, root: list[Tensor], out: list[Tensor], next_root: list[Tensor], drawn: Row) -> None:
        try:
            self._step_fn(root, out, next_root, drawn)
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything has been stepped
            if not self._whole or COMPILES_ANY_STEP:
                validation.warn_not_compiled(self.env, error, self._may_go_on)
                self.mode = "eager"
            elif drawn:  # parts that are compiled would keep the numbers of one step
                self._draws, drawn = StepDraws((), self.num_steps, self.device), ()
            self._whole = COMPILES_ANY_STEP
            self._select_step()
            self._fused_step(root, out, next_root, drawn)

    def _around_steps(self, kind: ExplorationType) -> AbstractContextManager[Any]:
        contexts = validation.acting(kind)
        if self._draws:
            contexts.enter_context(plain_calls())  # a recording of the policy alone would keep the numbers of one step
        contexts.enter_context(self._constant_flags())
        contexts.enter_context(self._ends_kept())
        contexts.enter_context(replaced(chain(self.env)[-1], self._base_fns))
        return contexts

    def _rollout(self, random_steps: int = 0, *, kind: ExplorationType) -> None:
        with self._around_steps(kind):
            copy_all_(self._root_rows[0], self._root_rows[-1])
            for t in range(self.num_steps):
                rows = self._root_rows[t], self._out_rows[t], self._root_rows[t + 1]
                drawn = self._draws.rows(t)
                if t < random_steps:
                    (self._host_reset_step if self._env_step is unreset_step else self._step)(*rows, random=True)
                elif self._audit_pending:
                    self._audited_step(*rows, drawn)
                    self._select_step()
                else:
                    self._fused_step(*rows, drawn)
            for memory in (self._roots, self._outs):
                memory.settle()
            if self.track_traj_ids:
                self._traj_ids.update(self._done)
            for flag in self._last_flags:  # after the numbers: an episode that is cut goes on in the next batch
                flag.fill_(True)
            self._frames_on_device += self.frames_per_batch

    def _start(self, **kwargs: Any) -> None:
        # the public reset asks the host whether a fresh row is done, which a DeviceEnv's never is
        quiet = self._tensor_env and not self._host_resets and not kwargs
        with torch.no_grad():
            root = inner_reset(self.env) if quiet else self.env.reset(**kwargs)
        check_members(self.env)
        self._take_root(root)
        if self._iter >= 0:
            self._traj_ids.restart()
        self._started = True

    def _take_root(self, root: TensorDictBase) -> None:
        for key, row in zip(self._root_keys, self._root_rows[-1], strict=True):
            row.copy_(root.get(key))

    def collect(self) -> TensorDictBase:
        """Collects N * T frames into the one preallocated batch and returns it; the next call overwrites it.

        May be called inside a function given to :func:`~torchrl_perf.runtime.capture`.
        """
        validation.check_open(self.closed)
        if self.pre_collect_hook is not None:
            validation.refuse_recording(self.device, "pre_collect_hook", "which no replay would call")
            self.pre_collect_hook()
        if not self._started or self.reset_at_each_iter:
            self._start()
        self._compile_where_it_pays()
        kind = self.exploration_type
        if self._random_steps:
            left = f"{self._random_steps} random steps to go, which every replay would repeat"
            remedy = "call collect() until then, or capture with a longer warmup"
            validation.refuse_recording(self.device, "init_random_frames", left, remedy)
            self._rollout(min(self._random_steps, self.num_steps), kind=kind)
            self._random_steps = max(self._random_steps - self.num_steps, 0)
        elif self._audit_pending:
            self._rollout(kind=kind)
        else:
            self._graphs.run(kind, graph=self.mode == "graph")
        self._frames += self.frames_per_batch
        self._iter += 1
        return self.batch if self._stored is None else self._stored.update_(self.batch)

    rollout = collect

    def _compile_where_it_pays(self) -> None:
        """Mode ``"auto"`` on CUDA: a graph of eager kernels first; one that somebody else records has compiled ones."""
        repays = is_capturing() or validation.repays_compiling(self._frames, self.total_frames, self.num_envs)
        if self._auto and repays and self.mode == "graph" and not (self._compiles or self._audit_pending):
            self.compile_steps()

    def compile_steps(self, on: bool = True) -> None:
        """From the next batch on, the modes ``"compile"`` and ``"graph"`` compile the step, or do not any more."""
        self._compiles = on
        self._graphs.release()
        self._select_step()

    @property
    def waits_for_host(self) -> bool:
        """Whether the host is asked at each step if a row is done, which no graph can hold."""
        return self._env_step is unreset_step

    @property
    def frames(self) -> Tensor:
        """Frames collected so far, as an int64 scalar on the device; counts graph replays too."""
        return self._frames_on_device

    # -- state --------------------------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seeds the env, whose episodes begin anew; returns the seed for a next one, as TorchRL does."""
        self._started = False
        return self.env.set_seed(seed, static_seed=static_seed)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Abandons running episodes: all of them, reset by the next batch, or those at ``index``, reset now.

        Args:
            index: into the batch dims of the env, as for TorchRL's collector.
            **kwargs: passed to ``env.reset``, which is then called now.
        """
        if index is None:
            self._flush_trajectory_assembly()
        if index is None and not kwargs:
            self._started = False
            return
        if index is None or not self._started:
            self._start(**kwargs)
            return
        td = TensorDict({}, self.env.batch_size, device=self.env.device)
        for key, row in zip(self._root_keys, self._root_rows[-1], strict=True):
            td.set(key, row.clone())
        mark_rows(self.env, td, index)
        with torch.no_grad():
            self._take_root(self.env.reset(td, **kwargs))
        chosen = torch.zeros(self.env.batch_size, dtype=torch.bool, device=self.device)
        chosen[index] = True
        replaced = self._traj_ids.restart(chosen.flatten())
        if self.trajs_per_batch is not None:
            self._drop_partial_trajectories([int(number) for number in replaced])

    def _discards_in_flight_trajectories(self) -> bool:
        return self.reset_at_each_iter

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Releases the captured graph and closes the env."""
        if self.closed:
            return
        self.closed = True
        self._background.stop(timeout)
        self._graphs.release()
        if close_env and not self.env.is_closed:
            self.env.close(raise_if_closed=raise_on_error)

    def state_dict(self) -> OrderedDict:
        """Env state, root of the next step, counters and trajectory ids: enough to continue bit for bit.

        All tensors are copies. The random state is torch's own (``torch.get_rng_state`` or
        ``torch.cuda.get_rng_state``): save it as well. If the state of an env is not in its ``state_dict``, its
        episodes start over after loading.
        """
        frames = int(self._frames_on_device)  # the device's count holds graph replays too
        state = OrderedDict(
            env=env_state_dict(self.env),
            root=[row.clone() for row in self._root_rows[-1]],
            traj_ids=self._traj_ids.state_dict(),
            frames=frames,
            iter=frames // self.frames_per_batch - 1,
            random_steps=self._random_steps,
            started=self._started,
        )
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Restores :meth:`state_dict`, in place: captured graphs stay valid.

        Args:
            state_dict: of a collector with the same env and number of envs.
            **kwargs: ``strict``, which TorchRL's collector takes; the state has to be complete either way.

        Raises:
            ValueError: for an incomplete state, or one of a collector with other entries, envs or transforms;
                nothing is then loaded.
        """
        arguments.refuse_unknown(kwargs.keys() - {"strict"}, ("state_dict", "strict"))
        validation.check_state(state_dict, self.state_dict(), self._root_keys)
        load_env_state_dict(self.env, state_dict["env"])
        for row, value in zip(self._root_rows[-1], state_dict["root"], strict=True):
            row.copy_(value)
        self._traj_ids.load_state_dict(state_dict["traj_ids"])
        self._frames = state_dict["frames"]
        self._frames_on_device.fill_(self._frames)
        self._iter = state_dict["iter"]
        self._random_steps = state_dict["random_steps"]
        if self.policy_version_tracker is not None and "policy_version" in state_dict:
            self.policy_version_tracker.version = state_dict["policy_version"]
        # an env whose state is not in its tensors has to start its episodes over
        self._started = state_dict["started"] and self._tensor_env and keeps_state(self.env)

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros, with the keys, shapes and marks of those that iteration yields."""
        batch = self.batch.clone().zero_()
        for key, done in self._truncation:
            for name in (key, done):
                batch.get(under_next(name))[(slice(None),) * self.env.batch_dims + (-1,)] = True
        return self._delivery.processed(batch)


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn
