"""Masked categoricals: hand numbers, torch's Categorical on the allowed choices, rows that allow none, gradients."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from torchrl_perf.functional.losses.dqn import q_targets
from torchrl_perf.functional.masked import (
    chosen,
    effective_mask,
    gumbel_argmax,
    masked_entropy,
    masked_expectation,
    masked_kl,
    masked_log_softmax,
    of_agents,
    of_rows,
)

F64 = torch.float64


def test_hand_computed():
    log_probs = masked_log_softmax(torch.tensor([[1.0, 5.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([[1, 0, 1]]).bool())
    assert log_probs[0].tolist() == pytest.approx([-math.log(2), -math.inf, -math.log(2)])
    assert masked_entropy(log_probs).tolist() == pytest.approx([math.log(2)] * 2)
    assert masked_expectation(log_probs, torch.tensor([[2.0, math.nan, 4.0]]))[0] == pytest.approx(3.0)


def test_is_the_categorical_of_the_allowed_choices():
    logits, others = torch.randn(2, 50, 5, dtype=F64)
    mask = torch.rand(50, 5) < 0.6
    mask[:, 2] = True
    log_p, log_q = masked_log_softmax(logits, mask), masked_log_softmax(others, mask)
    entropy, kl = masked_entropy(log_p), masked_kl(log_p, log_q)
    for row in range(50):
        p, q = (Categorical(logits=values[row, mask[row]]) for values in (logits, others))
        torch.testing.assert_close(log_p[row, mask[row]], p.logits)
        torch.testing.assert_close(entropy[row], p.entropy())
        torch.testing.assert_close(kl[row], kl_divergence(p, q))


def test_a_row_without_choices_takes_the_first_and_has_no_gradient():
    logits = torch.randn(3, 4, dtype=F64).index_fill_(0, torch.tensor([2]), torch.nan).requires_grad_()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 3] = True
    log_probs = masked_log_softmax(logits, mask)
    assert log_probs[0].tolist() == [0.0, -math.inf, -math.inf, -math.inf]
    assert log_probs[1, 3] == 0.0
    assert gumbel_argmax(log_probs).tolist() == [0, 3, 0]
    assert masked_entropy(log_probs).tolist() == [0.0, 0.0, 0.0]
    assert masked_kl(log_probs, log_probs).tolist() == [0.0, 0.0, 0.0]
    (masked_entropy(log_probs).sum() + log_probs[0, 0] + log_probs[1, 3] + log_probs[2, 0]).backward()
    assert (logits.grad == 0).all()


def test_garbage_in_what_is_not_allowed_reaches_nothing():
    logits = torch.tensor([[0.5, torch.nan, -1.0, torch.inf]], dtype=F64, requires_grad=True)
    mask = torch.tensor([[True, False, True, False]])
    log_probs = masked_log_softmax(logits, mask)
    (masked_entropy(log_probs).sum() + log_probs[0, 0]).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == logits.grad[0, 3] == 0


def test_gradients_are_the_finite_differences():
    logits = torch.randn(4, 5, dtype=F64, requires_grad=True)
    other = torch.randn(4, 5, dtype=F64, requires_grad=True)
    mask = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()

    def fn(a, b):
        log_p, log_q = masked_log_softmax(a, mask), masked_log_softmax(b, mask)
        return masked_entropy(log_p), masked_kl(log_p, log_q)

    assert torch.autograd.gradcheck(fn, (logits, other))


def test_kl_is_infinite_where_the_other_excludes_what_may_happen():
    even = torch.zeros(1, 2)
    log_p, log_q = masked_log_softmax(even), masked_log_softmax(even, torch.tensor([[True, False]]))
    assert masked_kl(log_p, log_q).item() == math.inf
    assert masked_kl(log_q, log_p).item() == pytest.approx(math.log(2))


def test_draws_follow_the_probabilities(device):
    logits = torch.tensor([0.0, 1.0, -1.0, 9.0, 0.5], device=device)
    mask = torch.tensor([1, 1, 1, 0, 1], device=device).bool()
    log_probs = masked_log_softmax(logits, mask)
    draws = gumbel_argmax(log_probs.expand(40_000, 5))
    counts = torch.bincount(draws, minlength=5).double().cpu()
    expected = 40_000 * log_probs.exp().double().cpu()
    assert counts[3] == 0
    kept = [0, 1, 2, 4]
    chi_square = ((counts - expected)[kept].square() / expected[kept]).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_a_masked_next_action_is_masked_in_the_target():
    values = torch.tensor([[1.0, 5.0, 2.0]] * 2)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    targets = q_targets(torch.zeros(2), torch.zeros(2, dtype=torch.bool), 1.0, values, action_mask=mask)
    assert targets.tolist() == [2.0, 1.0]  # the second row allows none: action 0


def test_effective_mask():
    mask = torch.tensor([[0, 1, 0], [0, 0, 0]]).bool()
    assert effective_mask(mask).int().tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (2,), (2, 1)])
def test_flags_of_rows_and_of_envs(shape):
    flag = torch.rand(shape) < 0.5
    found = of_rows(flag, (2, 3)).expand(2, 3)
    for n in range(2):
        for a in range(3):
            assert found[n, a] == flag.flatten()[n if flag.numel() == 2 else 3 * n + a]
    assert torch.equal(of_rows(flag, shape), flag)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 4), (2, 1, 4)])
def test_masks_of_rows_and_of_envs(shape):
    mask = torch.rand(shape) < 0.5
    found = of_agents(mask, torch.zeros(2, 3, 4)).expand(2, 3, 4)
    for n in range(2):
        for a in range(3):
            assert torch.equal(found[n, a], mask[n, a] if shape == (2, 3, 4) else mask[n].view(4))


@pytest.mark.parametrize("actions", [1, 2, 8, 9])
def test_the_chosen_value_is_that_of_a_gather_bit_for_bit(actions, compiled):
    values = torch.randn(50, 3, actions, generator=torch.Generator().manual_seed(1))
    values[values < -1.5] = -torch.inf
    values.requires_grad_()
    index = torch.randint(actions, (50, 3, 1), generator=torch.Generator().manual_seed(2))

    def both(values):
        found = chosen(values, index)
        weights = torch.arange(150.0).view(50, 3)
        return found, torch.autograd.grad((found.masked_fill(found.isinf(), 0.0) * weights).sum(), values)[0]

    ours, theirs = compiled(lambda: both(values)), values.gather(-1, index).squeeze(-1)
    assert torch.equal(ours[0], theirs)
    expected = torch.zeros_like(values).scatter(-1, index, torch.arange(150.0).view(50, 3, 1))
    assert torch.equal(ours[1], expected.masked_fill(values.isinf(), 0.0))


@pytest.fixture(params=["eager", "written out"])
def compiled(request, monkeypatch):
    """The second takes the branch of a compiled call."""
    if request.param == "written out":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return lambda fn: fn()
