"""Generalized advantage estimation on TensorDict batches."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.envs import EnvBase, Transform
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from torchrl_perf.functional import generalized_advantage_estimate


@dataclass(frozen=True)
class GAEKeys:
    """Keys of :class:`GAETransform`. Reward and flags are read, and V(s') is written, under ``"next"``."""

    advantage: NestedKey = "advantage"
    value_target: NestedKey = "value_target"
    value: NestedKey = "state_value"
    reward: NestedKey = "reward"
    done: NestedKey = "done"
    terminated: NestedKey = "terminated"
    steps_to_next_obs: NestedKey = "steps_to_next_obs"


class GAETransform(Transform):
    """GAE (arXiv:1506.02438) of a ``[*batch, T]`` batch without host waits, in any of three places.

    - Called on a batch: ``batch = gae(batch)`` writes into the batch and returns it.
    - In a replay buffer, ``ReplayBuffer(..., transform=gae)``: runs when a batch is extended, on the batch as it is
      before it is flattened; sampling passes through it untouched.
    - As ``gae=`` of TorchRL's ``PPOTrainer``.

    The value network runs once, on the rows of the root and of the true next observations together, without gradient:
    a truncated step bootstraps from its true final observation. A recurrent network (``"is_init"`` among its
    ``in_keys``, or an ``LSTMModule`` or ``GRUModule`` inside) runs on the two ``[*batch, T]`` sequences instead, each
    step that begins an episode marked in both; time has to be the last batch dimension for it.

    Reads (at index t):
        the value network's ``in_keys`` and ``("next", key)`` for each (a key that "next" lacks is taken from the root)
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
        average_gae: standardise the advantage over the whole batch; equal advantages (or a single one) become 0.
        chunk_size: most rows (steps) of one network call, for networks whose activations for the whole batch do not
            fit; None for no limit. A recurrent network gets whole sequences, at least one.
        time_dim: dimension of time among the batch dimensions; None: the one named "time", else the last of at least
            two.
        keys: names other than the defaults, as in :meth:`set_keys`.

    Raises:
        ValueError: if ``chunk_size`` is below 1 or a number is outside of [0, 1].
    """

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModuleBase | None,
        average_gae: bool = False,
        chunk_size: int | None = None,
        time_dim: int | None = None,
        keys: dict[str, NestedKey] | None = None,
    ) -> None:
        super().__init__()
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"expected chunk_size of at least 1 row or None, got {chunk_size}")
        for name, number in (("gamma", gamma), ("lmbda", lmbda)):
            if not isinstance(number, Tensor) and not 0 <= number <= 1:
                raise ValueError(f"expected {name} between 0 and 1, got {number}")
        parameters = () if value_network is None else value_network.parameters()
        device = next((parameter.device for parameter in parameters), None)
        # float64, so that 0.99 means the same here as in a script; the estimate casts it to what it computes in.
        self.register_buffer("gamma", torch.as_tensor(gamma, dtype=torch.float64, device=device).clone())
        self.register_buffer("lmbda", torch.as_tensor(lmbda, dtype=torch.float64, device=device).clone())
        # Not a submodule: the loss owns the network, and a checkpoint of both must not hold it twice.
        self.__dict__["value_network"] = value_network
        self.average_gae = average_gae
        self.chunk_size = chunk_size
        self.time_dim = time_dim
        self.tensor_keys = GAEKeys()
        self.set_keys(**(keys or {}))

    def set_keys(self, **keys: NestedKey) -> None:
        """Rename keys, each a field of :class:`GAEKeys`.

        Raises:
            KeyError: for any other name.
        """
        current = asdict(self.tensor_keys)
        unknown = sorted(set(keys) - set(current))
        if unknown:
            raise KeyError(f"expected keys among {sorted(current)}, got {unknown}")
        self.tensor_keys = GAEKeys(**(current | {name: unravel_key(key) for name, key in keys.items()}))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the estimate into a ``[*batch, T]`` batch and return it; a replay buffer's samples pass untouched."""
        return tensordict if self._is_in_replay_buffer() else self._estimate(tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # What a replay buffer calls when it is extended, and an environment before each step.
        return self._call(tensordict) if isinstance(self._owner(), EnvBase) else self._estimate(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError(
            "GAETransform needs a whole [*batch, T] batch, and an environment passes one step at a time: call it on "
            "the collected batch, or give it to a replay buffer or a trainer"
        )

    def _owner(self) -> Transform | EnvBase | None:
        """The environment or the outermost chain that holds this transform (`container` knows environments only)."""
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

    @torch.no_grad()
    def _estimate(self, td: TensorDictBase) -> TensorDictBase:
        keys = self.tensor_keys
        dim = self._resolve_time_dim(td)
        reward, done = _read_next(td, keys.reward), _read_next(td, keys.done)
        terminated = _read_terminated(td, keys.terminated, done)
        if self.gamma.device != reward.device:
            self.gamma, self.lmbda = self.gamma.to(reward.device), self.lmbda.to(reward.device)
        steps = td.get(keys.steps_to_next_obs, None)
        gamma = self.gamma if steps is None else self.gamma ** _fitted(steps, reward, td.batch_dims)

        value, next_value = self._values(td, reward, dim)
        advantage, target = generalized_advantage_estimate(
            gamma, self.lmbda, value, next_value, reward, done, terminated, time_dim=dim
        )
        if self.average_gae:
            advantage = _standardized(advantage)
        _write(td, keys.value, value)
        _write(td, unravel_key(("next", keys.value)), next_value)
        _write(td, keys.advantage, advantage)
        _write(td, keys.value_target, target)
        return td

    def _resolve_time_dim(self, td: TensorDictBase) -> int:
        """Dimension of time among the batch dimensions, from the front."""
        dim = self.time_dim
        if dim is None and "time" in td.names:
            dim = td.names.index("time")
        elif dim is None and td.batch_dims >= 2:
            dim = td.batch_dims - 1
        if dim is None or not -td.batch_dims <= dim < td.batch_dims:
            raise ValueError(
                'expected a [*batch, T] batch, with a batch dimension named "time" or at least two of them, got batch '
                f"size {list(td.batch_size)}, names {td.names}, time_dim={self.time_dim}: a flattened batch mixes "
                "trajectories; estimate advantages before flattening it, or name the dimension of a single trajectory"
            )
        return dim % td.batch_dims

    def _values(self, td: TensorDictBase, reward: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """V(s) and V(s'), ``[*batch, T, *F]``."""
        network: TensorDictModuleBase | None = self.__dict__["value_network"]
        key = self.tensor_keys.value
        if network is None:
            value, next_value = td.get(key, None), td.get(("next", key), None)
            if value is None or next_value is None:
                raise KeyError(f"expected {key!r} and {('next', key)!r}, without a value network, in {_available(td)}")
            return value, next_value
        if key not in network.out_keys:
            raise KeyError(f"expected a value network that writes {key!r}, got {network.out_keys}; see set_keys")
        if _is_recurrent(network):
            return self._sequence_values(network, td, dim)
        return self._row_values(network, td, reward, dim)

    def _row_values(
        self, network: TensorDictModuleBase, td: TensorDictBase, reward: Tensor, dim: int
    ) -> tuple[Tensor, Tensor]:
        """Both values from one call on flat rows, in the order of memory so that flattening copies nothing."""
        ndim = td.batch_dims
        others = [d for d in range(ndim) if d != dim]
        is_time_major = all(reward.stride(dim) >= reward.stride(d) for d in others)
        order = [dim, *others] if is_time_major else list(range(ndim))
        inverse = sorted(range(ndim), key=order.__getitem__)

        def rows(tensor: Tensor) -> Tensor:
            return tensor.permute(*order, *range(ndim, tensor.ndim)).flatten(0, ndim - 1)

        def batch(values: Tensor) -> Tensor:
            values = values.unflatten(0, [td.batch_size[d] for d in order])
            return values.permute(*inverse, *range(ndim, values.ndim))

        inputs = [_read_pair(td, key) for key in network.in_keys]
        roots = {key: rows(root) for key, (root, _) in zip(network.in_keys, inputs, strict=True)}
        nexts = {key: rows(following) for key, (_, following) in zip(network.in_keys, inputs, strict=True)}
        num_rows = td.batch_size.numel()
        if self.chunk_size is None or self.chunk_size >= 2 * num_rows:
            both = {key: torch.cat([roots[key], nexts[key]]) for key in roots}
            value, next_value = self._run(network, both, 2 * num_rows).split(num_rows)
        else:
            # Chunks of the root rows, then of the next ones: the observations need not be copied together.
            value, next_value = (self._run_chunks(network, part, num_rows) for part in (roots, nexts))
        return batch(value), batch(next_value)

    def _run(self, network: TensorDictModuleBase, rows: dict[NestedKey, Tensor], num_rows: int) -> Tensor:
        inputs = TensorDict({}, batch_size=[num_rows])
        for key, tensor in rows.items():
            inputs.set(key, tensor)
        return network(inputs).get(self.tensor_keys.value)

    def _run_chunks(self, network: TensorDictModuleBase, rows: dict[NestedKey, Tensor], num_rows: int) -> Tensor:
        size = self.chunk_size or num_rows
        spans = [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        return torch.cat([self._run(network, {k: v[a:b] for k, v in rows.items()}, b - a) for a, b in spans])

    def _sequence_values(self, network: TensorDictModuleBase, td: TensorDictBase, dim: int) -> tuple[Tensor, Tensor]:
        """V(s) and V(s') of a recurrent network, one call on each sequence."""
        if dim != td.batch_dims - 1:
            raise ValueError(
                f"expected time to be the last batch dimension for a recurrent value network, got dimension {dim} of "
                f"batch size {list(td.batch_size)}; transpose the batch"
            )
        root = td.select(*network.in_keys, strict=False)
        following = td.get("next").select(*network.in_keys, strict=False)
        for key in network.in_keys:
            if following.get(key, None) is None and root.get(key, None) is not None:
                following.set(key, root.get(key))
        if "is_init" in root.keys():
            # The next observation of an episode's first step does not continue the episode before it either.
            following.set("is_init", following.get("is_init") | root.get("is_init"))
        call = self._sequence_caller(network, td)
        return call(root), call(following)

    def _sequence_caller(self, network: TensorDictModuleBase, td: TensorDictBase) -> Callable[[TensorDictBase], Tensor]:
        sequences = None
        if self.chunk_size is not None and td.batch_dims > 1:
            sequences = max(1, self.chunk_size * td.batch_size[0] // td.batch_size.numel())

        def call(data: TensorDictBase) -> Tensor:
            parts = (data,) if sequences is None else data.split(sequences, 0)
            with set_recurrent_mode(True):
                return torch.cat([network(part).get(self.tensor_keys.value) for part in parts])

        return call


def _is_recurrent(network: TensorDictModuleBase) -> bool:
    has_flag = any(key == "is_init" or (isinstance(key, tuple) and key[-1] == "is_init") for key in network.in_keys)
    return has_flag or any(isinstance(module, LSTMModule | GRUModule) for module in network.modules())


def _available(td: TensorDictBase) -> list[Any]:
    return sorted(td.keys(include_nested=True, leaves_only=True), key=str)


def _read_next(td: TensorDictBase, key: NestedKey) -> Tensor:
    tensor = td.get(("next", key), None)
    if tensor is None:
        raise KeyError(f"expected {('next', key)!r} in the batch, got {_available(td)}; name it with set_keys")
    return tensor


def _read_pair(td: TensorDictBase, key: NestedKey) -> tuple[Tensor, Tensor]:
    root = td.get(key, None)
    if root is None:
        raise KeyError(f"expected {key!r}, an input of the value network, in the batch, got {_available(td)}")
    following = td.get(("next", key), None)
    return root, root if following is None else following


def _read_terminated(td: TensorDictBase, key: NestedKey, done: Tensor) -> Tensor:
    """The terminated flag; where it is missing, what is done and not truncated."""
    terminated = td.get(("next", key), None)
    if terminated is not None:
        return terminated
    sibling = (*key[:-1], "truncated") if isinstance(key, tuple) else "truncated"
    truncated = td.get(("next", sibling), None)
    if truncated is None:
        raise KeyError(
            f"expected {('next', key)!r} or {('next', sibling)!r} in the batch, got {_available(td)}: done alone does "
            "not tell a terminated step, which has no future value, from a truncated one, which has"
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
            f"expected {key!r} to exist in a locked batch, got {_available(td)}; unlock the batch or allocate the key"
        )


def _standardized(advantage: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over all elements; 0 where all are equal."""
    if advantage.numel() == 1:
        return torch.zeros_like(advantage)
    low, high = advantage.aminmax()
    scaled = (advantage - advantage.mean()) / advantage.std().clamp_min(1e-4)
    return torch.where(low == high, 0.0, scaled)
