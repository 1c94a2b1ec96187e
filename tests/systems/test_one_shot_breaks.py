"""All breaks at once: draws and their probabilities, a line that is learnt, paired comparison."""

import itertools
import math

import pytest
import torch

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape, column_breaks, random_breaks
from torchrl_perf.systems.fuel_breaks import FuelBreaksOneShotConfig, FuelBreaksOneShotTrainer
from torchrl_perf.systems.fuel_breaks.evaluation import burned_by, paired
from torchrl_perf.systems.fuel_breaks.orders import draw_orders, order_log_prob


def ground(count=3, **options):
    return FuelBreaks(
        1, landscape=Landscape.varied(0, 6, count=count, base=0.4), budget=4, observation="compact", **options
    )


def test_probabilities_of_orders():
    scores = torch.tensor([0.3, -1.0, 1.2, 0.0], dtype=torch.float64)
    total = 0.0
    for order in itertools.permutations(range(4), 2):
        first, second = order
        left = scores[[cell for cell in range(4) if cell != first]]
        expected = scores[first] - scores.logsumexp(0) + scores[second] - left.logsumexp(0)
        found = order_log_prob(scores, torch.tensor(order))
        assert float(found) == pytest.approx(float(expected))
        total += math.exp(found)
    assert total == pytest.approx(1.0)
    # a cell that may not be drawn has no share, and leaves a finite gradient
    scores = torch.tensor([0.3, -1e9, 1.2, 0.0], requires_grad=True)
    order_log_prob(scores, torch.tensor([2, 0])).backward()
    assert scores.grad.isfinite().all() and float(scores.grad[1]) == 0.0


def test_orders_are_drawn_with_these_probabilities():
    torch.manual_seed(0)
    scores = torch.tensor([0.3, -1.0, 1.2, 0.0])
    orders = draw_orders(scores.expand(60_000, -1), 2)
    assert (orders[:, 0] != orders[:, 1]).all()
    counts = torch.bincount(orders[:, 0] * 4 + orders[:, 1], minlength=16)
    chi = 0.0
    for order in itertools.permutations(range(4), 2):
        expected = 60_000 * math.exp(order_log_prob(scores, torch.tensor(order)))
        chi += (float(counts[order[0] * 4 + order[1]]) - expected) ** 2 / expected
    assert chi < 31.3  # the thousandth of 11 degrees of freedom


def test_a_line_is_learnt_on_even_ground():
    sizes = {"size": 6, "budget": 6 / 36, "base": 0.5, "hidden_size": 16, "blocks": 2, "landscape": "uniform"}
    run = {"num_envs": 4, "num_steps": 32, "total_steps": 120 * 128, "landscapes": 1, "landscape_seed": 0}
    config = FuelBreaksOneShotConfig(**sizes, **run, device="cpu", mode="eager", logger="none")
    trainer = FuelBreaksOneShotTrainer(config)
    for _ in range(config.iterations):
        trainer.step()
        trainer.iterations_done += 1
    found, env = trainer.place(), trainer.env
    assert int(found.sum()) == 6
    burned, column, chance = (
        float(env.assess(breaks, fires=2048).burned)
        for breaks in (found, column_breaks(env.burnable(), 6), random_breaks(env.burnable(), 6))
    )
    assert burned < 0.5 * column + 0.5 * chance


def test_paired_comparison():
    found = paired(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, 0.4, 0.3]))
    assert found.saved == pytest.approx(0.1)
    assert found.error == pytest.approx(0.1 / 3**0.5)
    assert (found.t, found.better, found.landscapes) == (pytest.approx(3**0.5), 2, 3)
    assert paired(torch.zeros(2), torch.ones(2)).t == math.inf
    assert paired(torch.ones(2), torch.ones(2)).t == 0.0
    with pytest.raises(ValueError, match=r"expected two results \[L\] of L >= 2"):
        paired(torch.zeros(1), torch.zeros(1))
    env = ground()
    none = torch.zeros_like(env.burnable())
    burned = burned_by(env, none, fires=100, seed=1)
    assert burned.shape == (3,)
    assert torch.equal(burned, burned_by(env, none, fires=128, seed=1))
    assert not torch.equal(burned, burned_by(env, none, fires=128, seed=2))
    assert paired(burned_by(env, column_breaks(env.burnable(), 4), seed=1), burned_by(env, none, seed=1)).saved > 0
