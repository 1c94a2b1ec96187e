"""Generalized advantage estimation on TensorDict batches."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch, skip_existing
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase, Transform
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode
from torchrl.objectives.utils import hold_out_net
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_perf.functional import generalized_advantage_estimate
from torchrl_perf.functional.losses.ppo import normalized_advantage
from torchrl_perf.functional.rows.missing import stand_in, steps_without_successor
from torchrl_perf.functional.rows.valid import fitted_rows
from torchrl_perf.modules.memory.module import memories_of
from torchrl_perf.runtime.self_capture import self_capturing
from torchrl_perf.runtime.upstream.transforms import holder_of
from torchrl_perf.transforms.gae_rows import (
    available,
    fitted_steps,
    read_next,
    read_pairs,
    read_terminated,
    with_own_bootstrap,
    write_entry,
)

MASK_KEY = ("collector", "mask")
"""Where TorchRL's slices and split trajectories mark padding."""
NOT_IN_AN_ENV = (
    "GAETransform: expected a whole [*batch, T] batch, received one step from an environment. Remedy: call it on the "
    "collected batch, or give it to a replay buffer, a trainer or a loss"
)
LEAST_STD = 1e-4  # of ``average_gae``, as in TorchRL's GAE


@dataclass(frozen=True)
class GAEKeys:
    """Keys of :class:`GAETransform`. Reward and flags are read, and V(s') is written, under ``"next"``.

    ``sample_log_prob`` is not read; losses pass it to any estimator.
    """

    advantage: NestedKey = "advantage"
    value_target: NestedKey = "value_target"
    value: NestedKey = "state_value"
    reward: NestedKey = "reward"
    done: NestedKey = "done"
    terminated: NestedKey = "terminated"
    steps_to_next_obs: NestedKey = "steps_to_next_obs"
    sample_log_prob: NestedKey = "action_log_prob"


class _Signals(NamedTuple):
    """Inputs of the estimate beside the values, unchanged from the batch."""

    gamma: Tensor
    reward: Tensor
    done: Tensor
    terminated: Tensor
    ended: Tensor
    """Where the next observation may be missing."""


class _Parameters(NamedTuple):
    """Parameters of the value network for V(s) and V(s'), or None for its own."""

    root: TensorDictBase | None
    following: TensorDictBase | None


# Two bases of TorchRL: replay buffers require a Transform, make_value_estimator of a loss a ValueEstimatorBase.
class GAETransform(ValueEstimatorBase, Transform):
    """GAE (arXiv:1506.02438) of a ``[*batch, T]`` batch without host waits, usable in four places.

    - Called on a batch: ``batch = gae(batch)`` writes into the batch and returns it. ``params`` and ``target_params``
      are parameters of the value network for V(s) and V(s'), ``time_dim`` overrides that of the constructor. With
      keywords it accepts tensors, as TorchRL's ``GAE`` does.
    - In a replay buffer, ``ReplayBuffer(..., transform=gae)``: runs when a batch is extended, before it is flattened;
      samples pass unchanged.
    - As ``gae=`` of TorchRL's ``PPOTrainer``.
    - As the value estimator of a loss, TorchRL's or ours: ``loss.make_value_estimator(gae)``.

    The value network runs once, on the rows of the root and of the true next observations together, without gradient:
    a truncated step bootstraps from its true final observation. A recurrent network (``"is_init"`` among its
    ``in_keys``, or an ``LSTMModule`` or ``GRUModule`` inside) runs on the ``[*batch, T]`` sequence instead, for which
    time has to be the last batch dimension. With the package's own modules (``DeviceGRU``, ...) V(s') is one step of
    the network from the state after step t, before any reset: what it would be with the whole history of the episode.
    TorchRL's modules keep no such states: they run on the sequence of next observations, which lacks the first one.

    **A final observation that is missing** is NaN in TorchRL's convention (``_torchrl_native_autoreset``: envs that
    reset themselves). As in TorchRL's ``GAE``, the step's own observation stands in for it: a truncated step
    bootstraps from V(s_t), and a terminated one does not bootstrap. This applies where an episode ends and at the last
    step of the batch; a NaN anywhere else shows in the advantages. (V(s_t) is used where V(s') is NaN, which costs
    nothing; for a recurrent network, and with ``differentiable``, the observation itself is replaced.)

    Reads (at index t):
        the value network's ``in_keys`` and ``("next", key)`` for each (a key that "next" lacks, such as a goal, is
        taken from the root; "next" has to have one of them)
        ``("next", "reward")``: ``[*batch, T, *F]`` or without the dimensions that agents add; F may be C components of
            the reward, each with its own value and advantage, see :class:`ComponentAdvantage`
        ``("next", "done")``: bool, likewise
        ``("next", "terminated")``: bool, likewise; where it is missing, ``done & ~("next", "truncated")``
        ``"steps_to_next_obs"``: where present, the discount is ``gamma ** steps`` (n-step rewards)

    Writes:
        ``"state_value"``, ``("next", "state_value")``: ``[*batch, T, *F]``, the network's outputs
        ``"advantage"``, ``"value_target"``: ``[*batch, T, *F]``, at least float32

    Args:
        gamma: discount. Held as a float64 buffer, part of the ``state_dict``, as is ``lmbda``.
        lmbda: decay of the trace.
        value_network: module that writes the value key; not registered as a submodule. None: the values are read from
            the batch, ``("next", "state_value")`` included.
        average_gae: standardise the advantage over the rows of the batch that count; equal advantages (or a single one)
            become 0.
        chunk_size: most rows (steps) of one network call, for networks whose activations for the whole batch do not
            fit; None for no limit. A recurrent network gets whole sequences, at least one.
        time_dim: dimension of time among the batch dimensions; None: the one named "time", else the last of at least
            two.
        keys: names other than the defaults, as in :meth:`set_keys`.
        valid_key: bool ``[*batch, T]`` or with more dims, True for the rows that ``average_gae`` counts; rows of
            padding by ``("collector", "mask")`` never count.
        auto_reset_env: the last "next" observation of an episode is the next episode's: truncated steps bootstrap from
            V(s_t).
        differentiable: let gradients pass from advantages and targets to rewards and observations; V(s') and the
            parameters of the network get none, as in TorchRL.
        skip_existing: take values that the batch has instead of computing them; None: as
            ``tensordict.nn.skip_existing()`` says.
        device: of the buffers; by default that of the network, and then of the rewards.
        value_chunk_size: TorchRL's form of ``chunk_size``, in elements of the dim ``value_chunk_dim``.
        num_chunks: TorchRL's other form, the number of calls.
        num_chunk: as ``num_chunks``.
        value_chunk_dim: dim of the batch that those two count along.
        vectorized: TorchRL's choice between two programs of the same result; here there is one, always vectorised.
        deactivate_vmap: likewise; no vmap is used.
        shifted: False. TorchRL's shifted call drops rows to save a network call; here there is only one anyway.
        shifted_budget: 1.
        group_key: None. Groups are found by ``unique``, a host wait.
        advantage_key: None, as in TorchRL: ``set_keys(advantage=...)``.
        value_target_key: likewise.
        value_key: likewise.

    Raises:
        ValueError: if a chunk is below 1, a number is outside of [0, 1], or an argument is one of those refused.
    """

    default_keys = GAEKeys
    _AcceptedKeys = GAEKeys

    def __init__(  # noqa: PLR0913  TorchRL's arguments of GAE
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_gae: bool = False,
        chunk_size: int | None = None,
        time_dim: int | None = None,
        keys: dict[str, NestedKey] | None = None,
        valid_key: NestedKey | None = None,
        auto_reset_env: bool = False,
        differentiable: bool = False,
        skip_existing: bool | None = None,
        device: torch.device | str | None = None,
        value_chunk_size: int | None = None,
        num_chunks: int | None = None,
        num_chunk: int | None = None,
        value_chunk_dim: int = 0,
        vectorized: bool | None = None,
        deactivate_vmap: bool = False,
        shifted: bool = False,
        shifted_budget: int = 1,
        group_key: NestedKey | None = None,
        advantage_key: NestedKey | None = None,
        value_target_key: NestedKey | None = None,
        value_key: NestedKey | None = None,
    ) -> None:
        _refuse(shifted=shifted, shifted_budget=shifted_budget, group_key=group_key)
        _check_numbers(chunk_size, value_chunk_size or num_chunks or num_chunk, gamma=gamma, lmbda=lmbda)
        super().__init__(
            value_network=cast("Any", value_network),
            differentiable=differentiable,
            skip_existing=skip_existing,
            advantage_key=cast("Any", advantage_key),
            value_target_key=cast("Any", value_target_key),
            value_key=cast("Any", value_key),
            deactivate_vmap=deactivate_vmap,
            value_chunk_size=value_chunk_size,
            num_chunks=num_chunks,
            num_chunk=num_chunk,
            value_chunk_dim=value_chunk_dim,
        )
        if device is None:
            parameters = () if value_network is None else value_network.parameters()
            device = next((parameter.device for parameter in parameters), None)
        # float64, so that 0.99 is exactly the number of the script; the estimate casts it to its compute dtype.
        self.register_buffer("gamma", torch.as_tensor(gamma, dtype=torch.float64, device=device).clone())
        self.register_buffer("lmbda", torch.as_tensor(lmbda, dtype=torch.float64, device=device).clone())
        self.average_gae = average_gae
        self.chunk_size = chunk_size
        self.time_dim = time_dim
        self.valid_key = None if valid_key is None else unravel_key(valid_key)
        self.auto_reset_env = auto_reset_env
        self.vectorized = vectorized
        self.set_keys(**(keys or {}))

    def set_keys(self, **keys: NestedKey) -> None:
        """Rename keys, each a field of :class:`GAEKeys`.

        Raises:
            KeyError: for any other name, and for a value key that the value network does not write.
        """
        current = asdict(self._tensor_keys or GAEKeys())
        unknown = sorted(set(keys) - set(current))
        if unknown:
            raise KeyError(f"expected keys among {sorted(current)}, received {unknown}. Remedy: keys among these")
        renamed = {name: _unravelled(key) for name, key in keys.items()}
        network, value = self.value_network, renamed.get("value")
        if value is not None and value not in getattr(network, "out_keys", [value]):
            raise KeyError(
                f"value: expected one of {cast('Any', network).out_keys}, which the value network writes, received "
                f"{value!r} instead of {current['value']!r}. Remedy: out_keys of the network, or this key"
            )
        self._tensor_keys = GAEKeys(**(current | renamed))

    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write the estimate into a ``[*batch, T]`` batch and return it; a replay buffer's samples pass untouched."""
        if self._is_in_replay_buffer():
            return tensordict
        if params is None and target_params is None and time_dim is None:
            return self._estimate_own(tensordict)
        return self._estimate(tensordict, _of(params, target_params), time_dim)

    @self_capturing
    def _estimate_own(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._estimate(tensordict, _Parameters(None, None), None)

    def recorded_entries(self, leaves: dict[NestedKey, Tensor]) -> dict[NestedKey, Tensor]:
        """What a recording holds of a batch: what an estimate may read."""
        keys, network = self.tensor_keys, self.value_network
        states = [keys.value, *([] if network is None else network.in_keys)]
        following = [keys.reward, keys.done, keys.terminated, *states]
        flags = [keys.steps_to_next_obs, MASK_KEY, *([] if self.valid_key is None else [self.valid_key])]
        read = {unravel_key(key) for key in [*states, *flags]} | {unravel_key(("next", key)) for key in following}
        return {key: leaf for key, leaf in leaves.items() if key in read or key[-1] == "truncated"}

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
    ) -> Tensor:
        """The value target alone, ``[*batch, T, *F]``; nothing is written.

        Args:
            tensordict: ``[*batch, T]``.
            params: of the value network, for V(s).
            target_params: of the value network, for V(s').
            next_value: V(s') in place of the network's.
            time_dim: dimension of time.
        """
        parameters = _of(params, target_params)
        return self._solve(tensordict, parameters, time_dim, next_value)[3]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # Called by a replay buffer when it is extended, and by an environment before each step.
        if isinstance(self._owner(), EnvBase):
            return self._call(tensordict)
        return self._estimate(tensordict, _Parameters(None, None), None)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError(NOT_IN_AN_ENV)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Refuses an environment, as :meth:`_call` does."""
        raise RuntimeError(NOT_IN_AN_ENV)

    def _owner(self) -> Transform | EnvBase | None:
        """The environment or the outermost chain that holds this transform (``container`` knows environments only)."""
        owner: Transform | EnvBase | None = None
        holder: Any = self
        while isinstance(holder, Transform):
            holder = holder_of(holder)
            owner = owner if holder is None else holder
        return owner

    def _is_in_replay_buffer(self) -> bool:
        """A replay buffer puts its transforms into a chain and into eval mode; nothing else does both."""
        return not self.training and isinstance(self._owner(), Transform)

    def _estimate(self, td: TensorDictBase, params: _Parameters, time_dim: int | None) -> TensorDictBase:
        keys = self.tensor_keys
        value, next_value, advantage, target = self._solve(td, params, time_dim, None)
        if self.average_gae:
            advantage = normalized_advantage(advantage, self._counting(td), least_std=LEAST_STD)
        write_entry(td, keys.value, value)
        write_entry(td, unravel_key(("next", keys.value)), next_value)
        write_entry(td, keys.advantage, advantage)
        write_entry(td, keys.value_target, target)
        return td

    def _solve(
        self, td: TensorDictBase, params: _Parameters, time_dim: int | None, next_value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """V(s), V(s'), advantage and value target, ``[*batch, T, *F]``; the batch is not written."""
        with torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            dim = self._resolve_time_dim(td, time_dim)
            signals = self._signals(td, dim)
            value, computed = self._values(td, signals, dim, params)
            next_value = computed if next_value is None else next_value
            next_value = stand_in(next_value.detach(), value.detach(), signals.ended, td.batch_dims)
            gamma, reward, done, terminated, _ = signals
            if self.auto_reset_env:
                reward = with_own_bootstrap(gamma, reward, done & ~terminated, value)
                terminated = done
            advantage, target = generalized_advantage_estimate(
                gamma, self.lmbda, value, next_value, reward, done, terminated, time_dim=dim
            )
        return value, next_value, advantage, target

    def _signals(self, td: TensorDictBase, dim: int) -> _Signals:
        keys = self.tensor_keys
        reward, done = read_next(td, keys.reward), read_next(td, keys.done)
        terminated = read_terminated(td, keys.terminated, done)
        if self.gamma.device != reward.device:
            self.gamma, self.lmbda = self.gamma.to(reward.device), self.lmbda.to(reward.device)
        steps = td.get(keys.steps_to_next_obs, None)
        gamma = self.gamma if steps is None else self.gamma ** fitted_steps(steps, reward, td.batch_dims)
        ended = steps_without_successor(done | terminated, dim)
        return _Signals(gamma, reward, done, terminated, ended)

    def _counting(self, td: TensorDictBase) -> Tensor | None:
        """The rows over which ``average_gae`` standardises, or None for all."""
        valid = td.get(MASK_KEY, None)
        valid = None if valid is None else fitted_rows(valid, td.batch_size, MASK_KEY)
        if self.valid_key is None:
            return valid
        own = td.get(self.valid_key, None)
        if own is None:
            raise KeyError(f"expected {self.valid_key!r} in the batch, received {available(td)}. Remedy: keep it there")
        own = own.squeeze(-1) if own.ndim > td.batch_dims else own
        if valid is None:
            return own
        return own & valid.reshape(*valid.shape, *(1,) * (own.ndim - valid.ndim))

    def _resolve_time_dim(self, td: TensorDictBase, time_dim: int | None = None) -> int:
        """Dimension of time among the batch dimensions, from the front."""
        dim = self.time_dim if time_dim is None else time_dim
        if dim is None and "time" in td.names:
            dim = td.names.index("time")
        elif dim is None and td.batch_dims >= 2:
            dim = td.batch_dims - 1
        if dim is None or not -td.batch_dims <= dim < td.batch_dims:
            raise ValueError(
                'expected a [*batch, T] batch, with a batch dimension named "time" or at least two of them, '
                f"received batch size {list(td.batch_size)}, names {td.names}, time_dim={dim}. Remedy: a flattened "
                "batch mixes trajectories; estimate advantages before flattening it, or name the dimension of a "
                "single trajectory"
            )
        return dim % td.batch_dims

    def _chunk(self, td: TensorDictBase) -> int | None:
        """Most rows of one network call, from whichever argument sets it."""
        if self.value_chunk_size is None and self.num_chunks is None:
            return self.chunk_size
        dim = self._resolve_value_chunk_dim(td.batch_dims)
        size = td.batch_size[dim]
        elements = self.value_chunk_size or -(-size // cast("int", self.num_chunks))
        return max(1, elements) * (td.batch_size.numel() // max(1, size))

    def _values(self, td: TensorDictBase, signals: _Signals, dim: int, params: _Parameters) -> tuple[Tensor, Tensor]:
        """V(s) and V(s'), ``[*batch, T, *F]``."""
        network: TensorDictModuleBase | None = self.value_network
        key = self.tensor_keys.value
        value, next_value = td.get(key, None), td.get(("next", key), None)
        if network is None:
            if value is None or next_value is None:
                pair = [key, ("next", key)]
                raise KeyError(f"expected {pair}, received {available(td)}. Remedy: pass a value_network")
            return value, next_value
        if key not in network.out_keys:
            raise KeyError(f"expected a network that writes {key!r}, received {network.out_keys}. Remedy: set_keys")
        skips = skip_existing() if self.skip_existing is None else self.skip_existing
        if skips and value is not None and next_value is not None:
            return value, next_value
        own = hold_out_net(network) if self.differentiable and params.root is None else contextlib.nullcontext()
        with own:
            if _is_recurrent(network):
                solve = self._remembered_values if memories_of(network) else self._sequence_values
                computed = solve(network, td, dim, signals.ended, params)
            else:
                computed = self._row_values(network, td, signals, dim, params)
        if not skips:
            return computed
        return computed[0] if value is None else value, computed[1] if next_value is None else next_value

    def _row_values(
        self,
        network: TensorDictModuleBase,
        td: TensorDictBase,
        signals: _Signals,
        dim: int,
        params: _Parameters,
    ) -> tuple[Tensor, Tensor]:
        """Both values from one call on flat rows, in the order of memory so that flattening copies nothing."""
        ndim = td.batch_dims
        others = [d for d in range(ndim) if d != dim]
        strides = signals.reward.stride()
        is_time_major = all(strides[dim] >= strides[d] for d in others)
        order = [dim, *others] if is_time_major else list(range(ndim))
        inverse = sorted(range(ndim), key=order.__getitem__)

        def rows(tensor: Tensor) -> Tensor:
            return tensor.permute(*order, *range(ndim, tensor.ndim)).flatten(0, ndim - 1)

        def batch(values: Tensor) -> Tensor:
            values = values.unflatten(0, [td.batch_size[d] for d in order])
            return values.permute(*inverse, *range(ndim, values.ndim))

        # V(s) stands in for a V(s') of the same parameters; else, and where a gradient passes, the observation has to
        replaces = self.differentiable or params.root is not params.following
        inputs = read_pairs(td, network.in_keys, signals.ended if replaces else None)
        roots = {key: rows(root) for key, (root, _) in inputs.items()}
        nexts = {key: rows(following) for key, (_, following) in inputs.items()}
        num_rows, chunk_size = td.batch_size.numel(), self._chunk(td)
        if params.root is params.following and (chunk_size is None or chunk_size >= 2 * num_rows):
            both = {key: torch.cat([roots[key], nexts[key]]) for key in roots}
            with _holding(network, params.root):
                value, next_value = self._run(network, both, 2 * num_rows).split(num_rows)
        else:
            # Chunks of the root rows, then of the next ones: the observations need not be copied together.
            with _holding(network, params.root):
                value = self._run_chunks(network, roots, num_rows, chunk_size)
            with _holding(network, params.following):
                next_value = self._run_chunks(network, nexts, num_rows, chunk_size)
        return batch(value), batch(next_value)

    def _run(self, network: TensorDictModuleBase, rows: dict[NestedKey, Tensor], num_rows: int) -> Tensor:
        inputs = TensorDict({}, batch_size=[num_rows])
        for key, tensor in rows.items():
            inputs.set(key, tensor)
        return network(inputs).get(self.tensor_keys.value)

    def _run_chunks(
        self, network: TensorDictModuleBase, rows: dict[NestedKey, Tensor], num_rows: int, chunk_size: int | None
    ) -> Tensor:
        size = chunk_size or num_rows
        spans = [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        return torch.cat([self._run(network, {k: v[a:b] for k, v in rows.items()}, b - a) for a, b in spans])

    def _sequence_values(
        self, network: TensorDictModuleBase, td: TensorDictBase, dim: int, ended: Tensor, params: _Parameters
    ) -> tuple[Tensor, Tensor]:
        """V(s) and V(s') of a recurrent network, one call on each sequence."""
        root, following = self._sequences(network, td, dim, ended)
        if "is_init" in root.keys():
            # The next observation of an episode's first step does not continue the episode before it either.
            following.set("is_init", following.get("is_init") | root.get("is_init"))
        call = self._sequence_caller(network, td)
        with _holding(network, params.root):
            value = call(root)
        with _holding(network, params.following):
            return value, call(following)

    def _sequences(
        self, network: TensorDictModuleBase, td: TensorDictBase, dim: int, ended: Tensor
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """What a recurrent network reads of the root and of the next observations, ``[*batch, T]`` each."""
        if dim != td.batch_dims - 1:
            raise ValueError(
                "expected time to be the last batch dimension for a recurrent value network, received dimension "
                f"{dim} of batch size {list(td.batch_size)}. Remedy: transpose the batch"
            )
        root = td.select(*network.in_keys, strict=False)
        following = td.get("next").select(*network.in_keys, strict=False)
        for key in network.in_keys:
            own, after = root.get(key, None), following.get(key, None)
            if own is not None:
                following.set(key, own if after is None else stand_in(after, own, ended, td.batch_dims))
        return root, following

    def _remembered_values(
        self, network: TensorDictModuleBase, td: TensorDictBase, dim: int, ended: Tensor, params: _Parameters
    ) -> tuple[Tensor, Tensor]:
        """V(s) of a sequence, and V(s') of one step from each of the states that the sequence leaves."""
        root, following = self._sequences(network, td, dim, ended)
        modules, parts = memories_of(network), self._parts_of(td)
        values, nexts = [], []
        for now, after in zip(_split(root, parts), _split(following, parts), strict=True):
            with _holding(network, params.root), set_recurrent_mode(True):
                known = network(now)
            values.append(known.get(self.tensor_keys.value))
            for module in modules:
                # V(s') is of the same episode, whatever begins after it
                after.set(module.in_keys[-1], torch.zeros_like(now.get(module.in_keys[-1])))
                for key in module.state_keys:
                    after.set(key, known.get(unravel_key(("next", key))))
            with _holding(network, params.following), set_recurrent_mode(False):
                nexts.append(network(after).get(self.tensor_keys.value))
        return torch.cat(values), torch.cat(nexts)

    def _parts_of(self, td: TensorDictBase) -> int | None:
        """How many sequences one call takes; None for all."""
        chunk_size = self._chunk(td)
        if chunk_size is None or td.batch_dims < 2:
            return None
        return max(1, chunk_size * td.batch_size[0] // td.batch_size.numel())

    def _sequence_caller(self, network: TensorDictModuleBase, td: TensorDictBase) -> Callable[[TensorDictBase], Tensor]:
        sequences = self._parts_of(td)

        def call(data: TensorDictBase) -> Tensor:
            with set_recurrent_mode(True):
                return torch.cat([network(part).get(self.tensor_keys.value) for part in _split(data, sequences)])

        return call


def _refuse(*, shifted: bool, shifted_budget: int, group_key: NestedKey | None) -> None:
    if shifted or shifted_budget != 1 or group_key is not None:
        raise ValueError(
            f"expected shifted=False, shifted_budget=1 and group_key=None, received {shifted}, {shifted_budget}, "
            f"{group_key!r}. Remedy: leave them out, since the network is called once here without giving up rows; "
            "torchrl's GAE for statistics of groups, which wait for the host."
        )


def _check_numbers(chunk_size: int | None, other: int | None, **numbers: float | Tensor) -> None:
    if chunk_size is not None and (chunk_size < 1 or other):
        raise ValueError(
            f"expected chunk_size of at least 1 row or None, received {chunk_size}, and none of value_chunk_size, "
            "num_chunks and num_chunk beside it. Remedy: one of them."
        )
    for name, number in numbers.items():
        if not isinstance(number, Tensor) and not 0 <= number <= 1:
            raise ValueError(f"expected {name} between 0 and 1, received {number}. Remedy: a number such as 0.99")


def _split(data: TensorDictBase, sequences: int | None) -> Sequence[TensorDictBase]:
    """Parts of so many sequences; all in one for None."""
    return (data,) if sequences is None else data.split(sequences, 0)


def _is_recurrent(network: TensorDictModuleBase) -> bool:
    has_flag = any(key == "is_init" or (isinstance(key, tuple) and key[-1] == "is_init") for key in network.in_keys)
    return has_flag or any(isinstance(module, LSTMModule | GRUModule) for module in network.modules())


def _of(params: TensorDictBase | None, target_params: TensorDictBase | None) -> _Parameters:
    """Parameters for both values, without a gradient; without ``target_params``, V(s') uses those of V(s).

    Raises:
        ValueError: for target parameters alone.
    """
    if params is None:
        if target_params is not None:
            raise ValueError("expected params beside target_params, received None. Remedy: give both.")
        return _Parameters(None, None)
    root = params.detach()
    return _Parameters(root, root if target_params is None else target_params.detach())


def _holding(network: TensorDictModuleBase, params: TensorDictBase | None) -> contextlib.AbstractContextManager[Any]:
    """Within it, the network has these parameters, or its own for None."""
    if params is None:
        return contextlib.nullcontext()
    return cast("Any", params).to_module(network, preserve_module_state=False)


def _unravelled(key: Any) -> Any:
    return [unravel_key(one) for one in key] if isinstance(key, list) else unravel_key(key)
