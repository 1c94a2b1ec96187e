"""The loss of an intrinsic curiosity module."""

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_perf.functional.icm import forward_error, inverse_accuracy, inverse_error
from torchrl_perf.modules.icm import ICM


class ICMLoss(nn.Module):
    """``(1 - beta) L_inv + beta L_fwd`` of an :class:`~torchrl_perf.modules.ICM` (arXiv:1705.05363, eq. 7).

    ``L_inv`` is the cross-entropy of the guessed action (continuous: half the squared distance), ``L_fwd`` half the
    squared distance of the foreseen features; both are means over the batch. The gradient of both reaches the features,
    as in the paper's code. Nothing waits for the host.

    Keys read: the module's ``in_keys``.

    Args:
        icm: the module.
        beta: weight of the forward model's loss, in [0, 1].

    Attributes:
        icm: the module.

    Raises:
        ValueError: for a beta outside of [0, 1].
    """

    def __init__(self, icm: ICM, *, beta: float = 0.2) -> None:
        super().__init__()
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta: expected a weight in [0, 1], received {beta}.")
        self.icm, self.beta = icm, beta

    def losses(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted losses of inverse and forward model, and without gradients mean reward and accuracy, all 0-d."""
        out = self.icm.outputs(tensordict)
        inverse = inverse_error(out.guess, out.action, discrete=self.icm.discrete).mean()
        error = forward_error(out.predicted, out.features).mean()
        # of continuous actions there is no share that is guessed right
        accuracy = inverse_accuracy(out.guess, out.action) if self.icm.discrete else torch.full_like(error, torch.nan)
        reward = self.icm.eta * error.detach()
        return (1 - self.beta) * inverse, self.beta * error, reward, accuracy.detach()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of transitions of any shape ``[*]``.

        Returns:
            0-d ``loss_inverse`` and ``loss_forward``, whose sum is the loss, and, detached, ``intrinsic_reward``, the
            mean, and, of discrete actions, ``inverse_accuracy``.
        """
        inverse, forward, reward, accuracy = self.losses(tensordict)
        out = TensorDict({"loss_inverse": inverse, "loss_forward": forward, "intrinsic_reward": reward})
        return out.set("inverse_accuracy", accuracy) if self.icm.discrete else out
