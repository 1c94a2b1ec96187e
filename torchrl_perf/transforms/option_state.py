"""The running option as state of an environment."""

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import Transform

from torchrl_perf.modules.option_set import AGE_KEY, OPTION_KEY


class OptionState(Transform):
    """Adds the state of an :class:`~torchrl_perf.modules.OptionController` to an env: which option runs, how long.

    The counterpart of TorchRL's ``TensorDictPrimer``, which asks the host at each reset whether a row is reset. Nothing
    waits here: ``TransformedEnv(env, OptionState(num_options))`` is collected without host reads where ``env`` is.

    Keys added, to the specs and to each reset: "option" and "option_age", int64 ``[*batch]``, 0 (no option runs). After
    a step they are what the policy wrote under "next"; after one without an option, such as a random action, 0.

    Args:
        num_options: O.

    Raises:
        ValueError: for fewer than two options.
    """

    def __init__(self, num_options: int) -> None:
        super().__init__(in_keys=[], out_keys=[OPTION_KEY, AGE_KEY])
        if num_options < 2:
            raise ValueError(f"num_options: expected at least 2, received {num_options}.")
        self.num_options = num_options

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """The spec with both entries."""
        if not isinstance(observation_spec, Composite):
            raise ValueError(f"expected a Composite observation spec, received {type(observation_spec).__name__}.")
        shape, device = observation_spec.shape, observation_spec.device
        observation_spec[OPTION_KEY] = Categorical(self.num_options, shape=shape, dtype=torch.int64, device=device)
        observation_spec[AGE_KEY] = Unbounded(shape=shape, dtype=torch.int64, device=device)
        return observation_spec

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key in (OPTION_KEY, AGE_KEY):
            if next_tensordict.get(key, None) is None:
                next_tensordict.set(key, self._zeros(next_tensordict))
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        mask = tensordict.get("_reset", None)
        for key in (OPTION_KEY, AGE_KEY):
            value = self._zeros(tensordict_reset)
            before = tensordict.get(key, None)
            if mask is not None and before is not None:
                value = torch.where(mask.view(before.shape), value, before)
            tensordict_reset.set(key, value)
        return tensordict_reset

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict as it is: there is nothing to do outside of an env."""
        return tensordict

    @staticmethod
    def _zeros(tensordict: TensorDictBase) -> Tensor:
        return torch.zeros(tensordict.shape, dtype=torch.int64, device=tensordict.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_options={self.num_options})"
