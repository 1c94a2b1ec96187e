"""FuelBreaks as an env: specs, masks, rewards, resets, modes of running, and rows by themselves."""

import pytest
import torch
from breaks_envs import MODES, REWARDS, hilly, play, small
from torchrl.envs.utils import check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.random_actions import RandomActions
from torchrl_perf.envs import FuelBreaks, Landscape
from torchrl_perf.envs.fuel_breaks import column_breaks, cross_breaks
from torchrl_perf.envs.fuel_breaks.fire import burn
from torchrl_perf.envs.fuel_breaks.words import burned_fraction
from torchrl_perf.modules import EpsilonGreedy

KEYS = {"action_mask", "breaks", "remaining", "landscape_id", "observation", "burned", "is_init"}


# -- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("make", [small, hilly])
def test_specs(make, mode, reward, device):
    check_env_specs(make(mode=mode, reward=reward, device=device))


@pytest.mark.parametrize("more", [{"dtype": torch.float64}, {"observation": "compact"}, {"neighbours": 4}])
def test_specs_of_options(more, device):
    check_env_specs(hilly(device=device, reward="shaped", **more))


def test_keys_and_shapes():
    env = hilly()
    batch = env.rollout(4, break_when_any_done=False)
    shapes = {key: tuple(value.shape[2:]) for key, value in batch.items(True, True)}
    assert {key for key in shapes if isinstance(key, str)} - {"action", "done", "terminated", "truncated"} == KEYS
    assert shapes["observation"] == shapes["next", "observation"] == (8, 5, 4)
    assert shapes["action_mask"] == (20,)
    assert shapes["breaks"] == (5, 4)
    assert shapes["action"] == ()
    assert shapes["next", "reward"] == shapes["next", "burned"] == shapes["remaining"] == (1,)
    assert batch["breaks"].dtype == batch["action_mask"].dtype == torch.bool
    assert env.reward_keys == ["reward"]
    assert env.plane_names[-3:] == ("fuel", "breaks", "remaining")


def test_default_is_the_reference_task():
    env = FuelBreaks(2)
    assert (env.budget, env.height, env.width, env.fires, env.neighbours) == (20, 20, 20, 16, 8)
    fuel = env.reset()["observation"][:, env.plane_names.index("fuel")]
    assert (fuel == 0.4).all()


# -- placing ---------------------------------------------------------------------------------------------------------


def test_an_episode_by_hand():
    env = small(2)
    td = env.reset()
    assert td["remaining"].tolist() == [[1.0]] * 2
    assert td["action_mask"].all() and not td["breaks"].any()
    placed = torch.zeros(2, 20, dtype=torch.bool)
    for step, cells in enumerate([(0, 19), (7, 19), (3, 4)]):  # the second row's second is on a break
        out, td = env.step_and_maybe_reset(td.set("action", torch.tensor(cells)))
        placed[torch.arange(2), list(cells)] = True
        following = out["next"]
        assert torch.equal(following["breaks"].flatten(1), placed)
        assert torch.equal(following["action_mask"], ~placed)
        assert torch.equal(following["observation"][:, -2].flatten(1), placed.float())
        left = (2 - step) / 3
        assert following["remaining"].flatten().tolist() == pytest.approx([left] * 2)
        assert (following["observation"][:, -1] - left).abs().max() < 1e-6
        assert following["done"].all() == following["terminated"].all() == (step == 2)
        assert bool(following["reward"].any()) == bool(following["burned"].any()) == (step == 2)
    assert following["breaks"].sum((1, 2)).tolist() == [3, 2]
    assert torch.equal(following["reward"], -following["burned"])
    assert not td["breaks"].any() and td["is_init"].all() and (td["burned"] == 0).all()


@pytest.mark.parametrize("action", [-1, 20, 10**6])
def test_a_cell_outside_builds_nothing(action):
    env = small(2)
    out = env.step(env.reset().set("action", torch.full((2,), action)))
    assert not out["next", "breaks"].any()
    assert out["next", "remaining"].flatten().tolist() == pytest.approx([2 / 3] * 2)


def test_one_shot_keeps_to_budget_and_fuel():
    env = hilly(3, mode="one_shot")
    for action in (torch.ones(3, 20, dtype=torch.bool), torch.ones(3, 20, dtype=torch.int64) * 2):
        td = env.reset()
        burnable = env.snapshot()["burnable"]
        following = env.step(td.clone().set("action", action))["next"]
        first = burnable.flatten(1) & (burnable.flatten(1).cumsum(1) <= 4)
        assert torch.equal(following["breaks"].flatten(1), first)
        assert following["terminated"].all()
        # minus the cells that burned, summed over the fires
        assert torch.equal(following["reward"], (-following["burned"] * 9 * 20).round())
    with pytest.raises(ValueError, match=r"action \(3, 20\) of integer indices, received \(3, 20\) torch.float32"):
        env.step(td.clone().set("action", torch.ones(3, 20)))
    with pytest.raises(ValueError, match=r"received \(3, 19\)"):
        env.step(td.clone().set("action", torch.ones(3, 19, dtype=torch.bool)))
    with pytest.raises(KeyError, match="expected the key 'action'"):
        env.step(td.exclude("action"))


@pytest.mark.parametrize("mode", MODES)
def test_random_actions_are_allowed_ones(mode, device):
    env = hilly(40, mode=mode, device=device)
    for policy in (env.rand_action, RandomActions(env)):
        batch = play(env, 8, policy)
        mask, action = batch["action_mask"], batch["action"]
        if mode == "sequential":
            assert mask.gather(-1, action.unsqueeze(-1)).all()
            ended = batch["next", "done"].squeeze(-1)
            assert (batch["next", "breaks"][ended].sum((1, 2)) == 4).all()
        else:
            assert not (action & ~mask).any()
            assert (action.sum(-1) == 4).all()
        assert not (batch["next", "breaks"] & (batch["next", "observation"][:, :, 5] == 0)).any()
    drawn = env.rand_action()
    assert drawn.batch_size == (40,) and "action" in drawn


def test_masked_epsilon_greedy_never_wastes_a_break():
    env = hilly(30)

    class Values(torch.nn.Module):
        def forward(self, planes):
            return planes[:, 0].flatten(1)

    policy = EpsilonGreedy(Values(), spec=env.action_spec, mask_key="action_mask", eps_start=0.5, eps_end=0.5)
    batch = DeviceCollector(env, policy, frames_per_batch=240, total_frames=240).collect()
    ended = batch["next", "done"].squeeze(-1)
    assert ended.sum() == 60
    assert (batch["next", "breaks"][ended].sum((1, 2)) == 4).all()


# -- rewards ---------------------------------------------------------------------------------------------------------


def burned_of(env, breaks, seed, number):
    burnable = env.burnable(number)
    words = burn(seed, burnable & ~breaks, burnable, env._threshold[number], fires=env.fires, neighbours=env.neighbours)
    return burned_fraction(words, env.fires)


@pytest.mark.parametrize("common", [True, False])
def test_the_shaped_reward_telescopes(common):
    env = hilly(reward="shaped", common_random_numbers=common)
    td = env.reset()
    start, total = env.snapshot(), torch.zeros(6, 1)
    assert torch.equal(start["burned"], burned_of(env, start["breaks"], start["fire_seed"], start["landscape_id"]))
    for step in range(4):
        before = env.snapshot()
        out, td = env.step_and_maybe_reset(env.rand_action(td))
        following = out["next"]
        total += following["reward"]
        torch.testing.assert_close(following["reward"], before["burned"].unsqueeze(-1) - following["burned"])
        if common:
            expected = burned_of(env, following["breaks"], start["fire_seed"], start["landscape_id"])
            assert torch.equal(following["burned"].squeeze(-1), expected)
        assert following["done"].all() == (step == 3)
    torch.testing.assert_close(total, start["burned"].unsqueeze(-1) - following["burned"], rtol=0, atol=1e-6)
    after = env.snapshot()
    assert (after["fire_seed"] != start["fire_seed"]).all()
    assert torch.equal(after["burned"], burned_of(env, after["breaks"], after["fire_seed"], after["landscape_id"]))


def test_common_random_numbers_make_differences_surer():
    spread = {}
    for common in (True, False):
        env = FuelBreaks(200, size=8, budget=6, fires=16, reward="shaped", common_random_numbers=common, seed=0)
        spread[common] = float(play(env, 6)["next", "reward"].std())
    assert spread[True] < 0.7 * spread[False]


def test_terminal_and_shaped_agree_in_the_mean():
    shape = (400, 6, 6)
    breaks = column_breaks(torch.ones(shape, dtype=torch.bool), 6)
    cells = breaks[0].flatten().nonzero().flatten()
    means = []
    for reward, common in (("terminal", True), ("shaped", True), ("shaped", False)):
        env = FuelBreaks(400, size=6, budget=6, reward=reward, common_random_numbers=common, seed=1)
        td = env.reset()
        for cell in cells:
            out, td = env.step_and_maybe_reset(td.set("action", cell.expand(400)))
        means.append(float(out["next", "burned"].mean()))
    found = env.assess(breaks[:1], fires=6400)
    assert max(abs(mean - float(found.burned)) for mean in means) < 0.01


def test_assess_is_paired_and_repeatable():
    env = FuelBreaks(1)
    ground = env.burnable()
    breaks = torch.cat((ground & False, column_breaks(ground, 20), cross_breaks(ground, 39)))
    one, two = (env.assess(breaks, fires=1000, seed=seed) for seed in (0, 0))
    assert torch.equal(one.burned, two.burned) and one.fires == 1024
    assert not torch.equal(one.burned, env.assess(breaks, fires=1000, seed=1).burned)
    assert torch.equal(one.burned[1:2], env.assess(breaks[1:2], fires=1000).burned)
    torch.testing.assert_close(one.probability.mean((1, 2)), one.burned)
    assert (one.probability[1][breaks[1]] == 0).all()
    assert one.burned[0] > one.burned[1] > one.burned[2]
    many = hilly()
    number = torch.tensor([2, 0])
    both = many.assess(torch.zeros(2, 5, 4, dtype=torch.bool), landscape_id=number, fires=64)
    first = many.assess(torch.zeros(1, 5, 4, dtype=torch.bool), landscape_id=number[1:], fires=64)
    assert torch.equal(both.burned[1:], first.burned)


# -- landscapes ------------------------------------------------------------------------------------------------------


def test_landscapes_are_drawn_at_resets_and_kept_in_episodes():
    env = hilly(60)
    batch = play(env, 12)
    number = batch["landscape_id"].squeeze(-1)
    assert set(number.flatten().tolist()) == {0, 1, 2}
    for start in (0, 4, 8):
        assert (number[:, start : start + 4] == number[:, start : start + 1]).all()
    assert (number[:, 3] != number[:, 4]).any()
    static = env.landscape[number]
    assert torch.equal(batch["observation"][:, :, :-2], static)


def test_planes_make_the_observation_again(device):
    env, bare = (hilly(device=device, observation=kind) for kind in ("planes", "compact"))
    batch = play(env, 5)
    for here in (batch, batch["next"]):
        parts = [here[key].flatten(0, 1) for key in ("breaks", "remaining", "landscape_id")]
        assert torch.equal(env.planes(*parts), here["observation"].flatten(0, 1))
        assert torch.equal(bare.planes(*parts), here["observation"].flatten(0, 1))
    assert "observation" not in bare.reset().keys()
    flat = FuelBreaks(4)
    td = flat.reset()
    assert torch.equal(flat.planes(td["breaks"], td["remaining"], td["landscape_id"]), td["observation"])
    assert flat.landscape.shape == (1, 6, 20, 20)


def test_snapshot_is_a_copy():
    env = hilly(reward="shaped")
    td = env.reset()
    shot = env.snapshot()
    assert set(shot) == {"breaks", "remaining", "landscape_id", "fire_seed", "burned", "burnable"}
    for value in shot.values():
        value.zero_()
    assert (env.snapshot()["remaining"] == 4).all()
    assert torch.equal(env.snapshot()["landscape_id"], td["landscape_id"].squeeze(-1))


def test_bad_arguments():
    bare = Landscape.from_arrays(torch.zeros(4, 5), burnable=torch.arange(20).view(4, 5) < 6)
    with pytest.raises(ValueError, match=r"budget: expected 1 to 6 breaks.* received 7, which is 7. Remedy"):
        FuelBreaks(2, landscape=bare, budget=7)
    assert FuelBreaks(2, landscape=bare, budget=6).rollout(6)["next", "done"][:, -1].all()
    with pytest.raises(ValueError, match=r"received 0.01, which is 0"):
        FuelBreaks(2, size=4, budget=0.01)
    for budget in (0, -1, 0.0, True, float("nan")):
        with pytest.raises(ValueError, match="budget: expected"):
            FuelBreaks(2, size=4, budget=budget)
    with pytest.raises(ValueError, match=r"size: expected that of the landscape, \(4, 5\), received 7"):
        FuelBreaks(2, size=7, landscape=bare)
    with pytest.raises(ValueError, match=r"mode: expected one of \['sequential', 'one_shot'\], received 'both'"):
        FuelBreaks(2, mode="both")
    with pytest.raises(ValueError, match="reward: expected one of"):
        FuelBreaks(2, reward="dense")
    with pytest.raises(ValueError, match="observation: expected one of"):
        FuelBreaks(2, observation="all")
    with pytest.raises(ValueError, match="fires: expected 1 to 64, received 100"):
        FuelBreaks(2, fires=100)
    with pytest.raises(ValueError, match="neighbours: expected 4 or 8, received 5"):
        FuelBreaks(2, neighbours=5)
    with pytest.raises(TypeError, match=r"expected options of .*received \['fire'\]"):
        FuelBreaks(2, fire=3)
    with pytest.raises(ValueError, match="num_envs"):
        FuelBreaks(0)
