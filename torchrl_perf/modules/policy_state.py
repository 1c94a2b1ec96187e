"""The state of a policy as entries of an environment."""

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.envs import TensorDictPrimer

# Defined beside the policies, which make it for the env they act in; users import it from ``transforms``.
__all__ = ["PolicyState"]


class PolicyState(TensorDictPrimer):
    """Adds the state of a policy to an env: entries that the policy reads at the root and writes under "next".

    A ``TensorDictPrimer``, so that TorchRL's collectors and helpers know what it carries, without the questions to the
    host that TorchRL's asks at each reset: ``TransformedEnv(env, PolicyState(...))`` is collected without host reads
    where ``env`` is.

    Keys added, to the specs and to each reset: those of ``specs``, ``[*batch, *size]``, at their initial values. A
    masked reset sets only the rows in "_reset"; the others keep the entries of the TensorDict. After a step the entries
    are those that the policy wrote under "next", or the initial values if the policy did not act (a random action).

    Args:
        specs: spec of each entry of one row, ``[*size]``, without the env's batch dims.
        initial: the number that fills an entry at a reset; 0 for those without one.

    Attributes:
        specs: as given.
        initial: the number of each entry.

    Raises:
        ValueError: for an initial value without entry, or that the spec of its entry does not allow; for an env whose
            observation spec is not a Composite.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], initial: Mapping[str, float] | None = None) -> None:
        given = dict(initial or {})
        unknown = sorted(given.keys() - specs.keys())
        if unknown:
            raise ValueError(
                f"initial: expected names among {sorted(specs)}, received {unknown} too. Remedy: a spec for each."
            )
        numbers = {key: given.get(key, 0) for key in specs}
        super().__init__(Composite(dict(specs)), default_value=dict(numbers), expand_specs=True)
        self.out_keys = list(specs)
        self.specs = dict(specs)
        self.initial = numbers
        for key, spec in self.specs.items():
            number = self.initial[key]
            is_exact = spec.dtype.is_floating_point or float(number).is_integer()
            if not is_exact or not spec.is_in(torch.full(spec.shape, number, dtype=spec.dtype, device=spec.device)):
                raise ValueError(
                    f"initial: expected for {key!r} a number that its {type(spec).__name__} spec of {spec.dtype} "
                    f"allows, received {number!r}. Remedy: initial={{{key!r}: ...}} with such a number."
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Size of each entry beyond the batch."""
        return {key: tuple(spec.shape) for key, spec in self.specs.items()}

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """The spec with the entries."""
        if not isinstance(observation_spec, Composite):
            raise ValueError(
                f"expected a Composite observation spec, received {type(observation_spec).__name__}. Remedy: "
                "Composite(observation=spec)."
            )
        for key, spec in self.specs.items():
            full = spec.expand(*observation_spec.shape, *spec.shape)
            observation_spec[key] = full if observation_spec.device is None else full.to(observation_spec.device)
        return observation_spec

    def transform_input_spec(self, input_spec: TensorSpec) -> TensorSpec:
        """The spec as it is: the entries are observations to the env's users, and nothing that its step reads."""
        return input_spec

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key in self.specs:
            if next_tensordict.get(key, None) is None:
                next_tensordict.set(key, self._initial(next_tensordict, key))
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get("_reset", None)
        for key, spec in self.specs.items():
            value = self._initial(tensordict_reset, key)
            before = tensordict.get(key, None)
            if mask is not None and before is not None:
                rows = mask.view(*before.shape[: before.ndim - spec.ndim], *(1,) * spec.ndim)
                value = torch.where(rows, value, before)
            tensordict_reset.set(key, value)
        return tensordict_reset

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict unchanged: there is nothing to do outside of an env."""
        return tensordict

    def _initial(self, tensordict: TensorDictBase, key: str) -> Tensor:
        shape, dtype = (*tensordict.shape, *self.specs[key].shape), self.specs[key].dtype
        return torch.full(shape, self.initial[key], dtype=dtype, device=tensordict.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shapes})"
