"""Entropy and divergence without a closed form are estimates of what they are named after, and converge to it."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution
from torch.distributions import Categorical, MixtureSameFamily, Normal, kl_divergence
from torchrl.modules import TanhNormal

from torchrl_perf.modules import SquashedNormal
from torchrl_perf.objectives.action_distributions import divergence, entropies, entropy_name

DRAWS = 20_000
LOC, SCALE = torch.tensor([[0.1, -0.4], [0.3, 0.0]]), torch.tensor([[0.5, 0.4], [0.3, 0.6]])


def base(loc, scale):
    return torch.distributions.Independent(Normal(loc, scale), 1)


@pytest.mark.parametrize("kind", [SquashedNormal, TanhNormal])
def test_divergence_of_squashed_normals_is_that_of_what_they_squash(kind):
    # a map that is one to one changes no divergence
    new = LOC + torch.tensor([0.4, -0.3]), SCALE * 1.3
    got = divergence(kind(LOC, SCALE), kind(*new), DRAWS)
    torch.testing.assert_close(got, kl_divergence(base(LOC, SCALE), base(*new)), rtol=0.05, atol=0.01)
    assert (got > 0.1).all()


def mixture(loc, scale):
    """A mixture of one component: no closed form, and the numbers of its component."""
    parts = base(loc.unsqueeze(-2), scale.unsqueeze(-2))
    return MixtureSameFamily(Categorical(logits=torch.zeros(len(loc), 1)), parts)


def test_divergence_without_a_closed_form_is_sampled():
    new = LOC + torch.tensor([0.4, -0.3]), SCALE * 1.3
    old = mixture(LOC, SCALE)
    got = divergence(old, mixture(*new), DRAWS)
    torch.testing.assert_close(got, kl_divergence(base(LOC, SCALE), base(*new)), rtol=0.05, atol=0.01)
    assert divergence(old, old, 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", [SquashedNormal, TanhNormal])
def test_entropy_of_a_squashed_normal(kind):
    got, parts = entropies(kind(LOC, SCALE), DRAWS)
    # that of the normal, plus the mean logarithm of the slope of tanh
    noise = torch.randn(DRAWS, *LOC.shape)
    slope = (1 - (LOC + SCALE * noise).tanh().square()).log().sum(-1).mean(0)
    torch.testing.assert_close(got, base(LOC, SCALE).entropy() + slope, rtol=0.05, atol=0.02)
    assert parts == {}


@pytest.mark.parametrize("samples", [1, 3])
def test_closed_forms_are_exact_whatever_the_number_of_draws(samples):
    old, new = Categorical(logits=torch.tensor([0.0, 1.0])), Categorical(logits=torch.tensor([2.0, 0.0]))
    assert torch.equal(divergence(old, new, samples), kl_divergence(old, new))
    assert torch.equal(entropies(old, samples)[0], old.entropy())


def composite(shift=0.0, names=("push", "turn")):
    params = TensorDict({names[0]: {"logits": torch.tensor([[0.0, 1.0 + shift]])}}, [1])
    params[names[1]] = TensorDict({"loc": torch.full((1, 2), shift), "scale": torch.ones(1, 2)}, [1])
    kinds = {names[0]: Categorical, names[1]: base}
    return CompositeDistribution(params, kinds)


def test_parts_of_a_composite_are_added():
    old, new = composite(), composite(0.5)
    expected = sum(kl_divergence(old.dists[key], new.dists[key]) for key in old.dists)
    torch.testing.assert_close(divergence(old, new, 1), expected)
    whole, parts = entropies(old, 1)
    torch.testing.assert_close(whole, sum(parts.values()))
    assert set(parts) == {"push_entropy", "turn_entropy"}
    assert entropy_name(("agent", "push")) == ("agent", "push_entropy")


def test_composites_of_other_parts_are_refused():
    with pytest.raises(ValueError, match=r"expected the parts \['push', 'turn'\] of the old policy, received"):
        divergence(composite(), composite(names=("push", "pull")), 1)
