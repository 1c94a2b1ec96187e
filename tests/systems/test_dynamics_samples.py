"""Samples until something is known, where the answer is known, and where a field is learnt from one place."""

import dataclasses

import pytest
import torch

from torchrl_perf.bench.curves_dynamics import STATED, explored, samples_to
from torchrl_perf.envs import LatentField
from torchrl_perf.modules.icem import ICEMPlanner, ICEMSettings
from torchrl_perf.systems.active_dynamics import (
    ACTIVE_DYNAMICS_PRESETS,
    ActiveDynamicsConfig,
    InformationReward,
    LatentDynamics,
    UniformInputs,
)
from torchrl_perf.systems.active_dynamics.config import FROM_ONE_PLACE

WANTED = 0.002  # variance


def test_the_first_evaluation_counts():
    assert samples_to(0.5, [10, 20, 30, 40], [0.9, 0.5, 0.7, 0.1]) == 20
    assert samples_to(0.05, [10, 20], [0.9, 0.5]) is None


class TestKnownAnswer:
    """What inputs do, at a point that stays: variance ``v / (n dt^2 E[a^2])`` of each number of the input matrix.

    ``E[a^2]`` is the bound's square for inputs at their bounds, a third of it for uniform ones.
    """

    def samples(self, kind, wanted=WANTED):
        torch.manual_seed(0)
        model = LatentDynamics(kind="linear")
        known = InformationReward(model, "embedding", inputs=True, memory=1.0, prior=1e-3)
        spec = LatentField(1, action_max=2.0).action_spec
        settings = ICEMSettings(horizon=2, candidates=24, iterations=3, elites=6)
        planner = ICEMPlanner(model, known, spec=spec, settings=settings)
        uniform = UniformInputs(spec)
        still, plan, elites = torch.zeros(1, 2), torch.zeros(1, 2, 2), torch.zeros(1, settings.kept, 2, 2)
        for count in range(1, 2_000):
            if kind == "planned":
                decision = planner.decide(still, plan, elites, None, planner.draw(1))
                action, plan, elites = decision.action, decision.plan, decision.elites
            else:
                action = torch.lerp(uniform.low, uniform.high, torch.rand(1, 2))
            known.observe(still, action)
            # the last two parameters are the inputs' effects on one of the numbers
            if known.covariance.diagonal()[-2:].mean() < wanted:
                return count, model.variance.mean().item()
        raise AssertionError("never known")

    def test_planned_inputs_need_the_least_samples_there_are(self):
        count, variance = self.samples("planned")
        assert count == pytest.approx(variance / (WANTED * 0.1**2 * 2.0**2), rel=0.2)

    def test_random_inputs_need_three_times_as_many(self):
        count, variance = self.samples("random")
        assert count == pytest.approx(3.0 * variance / (WANTED * 0.1**2 * 2.0**2), rel=0.2)


class TestHeldInputs:
    def test_each_input_is_held_for_its_steps_and_begins_anew_with_an_episode(self):
        env = LatentField(3, max_episode_steps=5, seed=0)
        policy = UniformInputs(env.action_spec, hold=3)
        held = env.append_transform(policy.make_state())
        with torch.no_grad():
            action = held.rollout(12, policy, break_when_any_done=False)["action"]
        changed = (action[:, 1:] != action[:, :-1]).any(-1)
        # within episodes after 3 steps, and at the first step of each
        assert changed.tolist() == [[t % 5 in (0, 3) for t in range(1, 12)]] * 3
        assert (action.abs() <= env.action_max).all()

    def test_fresh_inputs_need_no_state(self):
        policy = UniformInputs(LatentField(2).action_spec)
        assert policy.out_keys == ["action"] and not policy.make_state().specs
        with pytest.raises(ValueError, match="hold: expected at least 1 step"):
            UniformInputs(LatentField(2).action_spec, hold=0)


@pytest.mark.parametrize("field", STATED)
def test_presets_from_one_place(field):
    config = ACTIVE_DYNAMICS_PRESETS[f"{field}{FROM_ONE_PLACE}"]
    assert (config.field, config.max_episode_steps, config.extent) == (field, 0, 0.0)
    assert config.action_max <= 1.0 and config.start_range <= 0.1
    assert ActiveDynamicsConfig.for_task(config.env) == config


def test_planned_inputs_learn_both_wells_sooner():
    """A seed on which settings were chosen; what others say is in the committed curves."""
    torch.set_num_threads(1)
    preset = ACTIVE_DYNAMICS_PRESETS[f"duffing{FROM_ONE_PLACE}"]
    settings = {"seed": 101, "total_steps": 960, "device": "cpu", "mode": "eager", "logger": "none"}
    found = {
        inputs: explored(dataclasses.replace(preset, inputs=inputs, **settings)) for inputs in ("embedding", "random")
    }
    errors = {inputs: row["evaluation"]["trained"]["error"] for inputs, row in found.items()}
    assert errors["embedding"] < 0.6 * errors["random"], errors
    assert found["embedding"]["curves"]["error"]["value"][0] > 0.5


@pytest.mark.long
def test_half_the_samples_of_random_inputs_on_a_field_with_two_wells():
    """Three seeds that no setting was chosen on."""
    torch.set_num_threads(1)
    preset = ACTIVE_DYNAMICS_PRESETS[f"duffing{FROM_ONE_PLACE}"]
    common = {"device": "cpu", "mode": "eager", "logger": "none"}
    total = {"disagreement": 0.0, "random": 0.0}
    for inputs in total:
        model = {"dynamics": "rbf_ensemble"} if inputs == "disagreement" else {"total_steps": 2_880}
        for seed in (0, 1, 2):
            config = dataclasses.replace(preset, inputs=inputs, seed=seed, **model, **common)
            total[inputs] += explored(config)["evaluation"]["trained"]["samples"]
    assert total["disagreement"] < 0.75 * total["random"], total
