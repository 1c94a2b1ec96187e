"""Placements of a policy and of rules under the same fires: by hand, by the env, in several landscapes; the picture."""

import pytest
import torch
from fire_runs import make
from states import run

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape, betweenness_breaks, column_breaks, domirank_breaks
from torchrl_perf.systems.fuel_breaks.evaluation import compare, draw, place, placements
from torchrl_perf.systems.fuel_breaks.picture import record_breaks


class Ranked:
    """Places the breaks where a score is highest, and keeps what it has seen."""

    def __init__(self, score):
        self.score, self.seen = score, []

    def __call__(self, td):
        self.seen.append(td.clone())
        score = self.score[td["landscape_id"].view(-1)].masked_fill(~td["action_mask"], -torch.inf)
        return td.set("action", score.argmax(-1))


def fires(**options):
    return FuelBreaks(2, **{"size": 6, "budget": 4, "observation": "compact", **options})


def test_a_policy_sees_what_it_would_see_in_the_env():
    env = fires()
    policy = Ranked(torch.rand(1, 36))
    breaks = place(policy, env)
    alone = policy.seen
    policy.seen = []
    by_env, _ = record_breaks(env, policy)
    assert torch.equal(breaks[0], by_env[0])
    for one, other in zip(alone, policy.seen, strict=True):
        for key in ("breaks", "remaining", "landscape_id", "action_mask"):
            assert torch.equal(one[key][0], other[key][0]), key


def test_an_env_that_observes_planes():
    policy = Ranked(torch.rand(1, 36))
    env = fires(observation="planes")
    place(policy, env)
    td = policy.seen[2]
    assert torch.equal(td["observation"], env.planes(td["breaks"], td["remaining"], td["landscape_id"]))


def test_the_env_is_left_alone():
    env = fires()
    env.reset()
    before = env.snapshot()
    compare(Ranked(torch.rand(1, 36)), env, fires=64)
    assert all(torch.equal(value, before[name]) for name, value in env.snapshot().items())


def test_a_policy_without_exploration_after_training():
    trainer = run(make(), 3)
    first, second = (place(trainer.policy, trainer.env) for _ in range(2))
    assert torch.equal(first, second)
    assert first.sum() == trainer.env.budget


def test_rules_are_those_of_the_env():
    env = fires(landscape=Landscape.fractal(0, 6, count=3), size=None)
    found = placements(None, env)
    assert list(found) == ["random", "column", "domirank", "betweenness", "none"]
    assert torch.equal(found["column"], column_breaks(env.burnable(), 4))
    assert torch.equal(found["domirank"], domirank_breaks(env.burnable(), 4, neighbours=8))
    assert torch.equal(found["betweenness"], betweenness_breaks(env.burnable(), 4, neighbours=8))
    assert not found["none"].any()
    assert (found["random"].flatten(1).sum(1) == 4).all()


def test_figures_by_hand():
    """Where fire passes always, all that is not cut off burns: of 3 x 3 cells with a column of 3, half of the rest."""
    env = FuelBreaks(1, landscape=Landscape.uniform(1.0, 3), budget=3, observation="compact")
    figures = compare(Ranked(torch.arange(9.0).view(1, 9)), env, fires=128)
    assert figures.burned["none"] == 1.0
    assert figures.burned["column"] == pytest.approx(3 / 9)
    assert figures.burned["policy"] == pytest.approx(6 / 9)  # the last row
    assert figures.error["column"] == figures.error["policy"] == 0.0
    assert figures.fires == 128
    assert str(figures).startswith("burned: policy 0.667 ± 0.000, random 0.")


def test_means_over_landscapes():
    env = fires(landscape=Landscape.fractal(0, 6, count=3), size=None)
    figures = compare(None, env, fires=64, seed=5)
    column = env.assess(column_breaks(env.burnable(), 4), landscape_id=torch.arange(3), fires=64, seed=5)
    assert figures.burned["column"] == pytest.approx(float(column.burned.mean()))
    assert figures.error["column"] == pytest.approx(float(column.error.square().sum().sqrt()) / 3)
    assert compare(None, env, fires=64, seed=5) == figures != compare(None, env, fires=64, seed=6)


def test_picture(tmp_path):
    env = fires()
    path = draw(Ranked(torch.rand(1, 36)), env, tmp_path / "breaks.png", fires=64)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(IndexError):
        draw(None, env, tmp_path / "none.png", landscape_id=1)


def test_refuses_no_fire():
    with pytest.raises(ValueError, match="fires: expected at least 1"):
        compare(None, fires(), fires=0)
