"""The evidence lower bound of a latent dynamical system whose beliefs are held against what could be predicted.

Dimension key: ``B`` windows, ``T`` steps, ``K`` members of an ensemble, ``S`` numbers of the latent state, ``D`` of the
action, ``H`` steps ahead.
"""

import torch
from torch import Tensor

from torchrl_perf.functional.losses.elbo import gaussian_kl, linked, masked_latent, temporal_mask
from torchrl_perf.systems.active_dynamics.elbo import MultiStepELBOLoss
from torchrl_perf.systems.active_dynamics.latent_maps import Belief

__all__ = ["PredictiveELBOLoss"]


class PredictiveELBOLoss(MultiStepELBOLoss):
    """:class:`MultiStepELBOLoss` with predictions from beliefs, rather than from samples of them.

    The bound of a filter has ``KL(q_t+k || p(z_t+k | y_0..t))``, with the belief at t integrated out of the prediction
    (Dowling, Zhao and Park, arXiv:2305.11278). Here that prediction is ``N(g^k(m_t), v_t + k q dt)``: mean m and
    variance v of the belief go through the model, the variance as if the field were the same everywhere nearby.

    The parent draws the start from the belief, and a path with the process noise. To a regression from z_t to z_t+k
    both are noise on what is regressed on: the field learnt is flatter than the true one, and q grows to the variance
    of two beliefs, by which the next path is noisier still (Turner and Sahani, "Two problems with variational
    expectation maximisation for time-series models", 2011, show such biases of factorised beliefs). The mean of a
    belief is no such regressor: what it misses of the state is uncorrelated with it.

    Keys, results and attributes are the parent's. Of an ensemble each member predicts on its own.

    Args:
        model: the autoencoder.
        horizon: H, most steps ahead.
        decay: of the weights.
        samples: draws of each belief, for the likelihood alone.
        mask_rate: share of steps whose belief is replaced by the prediction from the step before, in that from which is
            predicted.
        beta: weight of the divergences.

    Raises:
        ValueError: as the parent.
    """

    def _divergences(self, belief: Belief, latent: Tensor, action: Tensor, first: Tensor) -> Tensor:
        """As the parent's; predictions do not begin at ``latent``."""
        dynamics, steps = self.model.dynamics, action.shape[1]
        noise = dynamics.variance
        loc, var = (value[:, :-1] for value in self._carried(belief, action, first))
        loc = loc.unsqueeze(0).expand(dynamics.num_members, *loc.shape)  # [K, B, T - ahead, S]
        found = []
        for ahead in range(1, min(self.horizon, steps - 1) + 1):
            loc, var = dynamics.predict_members(loc, action[:, ahead - 1 : steps - 1]), var + noise
            kl = gaussian_kl(belief.loc[:, ahead:], belief.var[:, ahead:], loc, var)
            found.append(torch.where(linked(first, ahead), kl, 0.0).sum(-1).mean() / steps)
            loc, var = loc[:, :, :-1], var[:, :-1]
        found += [torch.zeros_like(self.beta)] * (self.horizon - len(found))
        return torch.stack(found)

    def _carried(self, belief: Belief, action: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance that predictions begin with, ``[B, T, S]``: those of the belief, predicted where masked."""
        if self.mask_rate == 0.0:
            return belief.loc, belief.var
        dynamics, noise = self.model.dynamics, self.model.dynamics.variance
        keep = temporal_mask(*first.shape, 1, rate=self.mask_rate, device=first.device, dtype=belief.loc.dtype)
        keep = torch.where(first.unsqueeze(-1), 1.0, keep)
        means, variances = [belief.loc[:, 0]], [belief.var[:, 0]]
        for t in range(1, first.shape[1]):
            predicted = dynamics(means[-1], action[:, t - 1])
            means.append(masked_latent(keep[:, t], belief.loc[:, t], predicted))
            variances.append(masked_latent(keep[:, t], belief.var[:, t], variances[-1] + noise))
        return torch.stack(means, 1), torch.stack(variances, 1)
