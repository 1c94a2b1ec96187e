"""Generalized advantage estimation on TensorDict batches."""

import contextlib
from collections.abc import Callable
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

MASK_KEY = ("collector", "mask")
"""Where TorchRL's slices and split trajectories mark padding."""
NOT_IN_AN_ENV = (
    "GAETransform needs a whole [*batch, T] batch, and an environment passes one step at a time: call it on the "
    "collected batch, or give it to a replay buffer, a trainer or a loss"
)
LEAST_STD = 1e-4  # of ``average_gae``, as in TorchRL's GAE


@dataclass(frozen=True)
class GAEKeys:
    """Keys of :class:`GAETransform`. Reward and flags are read, and V(s') is written, under ``"next"``.

    ``sample_log_prob`` is not read; losses pass it on to whatever estimator they have.
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
    """What the estimate reads beside the values, each as the batch has it."""

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


# Two bases of TorchRL: a replay buffer asks for a Transform, make_value_estimator of a loss for a ValueEstimatorBase.
class GAETransform(ValueEstimatorBase, Transform):
    """GAE (arXiv:1506.02438) of a ``[*batch, T]`` batch without host waits, in any of four places.

    - Called on a batch: ``batch = gae(batch)`` writes into the batch and returns it. ``params`` and ``target_params``
      are parameters of the value network for V(s) and V(s'), ``time_dim`` overrides that of the constructor; by
      keywords it takes tensors, as TorchRL's ``GAE`` does.
    - In a replay buffer, ``ReplayBuffer(..., transform=gae)``: runs when a batch is extended, on the batch as it is
      before it is flattened; sampling passes through it untouched.
    - As ``gae=`` of TorchRL's ``PPOTrainer``.
    - As the value estimator of a loss, TorchRL's or ours: ``loss.make_value_estimator(gae)``.

    The value network runs once, on the rows of the root and of the true next observations together, without gradient:
    a truncated step bootstraps from its true final observation. A recurrent network (``"is_init"`` among its
    ``in_keys``, or an ``LSTMModule`` or ``GRUModule`` inside) runs on the two ``[*batch, T]`` sequences instead, each
    step that begins an episode marked in both; time has to be the last batch dimension for it.

    **A final observation that is missing** is NaN in TorchRL's convention (``_torchrl_native_autoreset``: envs that
    reset themselves). As in TorchRL's ``GAE``, the step's own observation stands in for it: a truncated step
    bootstraps from V(s_t), a terminated one from nothing. It does so where an episode ends and at the last step of the
    batch; a NaN anywhere else stays and is seen in the advantages. (V(s_t) is chosen where V(s') is NaN, which costs
    nothing; a recurrent network, and ``differentiable``, need the observation itself to be replaced.)

    Reads (at index t):
        the value network's ``in_keys`` and ``("next", key)`` for each (a key that "next" lacks, such as a goal, is
        taken from the root; "next" has to have one of them)
        ``("next", "reward")``: ``[*batch, T, *F]`` or without the dimensions that agents add; F may be C components of
            the reward, each with a value and an advantage of its own, see :class:`ComponentAdvantage`
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
        auto_reset_env: the last "next" observation of an episode is not its own: bootstrap truncated steps from V(s_t).
        differentiable: let gradients pass from advantages and targets to rewards and observations; V(s') and the
            parameters of the network get none, as in TorchRL.
        skip_existing: take values that the batch has instead of computing them; None: as
            ``tensordict.nn.skip_existing()`` says.
        device: of the buffers; by default that of the network, and then of the rewards.
        value_chunk_size: TorchRL's way to say ``chunk_size``, in elements of the dim ``value_chunk_dim``.
        num_chunks: likewise, the number of calls.
        num_chunk: the same.
        value_chunk_dim: dim of the batch that those two count along.
        vectorized: TorchRL's choice between two programs of the same result; here there is one, always vectorised.
        deactivate_vmap: likewise; no vmap is used.
        shifted: False. TorchRL's shifted call gives up rows for what is one network call here anyway.
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
        # float64, so that 0.99 means the same here as in a script; the estimate casts it to what it computes in.
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
            raise KeyError(f"expected keys among {sorted(current)}, received {unknown}")
        renamed = {name: _unravelled(key) for name, key in keys.items()}
        network, value = self.value_network, renamed.get("value")
        if value is not None and value not in getattr(network, "out_keys", [value]):
            raise KeyError(
                f"value: expected one of {cast('Any', network).out_keys}, which the value network writes, received "
                f"{value!r} instead of {current['value']!r}"
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
        return self._estimate(tensordict, _of(params, target_params), time_dim)

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
            next_value: V(s') instead of what the network says.
            time_dim: dimension of time.
        """
        parameters = _of(params, target_params)
        return self._solve(tensordict, parameters, time_dim, next_value)[3]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # What a replay buffer calls when it is extended, and an environment before each step.
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
            reference = holder.__dict__["_container"]
            holder = None if reference is None else reference()
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
        _write(td, keys.value, value)
        _write(td, unravel_key(("next", keys.value)), next_value)
        _write(td, keys.advantage, advantage)
        _write(td, keys.value_target, target)
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
                reward = _with_own_bootstrap(gamma, reward, done & ~terminated, value)
                terminated = done
            advantage, target = generalized_advantage_estimate(
                gamma, self.lmbda, value, next_value, reward, done, terminated, time_dim=dim
            )
        return value, next_value, advantage, target

    def _signals(self, td: TensorDictBase, dim: int) -> _Signals:
        keys = self.tensor_keys
        reward, done = _read_next(td, keys.reward), _read_next(td, keys.done)
        terminated = _read_terminated(td, keys.terminated, done)
        if self.gamma.device != reward.device:
            self.gamma, self.lmbda = self.gamma.to(reward.device), self.lmbda.to(reward.device)
        steps = td.get(keys.steps_to_next_obs, None)
        gamma = self.gamma if steps is None else self.gamma ** _fitted(steps, reward, td.batch_dims)
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
            raise KeyError(f"expected {self.valid_key!r}, the valid_key, in the batch, received {_available(td)}")
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
                'expected a [*batch, T] batch, with a batch dimension named "time" or at least two of them, received '
                f"batch size {list(td.batch_size)}, names {td.names}, time_dim={dim}: a flattened batch mixes "
                "trajectories; estimate advantages before flattening it, or name the dimension of a single trajectory"
            )
        return dim % td.batch_dims

    def _chunk(self, td: TensorDictBase) -> int | None:
        """Most rows of one network call, however that was asked for."""
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
                raise KeyError(f"expected {key!r} and {('next', key)!r}, without a value network, in {_available(td)}")
            return value, next_value
        if key not in network.out_keys:
            raise KeyError(f"expected a value network that writes {key!r}, received {network.out_keys}; see set_keys")
        skips = skip_existing() if self.skip_existing is None else self.skip_existing
        if skips and value is not None and next_value is not None:
            return value, next_value
        own = hold_out_net(network) if self.differentiable and params.root is None else contextlib.nullcontext()
        with own:
            if _is_recurrent(network):
                computed = self._sequence_values(network, td, dim, signals.ended, params)
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
        inputs = _read_pairs(td, network.in_keys, signals.ended if replaces else None)
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
        if dim != td.batch_dims - 1:
            raise ValueError(
                f"expected time to be the last batch dimension for a recurrent value network, received dimension {dim} "
                f"of batch size {list(td.batch_size)}; transpose the batch"
            )
        root = td.select(*network.in_keys, strict=False)
        following = td.get("next").select(*network.in_keys, strict=False)
        for key in network.in_keys:
            own, after = root.get(key, None), following.get(key, None)
            if own is not None:
                following.set(key, own if after is None else stand_in(after, own, ended, td.batch_dims))
        if "is_init" in root.keys():
            # The next observation of an episode's first step does not continue the episode before it either.
            following.set("is_init", following.get("is_init") | root.get("is_init"))
        call = self._sequence_caller(network, td)
        with _holding(network, params.root):
            value = call(root)
        with _holding(network, params.following):
            return value, call(following)

    def _sequence_caller(self, network: TensorDictModuleBase, td: TensorDictBase) -> Callable[[TensorDictBase], Tensor]:
        sequences = None
        chunk_size = self._chunk(td)
        if chunk_size is not None and td.batch_dims > 1:
            sequences = max(1, chunk_size * td.batch_size[0] // td.batch_size.numel())

        def call(data: TensorDictBase) -> Tensor:
            parts = (data,) if sequences is None else data.split(sequences, 0)
            with set_recurrent_mode(True):
                return torch.cat([network(part).get(self.tensor_keys.value) for part in parts])

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
            raise ValueError(f"expected {name} between 0 and 1, received {number}")


def _is_recurrent(network: TensorDictModuleBase) -> bool:
    has_flag = any(key == "is_init" or (isinstance(key, tuple) and key[-1] == "is_init") for key in network.in_keys)
    return has_flag or any(isinstance(module, LSTMModule | GRUModule) for module in network.modules())


def _available(td: TensorDictBase) -> list[Any]:
    return sorted(td.keys(include_nested=True, leaves_only=True), key=str)


def _read_next(td: TensorDictBase, key: NestedKey) -> Tensor:
    tensor = td.get(("next", key), None)
    if tensor is None:
        raise KeyError(f"expected {('next', key)!r} in the batch, received {_available(td)}; name it with set_keys")
    return tensor


def _read_pairs(
    td: TensorDictBase, keys: list[NestedKey], ended: Tensor | None
) -> dict[NestedKey, tuple[Tensor, Tensor]]:
    """What the network reads of the steps, and of the next ones, with a stand-in where ``ended`` says so."""
    pairs = {}
    for key in keys:
        root, following = td.get(key, None), td.get(("next", key), None)
        if root is None:
            raise KeyError(f"expected {key!r}, an input of the value network, in the batch, received {_available(td)}")
        if following is not None and ended is not None:
            following = stand_in(following, root, ended, td.batch_dims)
        pairs[key] = root, root if following is None else following
    if keys and all(root is following for root, following in pairs.values()):
        raise KeyError(
            f"expected one of {[('next', key) for key in keys]}, inputs of the value network at the next step, in the "
            f"batch, received {_available(td)}; without them the value of the next step would be that of this one"
        )
    return pairs


def _of(params: TensorDictBase | None, target_params: TensorDictBase | None) -> _Parameters:
    """Parameters for both values, without a gradient; those of V(s) serve V(s') where they are the only ones.

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


def _with_own_bootstrap(gamma: Tensor, reward: Tensor, truncated: Tensor, value: Tensor) -> Tensor:
    """The reward, and at truncated steps the discounted value of the step's own observation: ``value``'s shape."""
    reward, truncated = (
        tensor.reshape(*tensor.shape[:-1], *(1,) * (value.ndim - tensor.ndim), tensor.shape[-1])
        for tensor in (reward, truncated)
    )
    return torch.where(truncated, reward + gamma.to(value.dtype) * value, reward)


def _unravelled(key: Any) -> Any:
    return [unravel_key(one) for one in key] if isinstance(key, list) else unravel_key(key)


def _read_terminated(td: TensorDictBase, key: NestedKey, done: Tensor) -> Tensor:
    """The terminated flag; where it is missing, what is done and not truncated."""
    terminated = td.get(("next", key), None)
    if terminated is not None:
        return terminated
    sibling = (*key[:-1], "truncated") if isinstance(key, tuple) else "truncated"
    truncated = td.get(("next", sibling), None)
    if truncated is None:
        raise KeyError(
            f"expected {('next', key)!r} or {('next', sibling)!r} in the batch, received {_available(td)}: done alone "
            "does not tell a terminated step, which has no future value, from a truncated one, which has"
        )
    return done & ~truncated


def _fitted(steps: Tensor, reward: Tensor, batch_dims: int) -> Tensor:
    """Steps that broadcast against the reward, of which agents or components may have more numbers."""
    if steps.numel() == reward.numel():
        return steps.view_as(reward)
    return steps.reshape(*reward.shape[:batch_dims], *[1] * (reward.ndim - batch_dims))


def _write(td: TensorDictBase, key: NestedKey, tensor: Tensor) -> None:
    if not td.is_locked:
        td.set(key, tensor)
    elif key in td.keys(include_nested=True):
        td.set_(key, tensor)
    else:
        raise RuntimeError(
            f"expected {key!r} to exist in a locked batch, received {_available(td)}; unlock the batch or "
            "allocate the key"
        )
