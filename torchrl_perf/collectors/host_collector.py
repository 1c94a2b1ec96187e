"""Rollouts of gymnasium vector envs, which step on the CPU, into preallocated storage on the policy's device."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.data import Composite, TensorSpec
from torchrl.envs.utils import ExplorationType

from torchrl_perf.collectors import validation
from torchrl_perf.collectors.delivery import under_next
from torchrl_perf.collectors.host_faults import HostEnvError
from torchrl_perf.collectors.host_groups import HostGroup
from torchrl_perf.collectors.host_info import InfoKeys, info_leaves, learned_info_leaves
from torchrl_perf.collectors.host_memory import CarriedState, carried_specs
from torchrl_perf.collectors.host_packed import PackedRows
from torchrl_perf.collectors.host_policy import PolicyCall, policy_device
from torchrl_perf.collectors.host_rows import DirectRows, GroupRows, HostBatch
from torchrl_perf.collectors.host_spaces import INIT_KEY, HostSpecs, action_leaf, observation_leaves
from torchrl_perf.collectors.shared_policy import update_policy
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.runtime.seeds import check_seed, independent_seed

Mode = Literal["auto", "eager", "compile", "graph"]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class HostCollector(BaseCollector):
    """Collects ``[N, T]`` batches from gymnasium vector envs; the interface of :class:`DeviceCollector`.

    All three auto-reset modes of gymnasium give the same batch: real transitions only, ``("next", observation)`` is the
    true final observation where an episode ends, and the root of the following step is the first of the next episode.

    * ``SAME_STEP`` and ``DISABLED``: every env advances by one row a step.
    * ``NEXT_STEP``: the step after a done one is the env's reset and not a transition; it is not stored. An env that
      resets less often gets ahead of the others; what it has collected beyond the batch opens the next one, in order.
      The actions in those rows are an older policy's: prefer another mode for on-policy training.

    Several vector envs (groups) step at the same time, each in its own processes (``AsyncVectorEnv``) or in a thread,
    while the policy acts for another group.

    **A recurrent policy** is carried: the states that its modules ask for (``make_tensordict_primer``) begin at their
    initial values with each episode, and each step acts on what the one before left.

    Args:
        envs: a ``gymnasium.vector.VectorEnv``, or a list of them with equal spaces. N is the number of all their envs.
        policy: a TensorDict module on ``device``, or None for random actions. It is shared, not copied.
        frames_per_batch: N * T, a multiple of N.
        total_frames: after how many frames iteration ends, rounded up to a whole batch; -1 never.
        init_random_frames: the first steps take random actions until at least this many frames are collected, rounded
            up to a whole step of N frames.
        device: where batches live and the policy acts; by default where the policy's parameters are, else the CPU.
        mode: ``"eager"``; ``"compile"``: the policy is one compiled function; ``"graph"``: it is a CUDA graph;
            ``"auto"``: ``"graph"`` on CUDA, else ``"eager"``.
        postproc: called on each batch that iteration yields.
        seed: an integer from 0 on, from which the envs' seeds (``runtime.seeds.stream_seeds``) and random actions
            are derived. Two seeds share no stream. None: not reproducible. A vector env of unknown kind gets one
            number to count on from; envpool takes the seeds of its envs when it is made.
        timeout: seconds that a step or a reset of a vector env may take; then ``HostEnvError`` names the env and its
            processes are ended. ``"auto"``: 600 for envs in processes or threads of their own; for one vector env that
            steps in the loop's own thread no limit, since a limit costs a thread there. None: no limit.
        info_keys: entries of the envs' ``info`` to store, as further observations: at the root, where the policy can
            read them (an action mask), and below ``"next"``. A mapping of keys to a gymnasium space or a TorchRL spec
            of one env's value; or a list of keys, whose specs are taken from a reset at construction. A tuple is the
            key of an entry in nested dicts. An env whose info lacks the entry (its ``_key`` mask is false) gets zeros.
        clip_actions: move actions that lie outside of a Box to its nearest bound, on their way to the env alone; the
            trainers ask for it, since a normal distribution knows no bounds.
        compile: makes a compiled function of the policy's in the modes ``"eager"`` and ``"compile"``, at once or
            later; by default ``"compile"`` does so at the first step.

    Keys written: the observation (``"observation"``, or the keys of a Dict space; a Tuple's entries are
    ``("observation", "0")`` and so on), what the policy writes (``"action"`` among it), the same observation below
    ``"next"``, ``("next", "reward")`` float32, done, terminated and truncated (bool, ``[N, T, 1]``, at the root too,
    where they are false), ``"is_init"`` bool ``[N, T, 1]``, True at the first step of an episode (below ``"next"``
    always false), ``("collector", "traj_ids")`` int64 ``[N, T]``, the states of a recurrent policy before each step
    and, below ``"next"``, after it, and the entries of ``info_keys``, the final step's own (``final_info``) below
    ``"next"`` where an episode ends.

    Dtypes are those of the spaces, except float64, which becomes torch's default dtype, and uint16 and uint32, which
    become int32 and int64. Discrete values are stored from 0 on, whatever the space's ``start``, which actions get back
    on their way to the env. Actions are passed on as they are unless ``clip_actions`` is set.

    Raises:
        ValueError: at construction, for a frame count that N does not divide, groups or spaces that do not fit, an
            unknown auto-reset mode, a policy whose keys, shapes, dtypes or device do not fit, a mode that the device
            does not have.
        HostEnvError: while collecting, where an env raises; all envs are closed then.
    """

    trajs_per_batch = None
    _iterator = None
    _weight_updater = None
    _weight_sync_schemes = None

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        envs: VectorEnv | Sequence[VectorEnv],
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        init_random_frames: int = 0,
        device: torch.device | str | None = None,
        mode: Mode = "auto",
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        seed: int | None = None,
        timeout: float | Literal["auto"] | None = "auto",
        info_keys: InfoKeys = (),
        clip_actions: bool = False,
        compile: Compile | None = None,
    ) -> None:
        vector_envs = list(envs) if isinstance(envs, list | tuple) else [envs]
        self.device = policy_device(policy, device)
        self._seed = check_seed("seed", seed)
        self._carried = carried_specs(policy)
        self._make_groups(vector_envs, _checked_timeout(timeout), info_keys)
        self.num_steps = validation.steps_per_batch(frames_per_batch, self.num_envs)
        self.requested_frames_per_batch = self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.init_random_frames = init_random_frames
        self.postproc = postproc
        self.policy = policy
        self.replay_buffer = None
        self.exploration_type = ExplorationType.RANDOM
        self.closed = False
        self.clip_actions = clip_actions
        self._random_steps = -(-init_random_frames // self.num_envs)
        self._frames = 0
        self._iter = -1
        self._start_number = 0
        self._is_seeded = False
        self._started = False
        self._next_traj = 0
        self.mode = validation.resolve_mode(mode, self.device)
        self.mode = validation.fastest_mode(self.device) if self.mode == "auto" else self.mode
        self._compile = compiled if compile is None and self.mode == "compile" else compile
        self._make_rows()
        self._seed_actions()

    # -- construction -------------------------------------------------------------------------------------------------

    def _make_groups(self, vector_envs: list[VectorEnv], timeout: Any, info_keys: InfoKeys) -> None:
        if not vector_envs:
            raise ValueError(
                "envs: expected a gymnasium.vector.VectorEnv or a list of them, received an empty list. Remedy: pass "
                "at least one."
            )
        first = vector_envs[0]
        for i, each in enumerate(vector_envs):
            if not isinstance(each, VectorEnv):
                raise ValueError(
                    f"envs: expected gymnasium.vector.VectorEnv, received {type(each).__name__} as number {i}. Remedy: "
                    "gymnasium.make_vec, SyncVectorEnv or AsyncVectorEnv; TorchRL envs go to DeviceCollector."
                )
            for name in ("single_observation_space", "single_action_space"):
                if getattr(each, name) != getattr(first, name):
                    raise ValueError(
                        f"envs: expected groups with equal spaces, received {name} {getattr(first, name)} in group 0 "
                        f"and {getattr(each, name)} in group {i}. Remedy: one collector for each kind of env."
                    )
        observed = observation_leaves(first.single_observation_space)
        if isinstance(info_keys, str):
            raise ValueError(
                f"info_keys: expected a list or a mapping, received {info_keys!r}. Remedy: [{info_keys!r}]."
            )
        if info_keys and not isinstance(info_keys, Mapping):
            _, info = first.reset()
            told = learned_info_leaves(info_keys, info, observed, int(first.num_envs))
        else:
            told = info_leaves(dict(info_keys), observed)
        self._leaves = [*observed, *told]
        self._action_leaf = action_leaf(first.single_action_space)
        self.groups: list[HostGroup] = []
        offset = 0
        for i, each in enumerate(vector_envs):
            threaded = len(vector_envs) > 1
            group = HostGroup(each, i, offset, observed, threaded=threaded, timeout=timeout, info_leaves=told)
            self.groups.append(group)
            offset += self.groups[-1].num_envs
        self.num_envs = offset
        states = {key: spec for key, (spec, _) in self._carried.items()}
        self.specs = HostSpecs(self._leaves, self._action_leaf, offset, self.device, states)
        # batched again: the collector seeds them, and envpool's ``action_space`` is that of one env
        self._action_spaces = [batch_space(first.single_action_space, group.num_envs) for group in self.groups]

    def _make_rows(self) -> None:
        """Buffers, and the policy as a function of tensors."""
        outputs: dict[Any, Tensor] = {"action": self.specs.full_action_spec["action"].zero()}
        call = None
        if self.policy is not None:
            specs = cast("Any", self.specs)  # has the names of an env that the checks read
            validation.check_policy(self.policy, specs, sync_free=self.mode in ("graph", "compile"))
            root, out = validation.probe_keys(self.policy, specs)
            outputs = {key: out.get(key) for key in out.exclude("next").keys(True, True)}
            for key in self._carried:  # the state that it acted on is stored as an output, and so is the one it left
                outputs |= {key: root.get(key), under_next(key): out.get(under_next(key))}
            read = [*(leaf.key for leaf in self._leaves), INIT_KEY, *self._carried]
            call = PolicyCall(self.policy, read, list(outputs))
        if call is not None and self.mode != "graph" and self._compile is not None:
            self._act = self._compile(call.__call__)
        else:
            self._act = call
        self._store = HostBatch(self._leaves, outputs, self.num_steps, self.num_envs, self.device)
        self._memories = self._make_memories(list(outputs))
        self._rows: list[GroupRows] = [self._rows_of(group) for group in self.groups]

    def _make_memories(self, outputs: list[NestedKey]) -> dict[int, CarriedState]:
        """The states of a recurrent policy, those of each group by its number; empty for any other policy."""
        if self._act is None or not self._carried:
            return {}
        make = partial(CarriedState, self._act, outputs, self._carried, device=self.device)
        return {group.index: make(num_envs=group.num_envs) for group in self.groups}

    def _rows_of(self, group: HostGroup) -> GroupRows:
        lockstep = group.mode != "next_step"
        if self.device.type == "cpu":
            return DirectRows(self._store, group.offset, group.num_envs, lockstep=lockstep)
        graph, act = self.mode == "graph", self._memories.get(group.index, self._act)
        return PackedRows(self._store, group.offset, group.num_envs, lockstep=lockstep, graph=graph, policy=act)

    def _seed_actions(self) -> None:
        for group, space in zip(self.groups, self._action_spaces, strict=True):
            space.seed(None if self._seed is None else independent_seed(self._seed, group.index))

    # -- collection ---------------------------------------------------------------------------------------------------

    def collect(self) -> TensorDictBase:
        """Collects N * T frames into the one preallocated batch and returns it; the next call overwrites it.

        Raises:
            HostEnvError: where an env raises or dies. Its ``batch`` has the steps that were complete.
            RuntimeError: where the collector has been shut down.
        """
        validation.check_open(self.closed)
        try:
            with validation.acting(self.exploration_type):
                self._collect()
        except BaseException:  # Ctrl-C too: worker processes must not outlive the collector
            self._close(broken=True)
            raise
        self._frames += self.frames_per_batch
        self._iter += 1
        return self._store.batch

    def _collect(self) -> None:
        pairs = list(zip(self.groups, self._rows, strict=True))
        if self._started:
            self._store.shift(max(rows.ahead for rows in self._rows) - self.num_steps)
            for rows in self._rows:
                rows.shifted()
        else:
            self._start()
        pairs = [pair for pair in pairs if pair[1].slowest < self.num_steps]
        for group, rows in pairs:
            self._send(group, rows)
        while pairs:
            for group, rows in pairs:
                self._receive(group, rows)
                if rows.slowest < self.num_steps:
                    self._send(group, rows)
            pairs = [(group, rows) for group, rows in pairs if group.in_flight]

    def _start(self) -> None:
        """Begins every env's first episode."""
        for group, rows in zip(self.groups, self._rows, strict=True):
            try:
                seed = None if self._is_seeded else self._seed  # later episodes continue the envs' own random streams
                observation = group.reset(seed, start=self._start_number, total=self.num_envs)
            except Exception as error:
                raise self._failed(group, error) from error
            rows.restart(observation, self._number(np.ones(group.num_envs, dtype=bool), rows.traj_ids))
        self._started = self._is_seeded = True

    def _number(self, began: np.ndarray, current: np.ndarray) -> np.ndarray:
        """Trajectory numbers with new ones for the episodes that began, in order of time, group and env."""
        if not began.any():
            return current
        numbers = np.where(began, self._next_traj + began.cumsum() - 1, current)
        self._next_traj += int(began.sum())
        return numbers

    def _send(self, group: HostGroup, rows: GroupRows) -> None:
        """Acts for a group and starts its step."""
        memory = self._memories.get(group.index)
        act = self._act if memory is None else memory
        if act is None or self._frames + rows.slowest * self.num_envs < self._random_steps * self.num_envs:
            action = self._action_leaf.read(self._action_spaces[group.index].sample())
            rows.act_at_random(action)
            if memory is not None:
                memory.restart()
        else:
            action = rows.act(act)
        if self._action_leaf.start is not None:
            action = action + self._action_leaf.start
        space: Any = self._action_spaces[group.index]
        action = action if action.dtype == space.dtype else action.astype(space.dtype)
        if self.clip_actions and isinstance(space, Box):
            action = np.clip(action, space.low, space.high)
        try:
            group.send(action)
        except Exception as error:
            raise self._failed(group, error) from error

    def _receive(self, group: HostGroup, rows: GroupRows) -> None:
        """Waits for a group's step and stores it."""
        try:
            outcome = group.receive()
            ended = rows.store_outcome(outcome)
            observation = outcome.observation
            if group.mode == "disabled" and ended.any():
                observation = group.reset_done(ended)
        except Exception as error:
            raise self._failed(group, error) from error
        rows.store_root(observation, self._number(ended, rows.traj_ids))

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _failed(self, group: HostGroup, error: Exception) -> HostEnvError:
        """The error to raise, with every complete step; other groups finish the step that they are in."""
        group.in_flight = False
        for other, rows in zip(self.groups, self._rows, strict=True):
            if other.in_flight:
                with suppress(Exception):  # the first fault is the one to report
                    rows.store_outcome(other.receive())
        complete = min(self.num_steps, *(rows.slowest for rows in self._rows)) if self._started else 0
        return group.env_error(error, self._store.batch[:, :complete].clone())

    def _close(self, *, broken: bool) -> None:
        if self.closed:
            return
        self.closed = True
        for group, rows in zip(self.groups, self._rows, strict=True):
            rows.release()
            group.close(broken=broken)

    # -- TorchRL's collector interface --------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yields batches ``[N, T]`` that own their data (copies of the preallocated one), until ``total_frames``."""
        while self.total_frames < 0 or self._frames < self.total_frames:
            batch = self.collect().clone()
            yield batch if self.postproc is None else self.postproc(batch)

    @property
    def frames(self) -> Tensor:
        """Frames in the batches so far, as an int64 scalar on the device."""
        return torch.tensor(self._frames, device=self.device)

    @property
    def batch(self) -> TensorDictBase:
        """The preallocated batch ``[N, T]``."""
        return self._store.batch

    @property
    def action_spec(self) -> TensorSpec:
        """Spec of ``"action"``, ``[N, *shape]``."""
        return self.specs.action_spec

    @property
    def observation_spec(self) -> Composite:
        """Composite ``[N]`` of the observation keys."""
        return self.specs.observation_spec

    @property
    def waits_for_host(self) -> bool:
        """True: the envs step on the host, which no graph can hold."""
        return True

    def getattr_env(self, attr: str) -> Any:
        """A spec of the envs by the name that TorchRL's envs give it (:class:`HostSpecs`)."""
        return getattr(self.specs, attr)

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        update_policy(self.policy, policy_or_weights, model_id)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return getattr(self.policy, attr)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds envs and random actions; episodes begin anew. Returns the seed for a next collector.

        Raises:
            ValueError: for a seed below 0.
        """
        self._seed = check_seed("seed", seed)
        self._start_number = 0
        self._seed_actions()
        self._started = self._is_seeded = False
        return seed if static_seed else seed + 1

    def reset(self) -> None:
        """Abandons the running episodes and the rows collected ahead: the next batch starts with a reset.

        The envs' random streams continue, so that the same episodes do not come again.
        """
        self._started = False

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Releases captured graphs and closes the envs."""
        if close_env:
            self._close(broken=not raise_on_error)
        elif not self.closed:
            self.closed = True
            for group, rows in zip(self.groups, self._rows, strict=True):
                rows.release()
                group.release()

    def state_dict(self) -> OrderedDict:
        """Counters, the seed and the random state of random actions, as plain scalars.

        The state of the envs is not saved. After loading, all episodes start over, with seeds made from the first seed
        and the number of batches, different from those at the start of the run: two runs that load the same state
        continue alike, but not as the saved run did.
        """
        return OrderedDict(
            frames=self._frames,
            iter=self._iter,
            seed=self._seed,
            next_traj=self._next_traj,
            num_envs=self.num_envs,
            actions=[space.np_random.bit_generator.state for space in self._action_spaces],
        )

    def load_state_dict(self, state_dict: OrderedDict) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: for the state of a collector with another number of groups or envs.
        """
        missing = sorted({"frames", "iter", "next_traj", "seed", "actions"} - state_dict.keys())
        if missing:
            raise ValueError(
                f"state_dict: expected an entry {missing[0]!r}, received {sorted(map(str, state_dict))}. Remedy: what "
                "state_dict() of a HostCollector returns."
            )
        sizes = state_dict.get("num_envs")
        if sizes is not None and sizes != self.num_envs:
            raise ValueError(
                f"state_dict: expected the state of {self.num_envs} envs, received one of {sizes}. Remedy: as many "
                "envs as it was saved with, or a new run."
            )
        if len(state_dict["actions"]) != len(self.groups):
            raise ValueError(
                f"state_dict: expected {len(self.groups)} groups of envs, received {len(state_dict['actions'])}. "
                "Remedy: the vector envs that it was saved with."
            )
        self._frames, self._iter = state_dict["frames"], state_dict["iter"]
        self._next_traj, self._seed = state_dict["next_traj"], state_dict["seed"]
        for space, state in zip(self._action_spaces, state_dict["actions"], strict=True):
            space.np_random.bit_generator.state = state
        self._start_number = self._iter + 2  # 0 is the start of the run itself
        self._started = self._is_seeded = False


def _checked_timeout(timeout: Any) -> Any:
    valid = timeout is None or timeout == "auto"
    if not valid and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
        raise ValueError(
            f"timeout: expected 'auto', None or seconds above 0, received {timeout!r}. Remedy: timeout='auto'."
        )
    return timeout
