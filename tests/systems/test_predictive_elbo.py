"""PredictiveELBOLoss: divergences by hand, a linear system whose rate the parent's bound gets wrong, ends, masks."""

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Independent, Normal, kl_divergence

from torchrl_perf.functional.losses.elbo import gaussian_kl
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.active_dynamics import LatentDecoder, LatentDynamics, ObservationEncoder, SeqVAE
from torchrl_perf.systems.active_dynamics.elbo import MultiStepELBOLoss
from torchrl_perf.systems.active_dynamics.latent_maps import Belief
from torchrl_perf.systems.active_dynamics.predictive_elbo import PredictiveELBOLoss

B, T, O = 3, 6, 5  # noqa: E741


def make(dynamics="linear"):
    torch.manual_seed(0)
    parts = LatentDynamics(kind=dynamics, hidden_size=32, num_members=3), LatentDecoder(O, likelihood="poisson")
    return SeqVAE(ObservationEncoder(O, hidden_size=8), *parts)


def windows():
    torch.manual_seed(1)
    is_init = torch.zeros(B, T, 1, dtype=torch.bool)
    is_init[0, 0] = is_init[1, 3] = True
    entries = {"observation": torch.rand(B, T, O), "action": torch.randn(B, T, 2), "is_init": is_init}
    return TensorDict(entries, [B, T])


@torch.no_grad()
def test_divergences_by_hand():
    model, td, horizon = make(), windows(), 3
    loss = PredictiveELBOLoss(model, horizon=horizon)
    found = loss(td)
    belief = model.encode(td["observation"], td["action"], td["is_init"].squeeze(-1))
    expected = [0.0] * horizon
    for b in range(B):
        for t in range(T):
            state = belief.loc[b, t]
            for k in range(1, horizon + 1):
                if t + k >= T or td["is_init"][b, t + k]:
                    break
                state = model.dynamics(state, td["action"][b, t + k - 1])
                spread = (belief.var[b, t] + k * model.dynamics.variance).sqrt()
                q = Independent(Normal(belief.loc[b, t + k], belief.var[b, t + k].sqrt()), 1)
                expected[k - 1] += float(kl_divergence(q, Independent(Normal(state, spread), 1))) / (B * T)
    assert found["kl"].tolist() == pytest.approx(expected, rel=1e-4)
    total = found["kl_start"] + (loss.weights * found["kl"]).sum()
    assert found["loss_kl"].item() == pytest.approx(total.item(), rel=1e-5)


def test_the_rate_of_a_linear_system_is_found_where_samples_make_it_too_small():
    """Beliefs of z' = z + z dt with the variance 0.3 around means that are right."""
    model = make()
    idle = torch.zeros(400, 4, 2)
    moved = torch.randn(400, 1, 2) * 1.1 ** torch.arange(4.0).view(4, 1)
    belief = Belief(moved, torch.full((400, 4, 2), 0.3), None)
    first = torch.tensor([True, False, False, False]).expand(400, 4)
    rates = {}
    for kind in (PredictiveELBOLoss, MultiStepELBOLoss):
        loss, dynamics = kind(model, horizon=2), model.dynamics
        torch.nn.init.eye_(dynamics.net.weight)
        torch.nn.init.zeros_(dynamics.net.bias)
        optimizer = torch.optim.Adam(dynamics.parameters(), lr=0.05)
        for _ in range(150):
            optimizer.zero_grad()
            samples = belief.loc + 0.3**0.5 * torch.randn(8, 400, 4, 2)
            loss._divergences(belief, samples, idle, first).sum().backward()
            optimizer.step()
        rates[kind] = dynamics.net.weight.diagonal().mean().item()
    assert rates[PredictiveELBOLoss] == pytest.approx(1.0, abs=0.1)
    assert rates[MultiStepELBOLoss] < 0.0


@pytest.mark.parametrize("dynamics", ["mlp", "rbf", "ensemble", "rbf_ensemble"])
def test_every_parameter_learns_and_nothing_waits(dynamics):
    model = make(dynamics)
    loss = PredictiveELBOLoss(model, horizon=9, mask_rate=0.5)
    with no_host_sync():
        found = loss(windows())
        (found["loss_recon"] + found["loss_kl"]).backward()
    assert found["kl"].shape == (9,) and not found["kl"][5:].any()
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.isfinite().all() and (param.grad != 0).any(), name


@torch.no_grad()
def test_where_all_is_masked_the_model_carries_mean_and_variance():
    model, td = make("rbf"), windows()
    loss = PredictiveELBOLoss(model, horizon=1, mask_rate=1.0)
    belief = model.encode(td["observation"], td["action"], td["is_init"].squeeze(-1))
    first = td["is_init"].squeeze(-1).clone()
    first[:, 0] = True
    loc, var = loss._carried(belief, td["action"], first)
    noise = model.dynamics.variance
    torch.testing.assert_close(loc[0, 2:3], model.predict(belief.loc[0, 0], td["action"][0, :2])[1:])
    torch.testing.assert_close(var[0, 2], belief.var[0, 0] + 2 * noise)
    torch.testing.assert_close(loc[1, 3], belief.loc[1, 3])  # an episode begins
    expected = gaussian_kl(belief.loc[0, 1], belief.var[0, 1], model.dynamics(loc[0, 0], td["action"][0, 0]), var[0, 1])
    assert loss(td[:1])["kl"][0].item() > expected.item() / T
