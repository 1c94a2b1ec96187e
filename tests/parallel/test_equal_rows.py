"""A rank whose peers have the same rows makes the updates of a process alone, eagerly and compiled."""

import importlib
import math
from dataclasses import fields
from itertools import accumulate

import pytest
import torch
from torch import nn

from torchrl_perf.parallel import Ranks, SharedGradients
from torchrl_perf.registry import ALGORITHMS

joining = importlib.import_module("torchrl_perf.parallel.join")  # the package has a function of that name
RANKS = 2
SETTINGS = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 4_800, "device": "cpu", "hidden_size": 32, "epochs": 1},
    **{"minibatches": 2, "normalize_advantage": False, "capacity": 480, "minibatch_size": 8, "learning_starts": 16},
    **{"updates_per_iteration": 2, "num_quantiles": 8, "num_cosines": 8, "num_atoms": 11, "target_interval": 1},
}
SHARED = ("num_envs", "minibatch_size", "total_steps", "learning_starts", "capacity")


class Equals(Ranks):
    """A rank among ranks that have what it has."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.size = RANKS
        self.collectives = 0

    def summed(self, values):
        self.collectives += 1
        return values.mul_(RANKS)

    def gathered(self, values):
        return values.expand(RANKS, *values.shape).clone()

    def broadcast_(self, parts):
        pass


class FusedEquals(Equals):
    """The same where gradients are packed, summed and measured at once, as one kernel does on GPUs."""

    def exchange(self, like):
        return [0, *accumulate(-(-one.numel() // 4) * 4 for one in like)]

    def summed_parts(self, tensors, exchange, normed):
        self.collectives += 1
        flat = torch.zeros(exchange[-1])
        for one, place in zip(tensors, exchange, strict=False):
            assert one.is_contiguous()
            flat[place : place + one.numel()] = RANKS * one.flatten()
        return flat, torch.stack([RANKS * one.norm() for one in tensors[:normed]])


def learnt(name, ranks, monkeypatch, mode, **changes):
    """Parameters after some iterations of the rows of one rank."""
    monkeypatch.setattr(joining, "_JOINED", [] if ranks is None else [ranks])
    kind, trainer_of = ALGORITHMS[name].load("config"), ALGORITHMS[name].load("trainer")
    known = {field.name for field in fields(kind)}
    times = 1 if ranks is None else ranks.size
    whole = {key: value * times if key in SHARED else value for key, value in {**SETTINGS, **changes}.items()}
    trainer = trainer_of(kind.without_task(mode=mode, **{key: value for key, value in whole.items() if key in known}))
    for _ in range(3):
        trainer.step()
        trainer.iterations_done += 1
    modules = [part for part in trainer.parts().values() if isinstance(part, nn.Module)]
    trainer.close()
    return [value.detach().clone() for module in modules for value in module.parameters()]


@pytest.mark.parametrize("kind", [Equals, FusedEquals], ids=["packed", "fused"])
@pytest.mark.parametrize("name", ["ppo", "pqn", "dqn", "iqn", "sac", "td3"])
def test_eager(monkeypatch, name, kind):
    ranks = kind()
    found = learnt(name, ranks, monkeypatch, "eager")
    assert ranks.collectives
    alone = learnt(name, None, monkeypatch, "eager")
    assert any((value != 0).any() for value in alone)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"sampler": "prioritized"}], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("kind", [Equals, FusedEquals], ids=["packed", "fused"])
@pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "td3"])
def test_compiled(monkeypatch, traced, name, kind, changes):
    ranks = kind()
    found = learnt(name, ranks, monkeypatch, "compile", **changes)
    assert ranks.collectives
    # one process compiles the whole update, which draws its noise in another order than stages do
    alone = learnt(name, Equals(), monkeypatch, "eager", **changes)
    torch.testing.assert_close(found, alone, rtol=0, atol=2e-5)


def test_advantages_are_normalised_by_those_of_all(monkeypatch):
    found = learnt("ppo", Equals(), monkeypatch, "eager", normalize_advantage=True)
    alone = learnt("ppo", None, monkeypatch, "eager", normalize_advantage=True)
    # of twice as many rows the unbiased deviation is smaller by a thousandth or so
    assert max((one - other).abs().max() for one, other in zip(found, alone, strict=True)) < 2e-3
    assert any(not torch.equal(one, other) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("kind", [Equals, FusedEquals], ids=["packed", "fused"])
@pytest.mark.parametrize("divided", [False, True])
def test_what_is_averaged_is_kept_and_gradients_may_lie_in_any_way(kind, divided):
    params = [
        torch.nn.Parameter(torch.zeros(3, 5)),
        torch.nn.Parameter(torch.zeros(7)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    shared = SharedGradients(params, ranks=kind())
    factor, kept = (RANKS if divided else 1), []
    for number in (1.0, 2.0):
        grads = [number * torch.arange(15.0).view(5, 3).t(), None, torch.full((2,), number)]
        found = shared.reduced(grads, torch.tensor(number), torch.full((3,), number).double(), divided=divided)
        kept.append(found.values)
        torch.testing.assert_close(found.gradients[0], factor * grads[0])
        torch.testing.assert_close(found.gradients[2], factor * grads[2])
        assert found.absent == {1}
        assert not found.gradients[1].any()
        if found.norms is not None:
            torch.testing.assert_close(found.norms[2].item(), factor * number * math.sqrt(2.0))
        assert (found.norms is None) is (kind is Equals)
    for number, (loss, statistics) in zip((1.0, 2.0), kept, strict=True):
        assert loss.item() == factor * number
        assert (statistics == factor * number).all()
        assert statistics.dtype == torch.float64
