"""GumbelCategorical: the right frequencies, and everything else as torch's Categorical."""

import pytest
import torch
from torch.distributions import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor

from torchrl_perf.modules import GumbelCategorical
from torchrl_perf.modules.distributions import DrawnNormal
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.runtime.draws import supplied


def test_frequencies(device):
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05], device=device)
    draws = GumbelCategorical(probabilities.log()).sample((100_000,))
    frequency = draws.bincount(minlength=4) / draws.numel()
    # five standard deviations of a share of 1e5 draws
    assert ((frequency - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / 1e5).sqrt()).all()


def test_rows_are_independent():
    draws = GumbelCategorical(torch.zeros(50_000, 2, 2)).sample()
    joint = (2 * draws[:, 0] + draws[:, 1]).bincount(minlength=4) / 50_000
    assert ((joint - 0.25).abs() < 5 * (0.25 * 0.75 / 5e4) ** 0.5).all()


def test_masked_actions_are_never_drawn(device):
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, 5.0, -torch.inf]], device=device)
    draws = GumbelCategorical(logits).sample((20_000,))
    assert (draws[:, 0] != 1).all()
    assert (draws[:, 1] == 1).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("sample_shape", [(), (4,), (4, 5)])
def test_shapes_and_dtype(shape, sample_shape):
    distribution = GumbelCategorical(torch.randn(*shape, 6))
    draws = distribution.sample(sample_shape)
    assert draws.shape == (*sample_shape, *shape)
    assert draws.dtype == torch.int64
    assert distribution.log_prob(draws).shape == draws.shape


def test_log_prob_entropy_mode_and_kl_are_those_of_categorical():
    logits, other = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    ours, torchs = GumbelCategorical(logits), Categorical(logits=logits)
    actions = torch.arange(5) % 4
    assert torch.equal(ours.log_prob(actions), torchs.log_prob(actions))
    assert torch.equal(ours.entropy(), torchs.entropy())
    assert torch.equal(ours.mode, torchs.mode)
    kl = torch.distributions.kl_divergence(ours, GumbelCategorical(other))
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(torchs, Categorical(logits=other)))


def test_uniform_noise_at_its_ends_still_gives_an_action(monkeypatch):
    """torch.rand returns 0 once in 2**24 draws, and half precision rounds up to 1."""
    logits = torch.tensor([1.0, -torch.inf, 0.0])
    for value in (0.0, 1.0):
        monkeypatch.setattr(torch, "rand", lambda shape, value=value, **options: torch.full(shape, value, **options))
        assert GumbelCategorical(logits).sample().item() != 1


def test_no_gradient_and_no_host_read():
    logits = torch.randn(5, 3, requires_grad=True)
    with no_host_sync():
        draws = GumbelCategorical(logits).sample()
    assert not draws.requires_grad


def test_in_an_actor_the_mode_is_taken_when_asked():
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    net = TensorDictModule(torch.nn.Identity(), ["observation"], ["logits"])
    actor = ProbabilisticActor(net, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
    td = TensorDict({"observation": torch.tensor([[0.0, 2.0, 1.0]])}, [1])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert actor(td)["action"].tolist() == [1]


class TestDrawnNormal:
    """The normal of default policies: TorchRL's, whose draws may be made ahead."""

    @pytest.mark.parametrize("sample_shape", [(), (5,)])
    def test_draws_and_log_probabilities_are_those_of_torchrl(self, sample_shape):
        loc, scale = torch.randn(7, 3, requires_grad=True), torch.rand(7, 3) + 0.1
        torch.manual_seed(0)
        ours = DrawnNormal(loc, scale).rsample(sample_shape)
        torch.manual_seed(0)
        theirs = IndependentNormal(loc, scale).rsample(sample_shape)
        assert torch.equal(ours, theirs)
        assert torch.equal(*[torch.autograd.grad(draw.square().sum(), loc)[0] for draw in (ours, theirs)])
        assert torch.equal(DrawnNormal(loc, scale).log_prob(ours), IndependentNormal(loc, scale).log_prob(ours))

    def test_takes_what_was_drawn_ahead(self):
        row = torch.full((7, 3), 2.0)
        with supplied([("normal", row)]):
            action = DrawnNormal(torch.ones(7, 3), torch.full((7, 3), 0.5)).rsample()
        assert (action == 2.0).all()
