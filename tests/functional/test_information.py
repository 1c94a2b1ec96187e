"""Rewards for informative inputs against dense float64 computations: determinants, inverses, loops, closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional import (
    a_optimality,
    d_optimality,
    embedding_information_gain,
    ensemble_disagreement,
    fisher_diagonal,
)
from torchrl_perf.functional.losses.information import discount_weights, discounted_return, fisher_matrix
from torchrl_perf.runtime import no_host_sync

F64 = torch.float64


def dense_fisher(sensitivity, variance, discount):
    """Fisher matrix of one trajectory [T, S, F], measurement by measurement."""
    steps, size, count = sensitivity.shape
    total = torch.zeros(count, count, dtype=F64)
    for t in range(steps):
        for s in range(size):
            row = sensitivity[t, s].double()
            total += discount**t * torch.outer(row, row) / float(variance[t, s])
    return total


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.floats(0.5, 1.0))
def test_fisher_information(steps, size, count, discount):
    sensitivity = torch.randn(2, 3, steps, size, count)
    variance = torch.rand(3, steps, size) + 0.1  # broadcasts over the first dim
    matrix = fisher_matrix(sensitivity, variance, discount=discount)
    diagonal = fisher_diagonal(sensitivity, variance, discount=discount)
    assert matrix.shape == (2, 3, count, count) and diagonal.shape == (2, 3, count)
    for i in range(2):
        for j in range(3):
            dense = dense_fisher(sensitivity[i, j], variance[j], discount)
            torch.testing.assert_close(matrix[i, j].double(), dense, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(diagonal[i, j].double(), dense.diagonal(), rtol=1e-4, atol=1e-4)


def test_fisher_is_the_curvature_of_the_log_likelihood():
    """Of a model by radial basis functions, by autograd: the Hessian of the expected negative log-likelihood."""
    z, centres = torch.randn(6, 2, dtype=F64), torch.randn(4, 2, dtype=F64)
    features = torch.exp(-torch.cdist(z, centres).square())  # [T, F]

    def loss(weights):
        rest = features @ weights - features @ torch.ones(4, dtype=F64)
        return (rest**2).sum() / (2 * 0.3)

    hessian = torch.autograd.functional.hessian(loss, torch.ones(4, dtype=F64))
    torch.testing.assert_close(fisher_matrix(features.unsqueeze(-2), 0.3), hessian)
    torch.testing.assert_close(fisher_diagonal(features.unsqueeze(-2), 0.3), hessian.diagonal())


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0, 50), min_size=1, max_size=6), st.floats(0.1, 5.0))
def test_a_and_d_optimality(numbers, prior):
    information = torch.tensor([numbers, numbers[::-1]], dtype=F64)
    dense = torch.diag(information[0]) + prior * torch.eye(len(numbers), dtype=F64)
    a = a_optimality(information, prior)
    torch.testing.assert_close(a[0], -torch.trace(torch.linalg.inv(dense)))
    d = d_optimality(information, prior)
    torch.testing.assert_close(d[0], torch.logdet(dense) - len(numbers) * math.log(prior), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a[0], a[1])
    assert (a < 0).all() and (d >= 0).all()


def test_by_hand():
    information = torch.tensor([1.0, 3.0])
    assert a_optimality(information, 0.0).item() == pytest.approx(-(1 + 1 / 3))
    assert d_optimality(information).item() == pytest.approx(math.log(2) + math.log(4))
    assert a_optimality(torch.tensor([1.0, 0.0]), 0.0).item() == -math.inf
    assert discount_weights(4, 0.5).tolist() == [1.0, 0.5, 0.25, 0.125]
    assert discounted_return(torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 8.0]]), 0.5).tolist() == [3.0, 2.0]
    assert discounted_return(torch.tensor([1.0, 2.0])).item() == 3.0
    assert fisher_diagonal(torch.tensor([[[2.0, 0.0]], [[1.0, 3.0]]]), 0.5, discount=0.9).tolist() == pytest.approx(
        [(4 + 0.9) / 0.5, 0.9 * 9 / 0.5]
    )


def test_more_information_is_a_higher_reward():
    less = torch.rand(5, 8)
    more = less + torch.rand(5, 8)
    assert (a_optimality(more) > a_optimality(less)).all()
    assert (d_optimality(more) > d_optimality(less)).all()


def spd(*shape, size):
    root = torch.randn(*shape, size, size, dtype=F64)
    return root @ root.mT + 0.1 * torch.eye(size, dtype=F64)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_embedding_information_gain(size, device):
    covariance, rows = spd(3, 1, size=size).to(device), torch.randn(3, 4, 5, 1, size, dtype=F64, device=device)
    information = fisher_matrix(rows, 0.7)
    gain = embedding_information_gain(covariance, information)
    unit = torch.eye(size, dtype=F64, device=device)
    dense = torch.linalg.slogdet(unit + covariance @ information)
    assert gain.shape == (3, 4) and (dense.sign > 0).all()
    torch.testing.assert_close(gain, dense.logabsdet)
    # the posterior covariance is the inverse of prior and measured information together
    after = torch.linalg.inv(torch.linalg.inv(covariance) + information)
    torch.testing.assert_close(gain, torch.logdet(covariance) - torch.logdet(after))
    low = embedding_information_gain(covariance.float(), information.float())
    torch.testing.assert_close(low.double(), gain, rtol=1e-3, atol=1e-3)


def test_embedding_information_gain_of_nothing_and_of_no_covariance():
    unit = torch.eye(3)
    assert embedding_information_gain(unit, torch.zeros(3, 3)).item() == 0.0
    assert embedding_information_gain(-unit, unit).isnan().item()
    with pytest.raises(ValueError, match=r"expected covariance \[\*, E, E\].*received \[3, 3\] and \[2, 3\]"):
        embedding_information_gain(unit, unit[:2])


def test_ensemble_disagreement():
    prediction = torch.randn(5, 3, 4, 2)
    ours = ensemble_disagreement(prediction)
    assert ours.shape == (3, 4)
    members = prediction[:, 1, 2].double().tolist()
    expected = 0.0
    for s in range(2):
        mean = sum(m[s] for m in members) / 5
        expected += sum((m[s] - mean) ** 2 for m in members) / 5
    assert ours[1, 2].item() == pytest.approx(expected, rel=1e-5)
    assert (ensemble_disagreement(prediction[:1]) == 0).all()


def test_agree_in_all_forms(variant):
    sensitivity = torch.randn(3, 4, 5, 2, 6, device=variant.device)
    members = torch.randn(4, 3, 4, 2, device=variant.device)

    def rewards(sensitivity, members):
        information = fisher_diagonal(sensitivity, 0.5, discount=0.9)
        return a_optimality(information), d_optimality(information), ensemble_disagreement(members)

    run = variant(rewards)
    for _ in range(4):
        result = run(sensitivity, members)
    for ours, theirs in zip(result, rewards(sensitivity, members), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_embedding_information_gain_is_captured():
    from torchrl_perf.runtime import capture

    covariance, rows = spd(64, 1, size=6).float().cuda(), torch.randn(64, 32, 10, 1, 6, device="cuda")

    def gain(covariance, rows):
        return embedding_information_gain(covariance, fisher_matrix(rows))

    run = capture(gain)
    for _ in range(4):
        result = run(covariance, rows)
    torch.testing.assert_close(result, gain(covariance, rows), rtol=1e-4, atol=1e-4)


def test_no_host_wait(device):
    sensitivity = torch.randn(2, 3, 2, 4, device=device)
    unit = torch.eye(4, device=device)
    with no_host_sync(device):
        information = fisher_diagonal(sensitivity, 0.1, discount=0.99)
        a_optimality(information)
        d_optimality(information)
        embedding_information_gain(unit, fisher_matrix(sensitivity))
        ensemble_disagreement(sensitivity)


def test_sensitivities_without_steps():
    with pytest.raises(ValueError, match=r"expected \[\*, T, S, F\].*received \[5, 4\]. Remedy: unsqueeze"):
        fisher_diagonal(torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"expected \[\*, T, S, F\]"):
        fisher_matrix(torch.zeros(5, 4))
