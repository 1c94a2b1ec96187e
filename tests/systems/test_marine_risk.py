"""One policy on several levels of risk: the curve, what is refused."""

import dataclasses

import pytest
import torch
from marine_runs import make

from torchrl_perf.systems.marine import risk
from torchrl_perf.systems.marine.evaluation import Scenarios, evaluate
from torchrl_perf.systems.marine.risk import risk_curve

FEW = Scenarios(count=3, robots=2, obstacles=1, cores=1, distance=10.0, max_episode_steps=12)


def test_curve_of_an_untrained_policy():
    trainer = make("iqn")
    env = FEW.env("discrete")
    neutral = evaluate(trainer.policy, FEW, env)
    curve = risk_curve(trainer.policy, FEW, env, levels=(1.0, 0.1))
    assert list(curve) == [1.0, 0.1]
    assert all(figures.vessels == 6 for figures in curve.values())
    again = evaluate(trainer.policy, FEW, env)
    assert dataclasses.astuple(again)[:4] == dataclasses.astuple(neutral)[:4]
    assert not [module for module in trainer.policy.modules() if getattr(module, "risk", None) is not None]


def test_the_level_reaches_the_choice(monkeypatch):
    trainer = make("iqn")
    network = next(module for module in trainer.policy.modules() if hasattr(module, "risk"))
    env = FEW.env("discrete")
    seen, values = [], []

    def watched(policy, scenarios, env):
        seen.append(float(network.risk.eta))
        torch.manual_seed(0)
        values.append(policy.action_values(env.reset()))
        return evaluate(policy, scenarios, env)

    monkeypatch.setattr(risk, "evaluate", watched)
    torch.manual_seed(1)
    risk_curve(trainer.policy, FEW, env, levels=(1.0, 0.1))
    assert seen == pytest.approx([1.0, 0.1])
    assert (values[0] - values[1]).abs().max() > 1e-4


def test_refusals():
    with pytest.raises(ValueError, match="policy: expected one whose network acts on a risk"):
        risk_curve(torch.nn.Linear(2, 2), FEW, FEW.env("discrete"))
