"""Errors over a region, for models whose error is known; a known map of channels; plans that lead to a goal."""

import pytest
import torch
from dynamics_runs import make
from states import run

from torchrl_perf.envs import LatentField
from torchrl_perf.envs.latent_field import ObservationMap
from torchrl_perf.systems.active_dynamics import InformationReward, LatentDecoder, LatentDynamics
from torchrl_perf.systems.active_dynamics.evaluation import Alignment
from torchrl_perf.systems.active_dynamics.region import region_error, region_points

IDENTITY = Alignment(torch.eye(2), torch.zeros(2))


class Linear(torch.nn.Module):
    """A model of the field ``rate z``, in coordinates ``z = x @ weight + bias``."""

    def __init__(self, rate, alignment=IDENTITY):
        super().__init__()
        self.rate, self.alignment = rate, alignment

    def predict(self, latent, actions):
        grown = self.alignment(latent) * (1 + 0.1 * self.rate) ** actions.shape[-2]
        found = (grown - self.alignment.bias) @ torch.linalg.inv(self.alignment.weight)
        return found.unsqueeze(-2).expand(*actions.shape[:-1], 2)


def field(rate=-1.0):
    return LatentField(1, field=lambda z: rate * z, process_noise=0.3)


@pytest.mark.parametrize("horizon", [1, 7])
def test_the_error_of_a_wrong_rate(horizon):
    points = region_points(1.3)
    found = region_error(Linear(-0.5), field(-1.0), IDENTITY, points, horizon=horizon)
    true, learnt = 0.9**horizon, 0.95**horizon
    assert found.item() == pytest.approx((learnt - true) ** 2 / (true - 1) ** 2, rel=1e-4)
    assert region_error(Linear(0.0), field(), IDENTITY, points, horizon=horizon).item() == pytest.approx(1.0)


def test_a_right_model_in_other_coordinates():
    turned = Alignment(torch.tensor([[0.0, 2.0], [-1.0, 0.5]]), torch.tensor([3.0, -1.0]))
    assert region_error(Linear(-1.0, turned), field(), turned, region_points(1.0), horizon=5).item() < 1e-9
    assert region_error(Linear(-1.0, turned), field(), IDENTITY, region_points(1.0), horizon=5).item() > 0.1


def test_points_cover_the_square():
    points = region_points(2.0)
    assert points.shape == (225, 2) and points.abs().max() == 2.0
    assert torch.equal(points.mean(0).abs() < 1e-6, torch.tensor([True, True]))
    assert points.unique(dim=0).shape == (225, 2)


def test_the_error_of_a_trainer_does_not_change_the_run():
    trainer = run(make(known_map=True), 1)
    state, latent = torch.get_rng_state(), trainer.field_env.state_latent.clone()
    assert trainer.region_error() == trainer.region_error() > 0
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(latent, trainer.field_env.state_latent)
    trainer.close()


@pytest.mark.parametrize(
    ("kind", "decoder"), [("log_linear", "log_linear"), ("linear", "linear"), ("identity", "linear")]
)
def test_a_known_map_is_the_worlds_and_stays_so(kind, decoder):
    likelihood = "poisson" if kind == "log_linear" else "gaussian"
    size = 2 if kind == "identity" else 6
    options = {"observation": kind, "observation_size": size, "decoder": decoder, "likelihood": likelihood}
    trainer = run(make(known_map=True, **options), 2)
    z = torch.randn(5, 2)
    torch.testing.assert_close(trainer.model.decoder(z), trainer.field_env.observation_map(z))
    assert "model.decoder.net.weight" not in trainer._named
    trainer.close()


def test_a_map_that_no_decoder_equals():
    with pytest.raises(ValueError, match=r"expected a map that the decoder can equal, received 'mlp'"):
        LatentDecoder(4, kind="linear", likelihood="gaussian").be(ObservationMap("mlp", 4))
    with pytest.raises(ValueError, match="received 'linear' of 5 channels"):
        LatentDecoder(4, kind="linear", likelihood="gaussian").be(ObservationMap("linear", 5))


def test_what_a_goal_is_worth():
    torch.manual_seed(0)
    states, actions = torch.randn(2, 3, 5, 2), torch.randn(2, 3, 4, 2)
    far = (states[:, :, 1:] - torch.tensor([1.0, -1.0])).square().sum(-1)
    dynamics = LatentDynamics(kind="linear")
    alone = InformationReward(dynamics, "goal", goal=(1.0, -1.0), goal_weight=9.0, input_cost=0.5)
    torch.testing.assert_close(alone(states, actions), -far - 0.5 * actions.square().sum(-1))
    plain = InformationReward(dynamics, "fisher_d", discount=0.5)
    beside = InformationReward(dynamics, "fisher_d", discount=0.5, goal=(1.0, -1.0), goal_weight=2.0)
    weights = torch.tensor([1.0, 0.5, 0.25, 0.125])
    paid = plain(states, actions) - beside(states, actions)
    torch.testing.assert_close(paid, 2.0 * (far * weights).sum(-1), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"goal: expected a point of 2 numbers, received None"):
        InformationReward(dynamics, "goal")


def test_what_lies_beyond_the_region_costs():
    states, actions = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 3, 2)
    states[0, 0, 1:] = torch.tensor([[0.9, -0.9], [1.5, 0.0], [-2.0, 1.2]])
    reward = InformationReward(LatentDynamics(kind="linear"), "goal", goal=(0.0, 0.0), region=1.0, region_weight=10.0)
    within = -states[:, :, 1:].square().sum(-1)
    expected = within - 10.0 * torch.tensor([0.0, 0.25, 1.04])
    torch.testing.assert_close(reward(states, actions), expected)


def test_plans_lead_to_the_goal():
    """With the right model, from the middle of a field that is still, at full speed along the way."""
    options = {"inputs": "goal", "goal": (1.0, 0.5), "known_map": True, "decoder": "log_linear", "random_steps": 0}
    trainer = make(**options, plan_horizon=8, candidates=24, plan_rounds=3, elites=6)
    with torch.no_grad():
        trainer.model.dynamics.weight.zero_()
    planner = trainer.policy.inputs
    state, plan, elites = torch.zeros(1, 2), torch.zeros(1, 8, 2), torch.zeros(1, planner.settings.kept, 8, 2)
    torch.manual_seed(0)
    for _ in range(25):
        decision = planner.decide(state, plan, elites, None, planner.draw(1))
        state, plan, elites = trainer.model.dynamics(state, decision.action), decision.plan, decision.elites
    trainer.close()
    assert (state - torch.tensor([1.0, 0.5])).norm() < 0.2
