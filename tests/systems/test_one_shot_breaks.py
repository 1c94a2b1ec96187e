"""All breaks at once: draws and their probabilities, learning, what each setting does, paired comparison."""

import dataclasses
import itertools
import math

import pytest
import torch

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape, column_breaks, random_breaks
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint
from torchrl_perf.systems.fuel_breaks import OneShotConfig, OneShotTrainer
from torchrl_perf.systems.fuel_breaks.evaluation import burned_by, paired
from torchrl_perf.systems.fuel_breaks.one_shot import draw_orders, order_log_prob

SMALL = {"iterations": 4, "rows": 2, "samples": 4, "fires": 8, "hidden_size": 4, "blocks": 1, "learning_rate": 0.02}


def ground(count=3, **options):
    return FuelBreaks(
        1, landscape=Landscape.varied(0, 6, count=count, base=0.4), budget=4, observation="compact", **options
    )


def make(**options):
    return OneShotTrainer(ground(), OneShotConfig(**{**SMALL, **options}))


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
    env = FuelBreaks(1, landscape=Landscape.uniform(0.5, 6), budget=6, observation="compact")
    trainer = OneShotTrainer(env, OneShotConfig(iterations=120, rows=4, samples=32, hidden_size=16, blocks=2))
    row = trainer.train()
    assert trainer.iterations_done == 120
    found = trainer.place()
    assert int(found.sum()) == 6
    burned, column, chance = (
        float(env.assess(breaks, fires=2048).burned)
        for breaks in (found, column_breaks(env.burnable(), 6), random_breaks(env.burnable(), 6))
    )
    assert burned < 0.5 * column + 0.5 * chance
    assert row["burned"] < 0.5 * column + 0.5 * chance
    assert row["entropy"] < math.log(36)


def test_other_landscapes_than_those_of_training():
    trainer, unseen = make(), ground(count=5, seed=1)
    trainer.step()
    found = trainer.place(unseen)
    assert found.shape == (5, 6, 6)
    assert (found.flatten(1).sum(1) == 4).all() and not (found & ~unseen.burnable()).any()
    extra = Landscape.from_arrays(torch.zeros(6, 6), extra={"road": torch.zeros(6, 6)})
    with pytest.raises(ValueError, match="env: expected 8 planes as in training, received 9"):
        trainer.place(FuelBreaks(1, landscape=extra, budget=4))


def learnt(**options):
    trainer = make(**options)
    for _ in range(3):
        trainer.step()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.network.parameters()])


CHANGED = {
    **{"iterations": 8, "rows": 3, "samples": 5, "fires": 9, "learning_rate": 0.01, "entropy_coeff": 0.5},
    **{"max_grad_norm": 1e-6, "hidden_size": 8, "blocks": 2, "seed": 1},
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(OneShotConfig)])
def test_every_setting_has_an_effect(field):
    plain, other = learnt(), learnt(**{field: CHANGED[field]})
    assert plain.shape != other.shape or not torch.equal(plain, other)
    assert torch.equal(plain, learnt())


def test_a_state_goes_on_where_it_was_bit_for_bit(tmp_path):
    first = make(iterations=9)
    first.step()
    save_checkpoint(first.state_dict(), tmp_path / "state.pt")
    rows = [first.step() for _ in range(3)]
    second = make(iterations=9, seed=5)  # which draws from the generators of the process
    second.load_state_dict(load_checkpoint(tmp_path / "state.pt"))
    assert second.iterations_done == 1
    assert [second.step() for _ in range(3)] == rows
    for one, other in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_is_a_copy_and_may_lack_random_numbers():
    first, second = make(iterations=9), make(iterations=9, seed=5)
    first.step()
    state = first.state_dict()
    kept = {name: value.clone() for name, value in state["network"].items()}
    first.step()
    assert all(torch.equal(value, kept[name]) for name, value in state["network"].items())
    del state["random"]  # as one of an earlier version
    second.load_state_dict(state)
    assert second.iterations_done == 1
    with pytest.raises(ValueError, match=r"state: expected the network's own \['blocks'\], received \[1\]"):
        make(blocks=2).load_state_dict(first.state_dict())


@pytest.mark.gpu
def test_a_graph_places_as_eager(device):
    trainer = OneShotTrainer(ground(device="cuda"), OneShotConfig(**{**SMALL, "iterations": 12}))
    rows = [{name: float(value) for name, value in trainer.step().items()} for _ in range(8)]
    assert len({row["burned"] for row in rows}) > 4
    assert trainer.place().sum() == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 1}, "samples: expected at least 2, received 1"),
        ({"rows": 0}, "rows: expected at least 1, received 0"),
        ({"learning_rate": 0.0}, r"learning_rate: expected a positive number, received 0\.0"),
        ({"entropy_coeff": -1.0}, r"entropy_coeff: expected a number >= 0, received -1\.0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        OneShotConfig(**options)


def test_refusal_of_a_whole_map():
    env = FuelBreaks(1, landscape=Landscape.uniform(0.5, 2), budget=4)
    with pytest.raises(ValueError, match="env: expected fewer breaks than cells, received 4 breaks"):
        OneShotTrainer(env)


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
