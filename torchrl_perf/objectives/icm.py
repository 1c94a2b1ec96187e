"""The loss of an intrinsic curiosity module."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams, dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.functional.losses.icm import forward_error, inverse_error
from torchrl_perf.functional.rows.valid import reduced, valid_mean
from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.icm import ICM
from torchrl_perf.objectives.loss_module import OffPolicyLoss


class ICMLoss(OffPolicyLoss):
    """``(1 - beta) L_inv + beta L_fwd`` of an :class:`~torchrl_perf.modules.ICM` (arXiv:1705.05363, eq. 7).

    ``L_inv`` is the cross-entropy of the guessed action (continuous: half the squared distance), ``L_fwd`` half the
    squared distance of the foreseen features; both are means over the batch. The gradient of both reaches the features,
    as in the paper's code. Nothing waits for the host.

    Keys read: the module's ``in_keys``; where present ("next", "done"), since a step that ends an episode without a
    final observation, which is then NaN, is no transition and does not count.

    Args:
        icm: the module.
        beta: weight of the forward model's loss, in [0, 1].
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the rows that count; all do by default.

    Attributes:
        icm: the module.

    Raises:
        ValueError: for a beta outside of [0, 1].
    """

    icm: Any
    icm_params: TensorDictParams
    SUPPORTED_VALUE_ESTIMATORS = ()

    def __init__(self, icm: ICM, *, beta: float = 0.2, valid_key: NestedKey | None = None) -> None:
        super().__init__(valid_key=valid_key, use_prioritized_weights=False)
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta: expected a weight in [0, 1], received {beta}.")
        self.beta = beta
        self.add_network("icm", icm, delay=False)

    def read_keys(self) -> list[NestedKey]:
        """What the module reads of a state."""
        return list(self.icm.network_keys)

    def action_keys(self) -> list[NestedKey]:
        """The action."""
        return [self.icm.action_key]

    @property
    def in_keys(self) -> list[NestedKey]:
        """What the module reads."""
        return list(self.icm.in_keys)

    def returned_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns."""
        keys: list[NestedKey] = ["loss_inverse", "loss_forward", "intrinsic_reward"]
        return [*keys, "inverse_accuracy"] if self.icm.discrete else keys

    def losses(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted losses of inverse and forward model, and without gradients mean reward and accuracy, all 0-d."""
        counted, missing = self.valid(tensordict, tensordict.batch_size), self.missing(tensordict)
        if missing is not None:
            counted = ~missing if counted is None else counted & ~missing
        out = self.icm.outputs(tensordict if counted is None else self.prepared(tensordict))
        guess, features = widened(out.guess), widened(out.features)
        inverse = reduced(inverse_error(guess, out.action, discrete=self.icm.discrete), counted, self.reduction)
        error = reduced(forward_error(widened(out.predicted), features), counted, self.reduction)
        # of continuous actions there is no share that is guessed right
        accuracy = error * torch.nan
        if self.icm.discrete:
            accuracy = valid_mean((guess.argmax(-1) == out.action).to(torch.float32), counted)
        reward = self.icm.eta * error.detach()
        return (1 - self.beta) * inverse, self.beta * error, reward, accuracy.detach()

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of transitions of any shape ``[*]``.

        Returns:
            0-d ``loss_inverse`` and ``loss_forward``, whose sum is the loss, and, detached, ``intrinsic_reward``, the
            mean, and, of discrete actions, ``inverse_accuracy``.
        """
        inverse, forward, reward, accuracy = self.losses(tensordict)
        out = TensorDict({"loss_inverse": inverse, "loss_forward": forward, "intrinsic_reward": reward})
        return out.set("inverse_accuracy", accuracy) if self.icm.discrete else out
