"""Slots of the window that no episode has filled yet take part in nothing."""

import math

import torch

from torchrl_perf.metrics import EpisodeStatistics


def add(statistics, returns):
    reward = torch.tensor(returns).view(-1, 1, 1)
    statistics.update(reward, torch.ones_like(reward, dtype=torch.bool))


def test_max_return_of_negative_returns_is_not_the_zero_of_an_empty_slot():
    statistics = EpisodeStatistics(2, window=8)
    assert math.isnan(float(statistics.max_return))
    add(statistics, [-5.0, -3.0])
    assert float(statistics.max_return) == -3.0
    add(statistics, [-4.0, -2.0])
    assert float(statistics.max_return) == -2.0
