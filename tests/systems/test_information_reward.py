"""InformationReward: the input matrix among the parameters, whole matrices by hand, and recomputed information."""

import pytest
import torch

from torchrl_perf.functional.losses.information import (
    _eliminated,
    embedding_information_gain,
    fisher_matrix,
    information_gain,
)
from torchrl_perf.systems.active_dynamics import InformationReward, LatentDynamics


def plans(steps=3):
    torch.manual_seed(1)
    return torch.randn(2, 5, steps + 1, 2), torch.randn(2, 5, steps, 2)


def rows_of(states, actions):
    """Sensitivities of a linear field's step to ``A``, ``b`` and ``B``: ``[T, 5]``."""
    return 0.1 * torch.cat((states, torch.ones_like(states[..., :1]), actions), -1)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_gain_of_fewer_rows_than_parameters_is_that_of_the_matrices(outputs):
    torch.manual_seed(0)
    root, sensitivity = torch.randn(6, 6, dtype=torch.float64), torch.randn(4, 3, 2, outputs, 6, dtype=torch.float64)
    covariance = root @ root.T + torch.eye(6)
    variance = torch.rand(3, 2, outputs, dtype=torch.float64) + 0.5
    found = information_gain(covariance, sensitivity, variance, discount=0.5)
    matrix = fisher_matrix(sensitivity, variance, discount=0.5)
    torch.testing.assert_close(found, embedding_information_gain(covariance, matrix))
    assert found[1, 2].item() == pytest.approx(torch.logdet(torch.eye(6) + covariance @ matrix[1, 2]).item())
    assert information_gain(-covariance, sensitivity, 0.1).isnan().any()


def test_elimination_is_the_log_determinant():
    torch.manual_seed(0)
    rows = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    matrix = rows @ rows.mT + torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(_eliminated(matrix), torch.logdet(matrix))
    assert _eliminated(matrix - 100.0 * torch.eye(6)).isnan().all()


def test_the_input_matrix_is_among_the_parameters():
    model = LatentDynamics(kind="linear")
    states, actions = plans()
    found = {
        kind: InformationReward(model, kind, discount=1.0, inputs=True)(states, actions)
        for kind in ("fisher_d", "embedding")
    }
    rows = rows_of(states[1, 3, :-1], actions[1, 3])
    matrix = rows.T @ rows / model.variance.mean()
    gain = (1 + matrix.diagonal()).log().sum().item()
    assert found["fisher_d"][1, 3].item() == pytest.approx(gain, rel=1e-4)
    assert found["embedding"][1, 3].item() == pytest.approx(torch.logdet(torch.eye(5) + matrix).item(), rel=1e-4)


def test_an_input_that_never_changes_says_less_than_one_that_does():
    """At one state: the effect of a constant input cannot be told from the field's own velocity."""
    reward = InformationReward(LatentDynamics(kind="linear"), "embedding", inputs=True, discount=1.0)
    still = torch.zeros(1, 2, 5, 2)
    actions = torch.ones(1, 2, 4, 2)
    actions[0, 1, ::2] = -1.0
    for _ in range(2):
        constant, changing = reward(still, actions)[0].tolist()
        assert changing > constant
        reward.assess(torch.zeros(500, 2), torch.ones(500, 2), 500)
    # what is known is the sum of the two effects alone
    assert changing > 10 * constant
    diagonal = InformationReward(reward.dynamics, "fisher_d", inputs=True)(still, actions)[0]
    assert diagonal[0].item() == pytest.approx(diagonal[1].item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["fisher_d", "embedding"])
def test_knowledge_is_found_anew(kind):
    model = LatentDynamics(kind="linear")
    reward = InformationReward(model, kind, inputs=True)
    states, actions = torch.randn(6, 2), torch.randn(6, 2)
    reward.observe(10 * states, actions)
    reward.assess(states.view(2, 3, 2), actions.view(2, 3, 2), torch.tensor(60))
    rows = rows_of(states, actions)
    matrix = 10 * rows.T @ rows / model.variance.mean().detach()
    expected = matrix if kind == "embedding" else matrix.diagonal()
    torch.testing.assert_close(reward.information, expected, rtol=1e-4, atol=1e-4)
    if kind == "embedding":
        torch.testing.assert_close(reward.covariance, torch.linalg.inv(torch.eye(5) + matrix), rtol=1e-3, atol=1e-5)
    reward.assess(torch.full((1, 2), torch.nan), torch.zeros(1, 2), 1)
    assert reward.information.isfinite().all()


@pytest.mark.parametrize("kind", ["disagreement", "rnd"])
def test_others_remember_nothing(kind):
    reward = InformationReward(LatentDynamics(kind="ensemble"), kind, inputs=True)
    reward.assess(torch.zeros(3, 2), torch.zeros(3, 2), 3)
    assert not hasattr(reward, "information")


@pytest.mark.parametrize("kind", ["fisher_d", "fisher_a", "embedding", "disagreement", "rnd"])
def test_inputs_cost_their_square(kind):
    dynamics = LatentDynamics(kind="ensemble" if kind == "disagreement" else "linear", num_members=3)
    states, actions = plans()
    torch.manual_seed(0)
    free = InformationReward(dynamics, kind, discount=0.5)
    torch.manual_seed(0)
    costly = InformationReward(dynamics, kind, discount=0.5, input_cost=2.0)
    paid = free(states, actions) - costly(states, actions)
    squares = 2.0 * actions.square().sum(-1)
    expected = squares if kind in ("disagreement", "rnd") else (squares * torch.tensor([1.0, 0.5, 0.25])).sum(-1)
    torch.testing.assert_close(paid, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"a cost of at least 0, received .* -1\.0\. Remedy"):
        InformationReward(dynamics, kind, input_cost=-1.0)
