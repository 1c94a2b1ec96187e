"""Alignment and predictions of latent dynamics: known maps, a model that is right, ends of episodes, the portrait."""

import pytest
import torch
from dynamics_runs import make
from states import run
from tensordict import TensorDict

from torchrl_perf.envs import LatentField
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.active_dynamics.evaluation import (
    Alignment,
    fit_alignment,
    make_portrait,
    prediction_scores,
    record,
)

IDENTITY = Alignment(torch.eye(2), torch.zeros(2))


class TestAlignment:
    def test_linear_finds_any_affine_map(self):
        torch.manual_seed(0)
        x, weight, bias = torch.randn(4, 50, 3), torch.randn(3, 2), torch.tensor([5.0, -7.0])
        found = fit_alignment(x, x @ weight + bias)
        torch.testing.assert_close(found.weight, weight, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.bias, bias, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found(x), x @ weight + bias, atol=1e-4, rtol=1e-4)

    def test_procrustes_finds_a_rotated_scaled_and_shifted_copy(self):
        x = torch.randn(60, 2)
        turn = torch.tensor([[0.6, 0.8], [0.8, -0.6]])  # a reflection, too
        found = fit_alignment(x, 2.5 * x @ turn + 1.0, "procrustes")
        torch.testing.assert_close(found.weight, 2.5 * turn, atol=1e-4, rtol=1e-4)
        sheared = fit_alignment(x, x @ torch.tensor([[1.0, 3.0], [0.0, 1.0]]), "procrustes").weight
        gram = sheared @ sheared.T
        torch.testing.assert_close(gram, gram[0, 0] * torch.eye(2), atol=1e-4, rtol=1e-4)

    def test_least_squares(self):
        torch.manual_seed(1)
        x, y = torch.randn(80, 2, dtype=torch.float64), torch.randn(80, 2, dtype=torch.float64)
        expected = torch.linalg.lstsq(torch.cat((x, torch.ones(80, 1, dtype=torch.float64)), 1), y).solution
        found = fit_alignment(x, y)
        torch.testing.assert_close(torch.cat((found.weight, found.bias.unsqueeze(0))), expected, atol=1e-4, rtol=1e-4)

    def test_a_collapsed_state_is_no_error(self):
        found = fit_alignment(torch.ones(9, 2), torch.randn(9, 2))
        assert found.weight.isfinite().all()

    def test_refusals(self):
        with pytest.raises(ValueError, match="'affine'"):
            fit_alignment(torch.zeros(3, 2), torch.zeros(3, 2), "affine")
        with pytest.raises(ValueError, match="one size"):
            fit_alignment(torch.zeros(3, 4), torch.zeros(3, 2), "procrustes")


class Exact(torch.nn.Module):
    """A model that knows the field."""

    def __init__(self, env):
        super().__init__()
        self.env = env

    def predict(self, latent, actions):
        states = []
        for action in actions.unbind(-2):
            latent = self.env.predict(latent, action)
            states.append(latent)
        return torch.stack(states, -2)


def trajectory(limit=None, steps=14):
    env = LatentField(5, process_noise=0.0, max_episode_steps=limit, seed=0)
    td = env.rollout(steps, break_when_any_done=False, auto_cast_to_device=False)
    td["belief"] = td["latent"].clone()
    return env, td.select("belief", "action", "latent", "is_init")


class TestScores:
    @pytest.mark.parametrize("limit", [None, 6])
    def test_the_true_field_predicts_all(self, limit):
        env, td = trajectory(limit)
        scores = prediction_scores(Exact(env), td, 4, IDENTITY)
        torch.testing.assert_close(scores.r2, torch.ones(5), atol=1e-5, rtol=0)
        assert scores.persistence[0] == scores.still[0] == 1 and torch.equal(scores.persistence, scores.still)
        assert (scores.still.diff() < 0).all() and scores.still[4] < 0.99

    def test_by_hand(self):
        # one number that grows by 1 a step; it is predicted to stand still
        latent = torch.arange(4.0).view(1, 4, 1)
        td = TensorDict({"latent": latent, "belief": latent, "action": torch.zeros(1, 4, 1)}, [1, 4])
        td["is_init"] = torch.zeros(1, 4, 1, dtype=torch.bool)
        model = Exact(None)
        model.predict = lambda z, a: z.unsqueeze(-2).expand(*z.shape[:-1], a.shape[-2], 1)
        scores = prediction_scores(model, td, 2, Alignment(torch.eye(1), torch.zeros(1)))
        # two starts, spread 1/2 around their mean, errors of 0, 1 and 2 each
        expected = torch.tensor([1.0, 1 - 2 / 0.5, 1 - 8 / 0.5])
        torch.testing.assert_close(scores.r2, expected)
        torch.testing.assert_close(scores.persistence, expected)

    def test_nothing_waits(self):
        env, td = trajectory()
        with no_host_sync():
            prediction_scores(Exact(env), td, 3, fit_alignment(td["belief"], td["latent"]))

    @pytest.mark.parametrize("horizon", [0, 14])
    def test_a_horizon_that_there_is_not(self, horizon):
        env, td = trajectory()
        with pytest.raises(ValueError, match="from 1 to 13"):
            prediction_scores(Exact(env), td, horizon, IDENTITY)


class TestTrainer:
    def test_evaluation_repeats_itself_and_leaves_the_run_alone(self):
        trainer, other = run(make(), 1), run(make(), 1)
        first, again = trainer.evaluate(), trainer.evaluate()
        assert first.r2 == again.r2 and len(first.r2) == 4
        assert first.r2 != trainer.evaluate(seed=1).r2
        assert "R^2 3 steps ahead" in str(first)
        for one in (trainer, other):
            torch.manual_seed(1)
            if one is trainer:
                trainer.evaluate()
            run(one, 1)
        for mine, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_a_record_is_of_random_inputs_and_of_held_ones(self):
        trainer = make()
        batch = record(trainer.model, LatentField(4, action_max=0.5), steps=30, seed=3)
        assert batch.shape == (4, 30) and batch["action"].abs().max() > 0.4
        moved = batch["action"].diff(dim=1).abs().amax((1, 2))
        assert (moved[0::2] > 0.4).all() and (moved[1::2] == 0).all()
        assert not torch.equal(batch["action"][1, 0], batch["action"][3, 0])
        again = record(trainer.model, LatentField(4, action_max=0.5), steps=30, seed=3)
        assert torch.equal(batch["action"], again["action"]) and torch.equal(batch["latent"], again["latent"])

    def test_portrait_in_true_coordinates(self):
        trainer = run(make(), 1)
        weight = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
        alignment = Alignment(weight, torch.tensor([0.3, -0.2]))
        env = LatentField(1)
        portrait = make_portrait(trainer.model, env, alignment, title="cycle")
        x, y = 3, 20
        point = torch.stack((portrait.axis[x], portrait.axis[y]))
        assert torch.equal(portrait.true[y, x], env.field(point))
        learned = torch.linalg.solve(weight.T, point - alignment.bias)
        expected = trainer.model.dynamics.field(learned).detach() @ weight
        torch.testing.assert_close(portrait.learned[y, x], expected, atol=1e-5, rtol=1e-4)
        assert trainer.portrait().visited.shape == (24, 2)
        with pytest.raises(ValueError, match="latent_size=2"):
            make_portrait(make(latent_size=3).model, env, alignment)
