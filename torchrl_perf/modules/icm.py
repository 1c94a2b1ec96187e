"""Intrinsic curiosity: a reward for transitions that a learned model does not foresee."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Categorical, OneHot, TensorSpec

from torchrl_perf.functional.losses.icm import intrinsic_reward
from torchrl_perf.functional.rows.missing import missing_rows


class ICMOutput(NamedTuple):
    """What the three networks say of a batch of transitions.

    Attributes:
        features: ``[*, F]`` of the next states.
        predicted: ``[*, F]`` features that the forward model foresees.
        guess: ``[*, D]`` logits of discrete actions, or continuous actions, of the inverse model.
        action: ``[*]`` indices, or ``[*, D]``, what the guess is compared with.
    """

    features: Tensor
    predicted: Tensor
    guess: Tensor
    action: Tensor


class ICM(TensorDictModuleBase):
    """Intrinsic curiosity module (ICM, arXiv:1705.05363), which writes ``eta/2 ||phi^(s') - phi(s')||^2`` as a reward.

    A feature network phi; an inverse model, which guesses the action from the features of two states, so that phi keeps
    what the agent can influence; and a forward model, which foresees the features of the next state. States of both
    ends pass phi in one call. :class:`~torchrl_perf.objectives.ICMLoss` trains all three;
    :class:`~torchrl_perf.transforms.RewardComponents` adds the reward, as a column with a weight. It reads whole
    transitions: call it on a collected batch, with the true final observations at episode ends.

    Keys read: ``in_keys`` at the root and under "next", ``action_key``. Written: ``("next", reward_key) [*, 1]``,
    without a gradient; 0 where an episode ends, by ("next", "done"), without a final observation, which is then NaN.

    Args:
        in_features: O of the observation, or of the trunk's output.
        spec: the action's: index, one-hot or continuous.
        hidden_size: width of the hidden layers.
        num_features: F of phi.
        eta: scale of the reward; a buffer, which may be changed in place.
        in_keys: what the trunk reads; without a trunk, one key.
        action_key: the action.
        options: further choices: ``reward_key``, ``"intrinsic_reward"`` by default; ``trunk``, a module that makes
            ``[*, O]`` of the inputs, such as a :class:`~torchrl_perf.modules.ConvNet`; ``device`` of the parameters.

    Attributes:
        eta: buffer, 0-d.
        discrete: whether the actions are discrete.
        num_actions: D.

    Raises:
        TypeError: for an unknown option.
        ValueError: for sizes below 1 or a negative eta.
    """

    eta: Tensor

    def __init__(
        self,
        in_features: int,
        *,
        spec: TensorSpec,
        hidden_size: int = 256,
        num_features: int = 128,
        eta: float = 0.006,
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(set(options) - {"reward_key", "trunk", "device"})
        if unknown:
            raise TypeError(f"options: expected reward_key, trunk or device, received {unknown}.")
        if min(in_features, hidden_size, num_features) < 1 or not eta >= 0:
            raise ValueError(
                "expected sizes of at least 1 and eta of at least 0, received in_features "
                f"{in_features}, hidden_size {hidden_size}, num_features {num_features}, eta {eta}."
            )
        self.discrete = isinstance(spec, Categorical | OneHot)
        self.one_hot = isinstance(spec, OneHot)
        self.num_actions = int(cast("Any", spec.space).n) if self.discrete else spec.shape[-1]
        self.network_keys, self.action_key = list(in_keys), action_key
        self.reward_key: NestedKey = options.get("reward_key", "intrinsic_reward")
        self.in_keys = [*in_keys, action_key, *(("next", key) for key in in_keys)]  # pyright: ignore
        self.out_keys = [("next", self.reward_key)]  # pyright: ignore
        trunk, device = options.get("trunk"), options.get("device")
        self.trunk = nn.Identity() if trunk is None else trunk
        self.phi = _perceptron(in_features, hidden_size, num_features)
        self.inverse_model = _perceptron(2 * num_features, hidden_size, self.num_actions)
        self.forward_model = _perceptron(num_features + self.num_actions, hidden_size, num_features)
        self.register_buffer("eta", torch.tensor(float(eta)))
        self.to(device if device is not None else spec.device)

    def outputs(self, tensordict: TensorDictBase) -> ICMOutput:
        """Features, predicted features and guessed actions of transitions ``[*]``, with gradients."""
        following = cast("TensorDictBase", tensordict.get("next"))
        pairs = [torch.stack([self._read(td, key) for td in (tensordict, following)]) for key in self.network_keys]
        before, features = self.phi(self.trunk(*pairs)).unbind(0)
        action = cast("Tensor", tensordict.get(self.action_key))
        if self.one_hot:
            action = action.to(torch.uint8).argmax(-1)
        if self.discrete:
            action = action.reshape(before.shape[:-1])
            taken = _hot(action, self.num_actions)
        else:
            taken = action
        predicted = self.forward_model(torch.cat([before, taken.to(before.dtype)], -1))
        return ICMOutput(features, predicted, self.inverse_model(torch.cat([before, features], -1)), action)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the intrinsic reward."""
        out = self.outputs(tensordict)
        reward = intrinsic_reward(out.predicted, out.features, self.eta)
        following = cast("TensorDictBase", tensordict.get("next"))
        done = following.get("done", None)
        if done is not None:
            states = [self._read(following, key) for key in self.network_keys]
            missing = missing_rows(states, done, reward.ndim - 1)
            reward = reward if missing is None else torch.where(missing.unsqueeze(-1), 0.0, reward)
        return tensordict.set(("next", self.reward_key), reward)

    def _read(self, td: TensorDictBase, key: NestedKey) -> Tensor:
        value = td.get(key, None)
        if value is None:
            raise KeyError(
                f"expected {key!r} at the root and under 'next', received {sorted(td.keys(True, True), key=str)}. "
                "Remedy: call it on a batch of transitions; set in_keys."
            )
        return value


def _hot(action: Tensor, num_actions: int) -> Tensor:
    return action.unsqueeze(-1) == torch.arange(num_actions, device=action.device)


def _perceptron(in_features: int, hidden_size: int, out_features: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_features, hidden_size), nn.ELU(), nn.Linear(hidden_size, out_features))
