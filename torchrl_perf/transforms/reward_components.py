"""Rewards made of named columns, and the advantage made of those of the columns."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import Transform

from torchrl_perf.functional.components import standardized_components, weighted_sum
from torchrl_perf.modules.values.component_values import check_names

Weights = Mapping[str, float] | Sequence[float] | Tensor | None


class RewardComponents(Transform):
    """A reward that is the weighted sum of named columns, ``r = sum_c w_c r_c``, with the weights on the device.

    The weights are a buffer: they may be changed in place, a captured graph honours it, and ``state_dict`` holds them.
    A column of weight 0 counts as 0 whatever its value. In three places:

    - ``TransformedEnv(env, RewardComponents(...))``: the env writes the columns at each step.
    - ``batch = components(batch)`` on a collected batch, for example after an :class:`~torchrl_perf.modules.ICM` has
      written its own column.
    - In a replay buffer: samples get their reward by the weights of now, not of then.

    Keys read under "next": ``in_keys``, each ``[*, C_i]``. Written under "next": ``reward_key [*, 1]``, and, unless it
    is the only one of ``in_keys``, ``components_key [*, C]``, all columns in order.

    Args:
        names: of the C columns of all ``in_keys``, in order.
        weights: by name (0 for a name left out), or C of them in order; 1 each by default.
        in_keys: where the columns are.
        components_key: where all columns are together.
        reward_key: where the sum is written; a reward that the env has written is replaced.
        device: of the weights; they follow the rewards at first use.

    Attributes:
        names: tuple of names.
        weights: buffer ``[C]`` float32.

    Raises:
        ValueError: for a name given twice, weights of another number or name, a ``components_key`` that is one of
            several ``in_keys``; when it runs, for columns of another number.
        KeyError: when it runs, for an entry that is missing.
    """

    weights: Tensor

    def __init__(
        self,
        names: Sequence[str],
        weights: Weights = None,
        *,
        in_keys: Sequence[NestedKey] = ("reward_components",),
        components_key: NestedKey = "reward_components",
        reward_key: NestedKey = "reward",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_keys=list(in_keys), out_keys=[reward_key])
        self.names = check_names(names)
        self.column_keys = [unravel_key(key) for key in in_keys]
        self.components_key, self.reward_key = unravel_key(components_key), unravel_key(reward_key)
        if len(self.column_keys) > 1 and self.components_key in self.column_keys:
            # joined in place, a second call would join what the first has joined
            raise ValueError(
                f"components_key: expected a key of its own where several are joined, received {components_key!r}, one "
                f"of in_keys {list(in_keys)}. Remedy: components_key='all_components'."
            )
        self.register_buffer("weights", _weights(self.names, weights, device))

    @property
    def _joins(self) -> bool:
        return self.column_keys != [self.components_key]

    def column(self, name: str) -> int:
        """Index of a column by its name.

        Raises:
            KeyError: for another name.
        """
        if name not in self.names:
            raise KeyError(f"expected a name among {list(self.names)}, received {name!r}.")
        return self.names.index(name)

    def set_weights(self, weights: Weights) -> None:
        """Writes weights in place: by name (0 for a name left out), or C of them in order."""
        self.weights.copy_(_weights(self.names, weights, self.weights.device))

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        columns = [_column(next_tensordict, key) for key in self.column_keys]
        components = columns[0] if len(columns) == 1 else torch.cat(columns, -1)
        if components.shape[-1] != len(self.names):
            raise ValueError(
                f"{self.column_keys}: expected {len(self.names)} columns {list(self.names)}, received "
                f"{list(components.shape)}."
            )
        if self.weights.device != components.device:
            self.weights = self.weights.to(components.device)
        if self._joins:
            next_tensordict.set(self.components_key, components)
        return next_tensordict.set(self.reward_key, weighted_sum(components, self.weights))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset  # there is no reward without a step

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the reward into a batch or a sample of transitions and return it."""
        self._call(cast("TensorDictBase", tensordict.get("next")))
        return tensordict

    def transform_reward_spec(self, reward_spec: TensorSpec) -> TensorSpec:
        """The spec with an unbounded ``reward_key`` ``[*batch, 1]``."""
        parent = self.parent
        shape = reward_spec.shape if parent is None else parent.batch_size
        spec = Unbounded(shape=(*shape, 1), device=reward_spec.device, dtype=torch.float32)
        if not isinstance(reward_spec, Composite):
            return spec
        reward_spec[self.reward_key] = spec
        return reward_spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.names)})"


class ComponentAdvantage(Transform):
    """One advantage from those of all reward components: ``A = sum_c w_c A_c``, with the weights on the device.

    After a :class:`~torchrl_perf.transforms.GAETransform` on the columns, whose value network writes ``[*, C]``::

        gae = GAETransform(gamma=0.99, lmbda=0.95, value_network=critic,
                           keys={"reward": "reward_components", "advantage": "advantage_components"})
        batch = advantage(gae(batch))

    the losses of PPO read "advantage" ``[*, 1]``, "value_target" and the critic's "state_value" ``[*, C]``. In a replay
    buffer it runs on samples, by the weights of now; ``standardize`` then takes its moments from the sample.

    Keys read: ``components_key [*, C]``. Written: ``advantage_key [*, 1]``.

    Args:
        weights: those of a :class:`RewardComponents`, whatever they are when it runs; or weights of its own, as for
            that class, of which a mapping needs ``names``.
        names: of the components.
        standardize: bring each component to mean 0 and standard deviation 1 over the batch before the sum, so that the
            weights compare what a component says of actions and not its scale.
        components_key: advantages of the components.
        advantage_key: the sum.

    Attributes:
        names: tuple of names.
        weights: buffer ``[C]`` of its own weights, or None.

    Raises:
        ValueError: for weights that do not fit the names; when it runs, for components of another number.
        KeyError: when it runs, for an entry that is missing.
    """

    weights: Tensor | None

    def __init__(
        self,
        weights: Weights | RewardComponents,
        *,
        names: Sequence[str] | None = None,
        standardize: bool = False,
        components_key: NestedKey = "advantage_components",
        advantage_key: NestedKey = "advantage",
    ) -> None:
        super().__init__(in_keys=[components_key], out_keys=[advantage_key])
        self.components_key, self.advantage_key = unravel_key(components_key), unravel_key(advantage_key)
        self.standardize = standardize
        # not a submodule: whoever owns it saves and moves its weights
        self.__dict__["source"] = weights if isinstance(weights, RewardComponents) else None
        if isinstance(weights, RewardComponents):
            self.names = weights.names
            self.register_buffer("weights", None)
            return
        if names is None and not isinstance(weights, Tensor | Sequence):
            raise ValueError(f"names: expected them with weights of type {type(weights).__name__}, received none.")
        count = 0 if weights is None else len(weights)
        self.names = check_names([str(column) for column in range(count)] if names is None else names)
        self.register_buffer("weights", _weights(self.names, weights, None))

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError(
            "ComponentAdvantage needs a batch with advantages, and an environment passes one step at a time: call it "
            "on the collected batch after GAETransform, or give it to a replay buffer."
        )

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict) if self.parent is not None else tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantage into a batch or a sample and return it."""
        components = _column(tensordict, self.components_key)
        if components.shape[-1] != len(self.names):
            raise ValueError(
                f"{self.components_key!r}: expected {len(self.names)} components, received "
                f"{list(components.shape)}. Remedy: a value network that writes one value for each reward column."
            )
        source: RewardComponents | None = self.__dict__["source"]
        owner: Any = self if source is None else source
        if owner.weights.device != components.device:
            owner.weights = owner.weights.to(components.device)
        if self.standardize:
            components = standardized_components(components)
        return tensordict.set(self.advantage_key, weighted_sum(components, owner.weights))


def _column(td: TensorDictBase, key: NestedKey) -> Tensor:
    value = td.get(key, None)
    if value is None:
        raise KeyError(
            f"expected {key!r}, received {sorted(td.keys(True, True), key=str)}. Remedy: name it in in_keys."
        )
    return value


def _weights(names: tuple[str, ...], weights: Weights, device: Any) -> Tensor:
    """``[C]`` float32 weights in the order of the names."""
    if weights is None:
        return torch.ones(len(names), device=device)
    if isinstance(weights, Mapping):
        unknown = sorted(set(weights) - set(names))
        if unknown:
            raise ValueError(f"weights: expected names among {list(names)}, received {unknown}.")
        weights = [float(weights.get(name, 0.0)) for name in names]
    numbers = torch.as_tensor(weights, dtype=torch.float32, device=device).clone()
    if numbers.shape != (len(names),):
        raise ValueError(f"weights: expected {len(names)} of them, for {list(names)}, received {list(numbers.shape)}.")
    return numbers
