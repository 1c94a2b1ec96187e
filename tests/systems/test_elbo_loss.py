"""MultiStepELBOLoss: a loop over pairs of steps, the one-step bound, ends of episodes, mask, ensembles, gradients."""

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Independent, Normal, kl_divergence

from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.active_dynamics import (
    LatentDecoder,
    LatentDynamics,
    MultiStepELBOLoss,
    ObservationEncoder,
    SeqVAE,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, T, O = 3, 6, 5  # noqa: E741
QUIET = -40.0  # softplus of it is 0: samples without spread


def make(encoder="gru", dynamics="linear", likelihood="gaussian", device="cpu"):
    torch.manual_seed(0)
    kind = "log_linear" if likelihood == "poisson" else "linear"
    return SeqVAE(
        ObservationEncoder(O, kind=encoder, hidden_size=8, device=device),
        LatentDynamics(kind=dynamics, hidden_size=32, num_members=3, device=device),
        LatentDecoder(O, kind=kind, likelihood=likelihood, device=device),
    )


def windows(device="cpu", starts=((0, 0), (1, 3))):
    generator = torch.Generator().manual_seed(1)
    is_init = torch.zeros(B, T, 1, dtype=torch.bool)
    for row, step in starts:
        is_init[row, step] = True
    entries = {
        "observation": torch.rand(B, T, O, generator=generator),
        "action": torch.randn(B, T, 2, generator=generator),
        "is_init": is_init,
    }
    return TensorDict(entries, [B, T]).to(device)


def deterministic(model):
    """A model without spread in its beliefs, whose loss needs no samples; tiny variances are floors."""
    torch.nn.init.zeros_(model.encoder.log_var.weight)
    torch.nn.init.constant_(model.encoder.log_var.bias, QUIET)
    return model


@torch.no_grad()
def oracle(model, td, horizon, weights):
    """The same by loops in float64 from the means: of a model whose path has no noise that matters."""
    belief = model.encode(td["observation"], td["action"], td["is_init"].squeeze(-1))
    loc, var = belief.loc.detach(), belief.var.detach()
    variance = model.dynamics.variance.detach()
    recon, start, kl = 0.0, 0.0, [0.0] * horizon
    for b in range(B):
        episode = 0
        numbers = []
        for t in range(T):
            episode += int(td["is_init"][b, t, 0]) if t else 1
            numbers.append(episode)
        for t in range(T):
            channel = Normal(model.decoder(loc[b, t]), (model.decoder.log_var / 2).exp())
            recon -= float(channel.log_prob(td["observation"][b, t]).sum()) / (B * T)
            q = Independent(Normal(loc[b, t], var[b, t].sqrt()), 1)
            if t == 0 or numbers[t] != numbers[t - 1]:
                prior = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
                start += float(kl_divergence(q, prior)) / (B * T)
            state = loc[b, t]
            for k in range(horizon):
                if t + k + 1 >= T or numbers[t + k + 1] != numbers[t]:
                    break
                state = model.dynamics(state, td["action"][b, t + k])
                q = Independent(Normal(loc[b, t + k + 1], var[b, t + k + 1].sqrt()), 1)
                kl[k] += float(kl_divergence(q, Independent(Normal(state, variance.sqrt()), 1))) / (B * T)
    return recon, start, kl, start + sum(w * value for w, value in zip(weights, kl, strict=True))


def test_the_one_step_bound():
    """With one step ahead it is the usual bound: likelihood, prior at the start, divergence from each prediction."""
    model = deterministic(make())
    td = windows()
    loss = MultiStepELBOLoss(model, horizon=1, samples=400)
    found = loss(td)
    recon, start, kl, total = oracle(model, td, 1, [1.0])
    # beliefs have the least variance there is, 1e-4: what is left is the error of samples
    assert found["loss_recon"].item() == pytest.approx(recon, rel=2e-2)
    assert found["kl_start"].item() == pytest.approx(start, rel=1e-5)
    assert found["kl"].item() == pytest.approx(kl[0], rel=2e-2)
    assert found["loss_kl"].item() == pytest.approx(total, rel=2e-2)
    bound = (found["loss_recon"] + found["loss_kl"]).item()
    assert bound == pytest.approx(recon + start + kl[0], rel=2e-2)


def test_a_loop_over_pairs_of_steps():
    model = deterministic(make())
    with torch.no_grad():
        model.dynamics.raw_noise.fill_(-6.0)  # paths with little noise, whose mean the loop follows
    td = windows()
    loss = MultiStepELBOLoss(model, horizon=4, samples=600)
    found = loss(td)
    _, _, kl, total = oracle(model, td, 4, loss.weights.tolist())
    assert loss.weights.sum().item() == pytest.approx(1.0)
    # each of k - 1 steps of the path adds its variance to the squared distance: (k - 1) / 2 for each of 2 numbers
    pairs = [sum(linked_pairs(td, k)) / (B * T) for k in range(1, 5)]
    expected = [value + k * count for k, (value, count) in enumerate(zip(kl, pairs, strict=True))]
    assert found["kl"].tolist() == pytest.approx(expected, rel=3e-2)
    gap = sum(w * (e - v) for w, e, v in zip(loss.weights.tolist(), expected, kl, strict=True))
    assert found["loss_kl"].item() == pytest.approx(total + gap, rel=3e-2)


def linked_pairs(td, ahead):
    for b in range(B):
        for t in range(T - ahead):
            yield float(not td["is_init"][b, t + 1 : t + ahead + 1].any())


@pytest.mark.parametrize("encoder", ["mlp", "gru"])
@pytest.mark.parametrize("dynamics", ["mlp", "linear", "rbf", "ensemble", "rbf_ensemble"])
def test_every_parameter_learns_and_nothing_waits(encoder, dynamics):
    model = make(encoder, dynamics, "poisson")
    loss = MultiStepELBOLoss(model, mask_rate=0.5)
    td = windows()
    with no_host_sync():
        found = loss(td)
        (found["loss_recon"] + found["loss_kl"]).backward()
    assert found["kl"].shape == (5,) and not found["kl"].requires_grad
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.isfinite().all() and (param.grad != 0).any(), name


def test_steps_beyond_the_window_are_left_out():
    model, td = make(), windows()
    found = MultiStepELBOLoss(model, horizon=9)(td)
    assert (found["kl"][: T - 1] > 0).all() and (found["kl"][T - 1 :] == 0).all()
    pair = MultiStepELBOLoss(model, horizon=3)(td[:, :2])
    assert pair["kl"][0] > 0 and (pair["kl"][1:] == 0).all()


def test_nothing_is_predicted_across_the_end_of_an_episode():
    model = make("mlp")
    every = windows(starts=[(b, t) for b in range(B) for t in range(T)])
    found = MultiStepELBOLoss(model)(every)
    assert (found["kl"] == 0).all() and found["kl_start"] > 0
    assert MultiStepELBOLoss(model)(windows(starts=()))["kl_start"] < found["kl_start"]


def test_beta_is_a_number_on_the_device():
    model, td = make(), windows()
    loss = MultiStepELBOLoss(model, beta=0.5)
    torch.manual_seed(3)
    half = loss(td)
    loss.beta.fill_(1.0)
    torch.manual_seed(3)
    whole = loss(td)
    torch.testing.assert_close(whole["loss_kl"], 2 * half["loss_kl"])
    assert torch.equal(whole["loss_recon"], half["loss_recon"])
    assert torch.equal(whole["kl"], half["kl"])


def test_masked_steps_are_predictions():
    """All masked but the starts: the states are those of the model from there, whatever was observed later."""
    model = deterministic(make())
    loss = MultiStepELBOLoss(model, horizon=1, samples=1, mask_rate=1.0)
    td = windows(starts=((1, 3),))
    first = torch.zeros(B, T, dtype=torch.bool)
    first[:, 0] = first[1, 3] = True
    latent = torch.randn(1, B, T, 2)
    mixed = loss._mixed(latent, td["action"], first)
    for b in range(B):
        for t in range(T):
            begins = first[b, t]
            expected = latent[0, b, t] if begins else model.dynamics(mixed[0, b, t - 1], td["action"][b, t - 1])
            torch.testing.assert_close(mixed[0, b, t], expected)
    assert torch.equal(MultiStepELBOLoss(model)._mixed(latent, td["action"], first), latent)


@torch.no_grad()
def test_members_of_an_ensemble_predict_on_their_own():
    model, td = deterministic(make(dynamics="ensemble")), windows()
    loss = MultiStepELBOLoss(model, horizon=1, samples=200)
    found = loss(td)["kl"].item()
    belief = model.encode(td["observation"], td["action"], td["is_init"].squeeze(-1))
    each = model.dynamics.predict_members(belief.loc[:, :-1], td["action"][:, :-1], per_member=False)
    expected = 0.0
    for member in each:
        p = Independent(Normal(member, model.dynamics.variance.sqrt()), 1)
        q = Independent(Normal(belief.loc[:, 1:], belief.var[:, 1:].sqrt()), 1)
        divergence = kl_divergence(q, p)
        divergence[1, 2] = 0.0  # across the end of an episode
        expected += float(divergence.sum()) / (B * T) / len(each)
    assert found == pytest.approx(expected, rel=3e-2)


def test_a_window_begins_with_the_state_before_it():
    model, td = make(), windows(starts=())
    torch.manual_seed(5)
    without = MultiStepELBOLoss(model)(td)
    td["hidden"], td["previous_action"] = torch.zeros(B, T, 8), torch.zeros(B, T, 2)
    torch.manual_seed(5)
    assert torch.equal(MultiStepELBOLoss(model)(td)["loss_recon"], without["loss_recon"])
    td["hidden"][:, 0] = 0.9
    torch.manual_seed(5)
    assert not torch.equal(MultiStepELBOLoss(model)(td)["loss_recon"], without["loss_recon"])


@pytest.mark.parametrize("device", DEVICES)
def test_device(device):
    loss = MultiStepELBOLoss(make(device=device))
    assert loss(windows(device))["loss_kl"].device.type == device
    assert loss.weights.tolist() == pytest.approx([0.2975, 0.2380, 0.1904, 0.1523, 0.1218], abs=5e-5)


def test_refusals():
    model = make()
    with pytest.raises(ValueError, match="samples >= 1"):
        MultiStepELBOLoss(model, samples=0)
    with pytest.raises(ValueError, match="horizon >= 1"):
        MultiStepELBOLoss(model, horizon=0)
    with pytest.raises(ValueError, match="at least 2 steps"):
        MultiStepELBOLoss(model)(windows()[:, :1])
