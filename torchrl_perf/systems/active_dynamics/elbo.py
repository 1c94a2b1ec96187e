"""The loss of a sequential variational autoencoder whose dynamics are asked for several steps ahead.

Dimension key: ``B`` windows, ``T`` steps, ``M`` samples, ``K`` members of an ensemble, ``S`` numbers of the latent
state, ``H`` steps ahead.
"""

from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_perf.functional.losses.elbo import decayed_weights, gaussian_kl, linked, masked_latent, temporal_mask
from torchrl_perf.systems.active_dynamics.latent_maps import Belief
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE

__all__ = ["MultiStepELBOLoss"]


class MultiStepELBOLoss(nn.Module):
    """Minus the evidence lower bound of windows, with KL divergences from predictions of 1 to H steps.

    ``[-sum_t E_q log p(y_t | z_t) + beta (sum_{t starts} KL(q_t || N(0, I)) + sum_k w_k sum_t KL(q_t+k || p_k))] / T``,
    the mean over windows, where ``p_k`` is the model's prediction of k steps from a sample at t, its path drawn with
    the process noise, and the weights ``w`` decay and add up to 1. With ``horizon=1`` it is the one-step bound
    (arXiv:1609.09869). Predictions across the end of an episode do not count. The first step of a window is a start.

    Predictions begin at ``m z_posterior + (1 - m) z_predicted``, m a temporal Bernoulli mask: where it is 0, the state
    is the prediction from the step before, so that the dynamics and not the encoder have to carry the information. Of
    an ensemble each member predicts on its own, and the divergences are averaged.

    Keys read: "observation" ``[B, T, O]``, "action" ``[B, T, D]``, "is_init" bool ``[B, T, 1]``, and of a recurrent
    encoder, where present, "hidden" ``[B, T, H]`` and "previous_action" ``[B, T, D]``, of which those of the first step
    are the state that the window begins with; without them it is 0. Nothing waits for the host.

    Args:
        model: the autoencoder.
        horizon: H, most steps ahead; predictions that leave the window are left out.
        decay: of the weights.
        samples: M, draws of each belief.
        mask_rate: share of masked steps.
        beta: weight of the divergences.

    Attributes:
        beta: buffer, float32 0-d; a schedule writes it in place.
        weights: buffer ``[H]``.

    Raises:
        ValueError: for numbers outside what is described; when it runs, for windows of fewer than 2 steps.
    """

    beta: Tensor
    weights: Tensor

    def __init__(
        self,
        model: SeqVAE,
        *,
        horizon: int = 5,
        decay: float = 0.8,
        samples: int = 5,
        mask_rate: float = 0.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        if samples < 1 or not 0.0 <= mask_rate <= 1.0:
            raise ValueError(
                f"MultiStepELBOLoss: expected samples >= 1 and mask_rate in [0, 1], received {samples} and {mask_rate}."
            )
        self.model, self.horizon, self.samples, self.mask_rate = model, horizon, samples, mask_rate
        device = model.dynamics.input_matrix.device
        self.register_buffer("weights", decayed_weights(horizon, decay, device=device).clone())
        self.register_buffer("beta", torch.tensor(float(beta), device=device))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of windows ``[B, T]`` (or ``[B]`` with T in the entries).

        Returns:
            0-d ``loss_recon`` and ``loss_kl``, whose sum is the loss, and, detached, ``kl`` ``[H]``, the divergence of
            each number of steps, and ``kl_start``, both before weights and beta.
        """
        observation, action, is_init = (cast("Tensor", tensordict.get(k)) for k in ("observation", "action", "is_init"))
        if observation.ndim != 3 or observation.shape[1] < 2:
            raise ValueError(
                f"MultiStepELBOLoss: expected observations [B, T, O] of at least 2 steps, received "
                f"{list(observation.shape)}. Remedy: windows of a replay buffer."
            )
        starts = is_init.squeeze(-1)
        state = [tensordict.get(key, None) for key in ("hidden", "previous_action")]
        hidden, previous = (None if value is None else value[:, 0] for value in state)
        belief = self.model.encode(observation, action, starts, hidden, previous)
        steps, std = observation.shape[1], belief.var.sqrt()
        noise = torch.randn(self.samples, *std.shape, dtype=std.dtype, device=std.device)
        latent = belief.loc + std * noise  # [M, B, T, S]
        recon = -self.model.decoder.log_likelihood(observation, latent).mean((0, 1)).sum() / steps
        first = torch.cat((torch.ones_like(starts[:, :1]), starts[:, 1:]), 1)
        prior = gaussian_kl(belief.loc, belief.var, torch.zeros_like(belief.loc), torch.ones_like(belief.var))
        kl_start = torch.where(first, prior, 0.0).sum(1).mean() / steps
        kl = self._divergences(belief, latent, action, first)
        total = self.beta * (kl_start + (self.weights * kl).sum())
        return TensorDict({"loss_recon": recon, "loss_kl": total, "kl": kl.detach(), "kl_start": kl_start.detach()})

    def _mixed(self, latent: Tensor, action: Tensor, first: Tensor) -> Tensor:
        """Where predictions begin, ``[M, B, T, S]``: samples of the beliefs, and predictions where steps are masked."""
        if self.mask_rate == 0.0:
            return latent
        keep = temporal_mask(*first.shape, 1, rate=self.mask_rate, device=latent.device, dtype=latent.dtype)
        keep = torch.where(first.unsqueeze(-1), 1.0, keep)
        mixed = [latent[:, :, 0]]
        for t in range(1, latent.shape[2]):
            predicted = self.model.dynamics(mixed[-1], action[:, t - 1])
            mixed.append(masked_latent(keep[:, t], latent[:, :, t], predicted))
        return torch.stack(mixed, 2)

    def _divergences(self, belief: Belief, latent: Tensor, action: Tensor, first: Tensor) -> Tensor:
        """Divergence of each number of steps ahead, ``[H]``: summed over time, the mean over the rest, by T."""
        dynamics, steps = self.model.dynamics, action.shape[1]
        variance, start = dynamics.variance, self._mixed(latent, action, first)
        # starts whose prediction stays within the window, [K, M, B, T - ahead, S]
        state = start.unsqueeze(0).expand(dynamics.num_members, *start.shape)[:, :, :, :-1]
        found = []
        for ahead in range(1, min(self.horizon, steps - 1) + 1):
            mean = dynamics.predict_members(state, action[:, ahead - 1 : steps - 1])
            kl = gaussian_kl(belief.loc[:, ahead:], belief.var[:, ahead:], mean, variance)
            found.append(torch.where(linked(first, ahead), kl, 0.0).sum(-1).mean() / steps)
            state = (mean + variance.sqrt() * torch.randn_like(mean))[:, :, :, :-1]
        found += [torch.zeros_like(self.beta)] * (self.horizon - len(found))
        return torch.stack(found)
