"""What inputs do to a point of LatentField, and where points begin."""

import pytest
import torch

from torchrl_perf.envs import LatentField
from torchrl_perf.envs.latent_field import ActionEncoder


def pairs(count=6):
    torch.manual_seed(0)
    return torch.randn(count, 2), torch.randn(count, 2)


def test_the_identity_is_the_input():
    action, latent = pairs()
    assert torch.equal(ActionEncoder("identity")(action, latent), action)
    assert LatentField(1, action_encoder="identity").action_encoder is None


def test_a_linear_encoder_is_a_matrix_that_is_the_same_everywhere():
    encoder, (action, latent) = ActionEncoder("linear", seed=3), pairs()
    push = encoder(action, latent)
    torch.testing.assert_close(push, action @ encoder.weight.T)
    assert torch.equal(push, encoder(action, latent + 1.0))
    values = torch.linalg.svdvals(encoder.weight)
    assert values.min() >= 0.7 and values.max() <= 1.3
    assert not torch.equal(encoder.weight, ActionEncoder("linear", seed=4).weight)
    assert torch.equal(encoder.weight, ActionEncoder("linear", seed=3).weight)


def test_a_perceptron_depends_on_the_point_and_pushes_nothing_without_an_input():
    encoder, (action, latent) = ActionEncoder("mlp"), pairs()
    assert not torch.allclose(encoder(action, latent), encoder(action, latent + 1.0), atol=1e-3)
    assert (encoder(torch.zeros_like(action), latent) == 0).all()
    together = encoder(action, latent)
    for row in range(len(action)):
        assert torch.equal(encoder(action[row : row + 1], latent[row : row + 1])[0], together[row])


def test_the_env_takes_a_name():
    env = LatentField(2, action_encoder="linear", world_seed=5, noise="none", process_noise=0.0, action_max=1.0)
    latent, action = torch.tensor([[0.3, 0.1]]), torch.tensor([[1.0, -0.5]])
    push = ActionEncoder("linear", seed=5)(action, latent)
    torch.testing.assert_close(env.predict(latent, action), env.predict(latent, 0 * action) + 0.1 * push)
    assert "weight" in dict(env.action_encoder.named_buffers())


@pytest.mark.parametrize("name", ["square", ""])
def test_an_unknown_name(name):
    with pytest.raises(ValueError, match=r"action_encoder: expected one of .* Remedy: one of these"):
        LatentField(1, action_encoder=name)


class TestInitialPlace:
    def test_points_begin_around_it(self):
        env = LatentField(200, initial_place=(1.0, -2.0), initial_range=0.25, seed=0)
        latent = env.reset()["latent"]
        low, high = latent.min(0).values, latent.max(0).values
        torch.testing.assert_close(low, torch.tensor([0.75, -2.25]), atol=0.02, rtol=0)
        torch.testing.assert_close(high, torch.tensor([1.25, -1.75]), atol=0.02, rtol=0)

    def test_all_in_one_place(self):
        env = LatentField(3, initial_place=(1.0, 0.5), initial_range=0.0)
        assert torch.equal(env.reset()["latent"], torch.tensor([[1.0, 0.5]]).expand(3, 2))

    def test_refusals(self):
        with pytest.raises(ValueError, match="initial_place: expected a point of two finite numbers"):
            LatentField(1, initial_place=(0.0, float("nan")))
        with pytest.raises(ValueError, match=r"extent: expected a finite number above 2\.5"):
            LatentField(1, initial_place=(1.0, 0.0), extent=2.0)
