"""Durotaxis against numbers known beforehand: fixed actions, sequences, radii, returns, and what drives the colony."""

import math

import pytest
import torch

from torchrl_perf.collectors.random_actions import RandomActions
from torchrl_perf.envs import ColonySettings, Durotaxis
from torchrl_perf.envs.durotaxis.dynamics import Colony, deletion_count, divide, hill_radius, select_deleted, stiffness

ROWS = 40


def first_episodes(env, policy, limit):
    """Outcome and length of the first episode of each row, and the number of nodes of row 0 at each step."""
    td = env.reset()
    outcome = torch.zeros(env.num_envs, dtype=torch.int64)
    length = torch.zeros(env.num_envs)
    counts = [int(td["node_mask"][0].sum())]
    for _ in range(limit):
        out, td = env.step_and_maybe_reset(policy(td))
        running = outcome == 0
        length += running
        outcome = torch.where(running, out["next", "outcome"].flatten().long(), outcome)
        counts.append(int(out["next", "node_mask"][0].sum()))
        if (outcome > 0).all():
            return outcome, length, counts
    raise AssertionError(f"{int((outcome == 0).sum())} episodes go on after {limit} steps")


def fixed(env, *action):
    values = torch.tensor(action, dtype=env.dtype).expand(env.num_envs, 5)
    return lambda td: td.set("action", values)


@pytest.mark.parametrize(
    ("action", "mean_length"),
    [
        ((0.5, 5.0, 2.0, 0.5, 0.0), 97.3),
        ((0.5, 15.0, 0.5, 0.5, 0.0), 23.8),
        ((0.5, 0.5, 2.0, 0.1, 0.0), 839.0),
        ((0.5, 5.0, 2.0, 0.5, math.pi / 6), 111.8),
        ((0.6, 5.0, 2.0, 0.5, 0.0), 96.8),
    ],
)
def test_actions_that_reach_the_goal(action, mean_length):
    # the colony is held at 6 nodes or fewer, so that room for 100 would change nothing but the time this takes
    env = Durotaxis(ROWS, critical_nodes=10, delete_max=max(0.5, action[0]), seed=0)
    outcome, length, _ = first_episodes(env, fixed(env, *action), 1000)
    assert (outcome == env.outcomes.index("success")).all()
    # the start spreads the lengths by about 4 % of their mean
    assert length.mean().item() == pytest.approx(mean_length, rel=0.02)


@pytest.mark.parametrize(
    ("delta", "counts"),
    [
        (0.0, [5, 10, 20, 40, 80, 160]),
        (0.25, [5, 8, 12, 18, 28, 42, 64, 96, 144]),
        (0.45, [5, 6, 8, 10, 12, 14, 16, 18, 20, 22, 26, 30, 34, 38, 42, 48, 54, 60, 66, 74, 82, 92, 102]),
    ],
)
def test_actions_that_overgrow(delta, counts):
    env = Durotaxis(8, seed=0)
    outcome, length, seen = first_episodes(env, fixed(env, delta, 5.0, 2.0, 0.5, 0.0), 30)
    assert (outcome == env.outcomes.index("overgrowth")).all()
    assert (length == len(counts) - 1).all()
    assert seen == counts


def test_half_of_the_colony_holds_it_at_six():
    env = Durotaxis(1, seed=0)
    _, _, counts = first_episodes(env, fixed(env, 0.5, 15.0, 0.5, 0.5, 0.0), 40)
    assert counts == [5, *[6] * (len(counts) - 1)]


def test_random_actions_overgrow():
    env = Durotaxis(400, seed=0)
    outcome, length, _ = first_episodes(env, RandomActions(env), 60)
    assert (outcome == env.outcomes.index("overgrowth")).all()
    assert length.mean().item() == pytest.approx(7.5, abs=0.2)


def test_hill_radii():
    gamma, alpha, noise = torch.tensor(5.0), torch.tensor(2.0), torch.tensor(0.5)
    radius = hill_radius(gamma, alpha, noise, torch.tensor([1.0, 3.0, 5.0]))
    torch.testing.assert_close(radius, torch.tensor([1.5, 3.9615, 4.8103]), rtol=0, atol=5e-5)


def test_stiffness_of_places_cut_to_whole_numbers():
    places = torch.tensor([-3.0, 0.0, 0.99, 1.0, 250.7, 399.0, 399.9, 500.0])
    linear = stiffness(places, ColonySettings())
    torch.testing.assert_close(linear, torch.tensor([1.0, 1.0, 1.0, 1.01, 3.5, 4.99, 4.99, 4.99]))
    grown = stiffness(places, ColonySettings(field="exponential", slope=0.004, intercept=0.5))
    expected = [0.5 * math.exp(0.004 * whole) for whole in (0, 0, 0, 1, 250, 399, 399, 399)]
    torch.testing.assert_close(grown, torch.tensor(expected))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_return_telescopes(dtype, tolerance):
    # an episode's return is 5 (x_T - x_0) / x_goal and its end's share, whatever the actions
    env = Durotaxis(64, critical_nodes=16, dtype=dtype, max_episode_steps=60, seed=1)
    td = env.reset()
    start, total = env.state_center_x.clone(), torch.zeros(64, dtype=torch.float64)
    ends = torch.tensor([0.0, 10.0, -0.3, -2.0, -2.0, -1.0, 0.0], dtype=torch.float64)
    finished = 0
    for _ in range(80):
        td = env.rand_action(td)
        td["action"][::2, 0] = 0.5  # these come to the time limit or the goal
        out, td = env.step_and_maybe_reset(td)
        total += out["next", "reward"].flatten()
        done = out["next", "done"].flatten()
        center = out["next", "graph"][:, 1] * 380.0
        expected = 5.0 * (center - start).double() / 380.0 + ends[out["next", "outcome"].flatten().long()]
        torch.testing.assert_close(total[done], expected[done], rtol=0, atol=tolerance)
        finished += int(done.sum())
        start, total = torch.where(done, env.state_center_x, start), total.masked_fill(done, 0.0)
    assert finished > 100


def test_full_reward_is_the_sum_of_its_columns():
    env = Durotaxis(8, reward_mode="full", seed=0, critical_nodes=20)
    batch = env.rollout(30, break_when_any_done=False)
    parts = batch["next", "reward_components"]
    torch.testing.assert_close(batch["next", "reward"], parts.sum(-1, keepdim=True))
    ends = parts[..., env.component_names.index("termination")].unsqueeze(-1)
    over = batch["next", "outcome"] == 2
    assert over.any()
    assert (ends[over] == -15.0).all()
    assert not ends[~over].any()


def colony_of(places, settings):
    x = torch.zeros(1, settings.slots)
    x[0, : len(places)] = torch.tensor(places)
    zero = torch.zeros(1, settings.slots, dtype=torch.int32)
    number = torch.tensor([len(places)], dtype=torch.int32)
    pid = torch.arange(settings.slots, dtype=torch.int32).unsqueeze(0)
    return Colony(x, x.clone(), zero, torch.where(pid < number, pid, 0), number, number.clone())


def test_equal_places_are_deleted_by_slot_and_survivors_move_up():
    settings = ColonySettings(critical_nodes=6)
    colony = colony_of([30.0, 10.0, 20.0, 10.0, 10.0], settings)
    deleted = select_deleted(colony, torch.tensor([0.5]), settings)
    assert deleted.int().tolist() == [[0, 1, 0, 1, 0, 0]]
    shape = torch.tensor([[5.0, 2.0, 0.5, 0.0]])
    after, parent_x = divide(colony, deleted, shape, settings)
    assert after.pid.tolist() == [[0, 2, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0]]
    assert after.age.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert after.count.tolist() == [6]
    assert after.next_pid.tolist() == [8]
    radii = [5.0 / (1.0 + (2.0 / (1.0 + 0.01 * place)) ** 2) + 0.5 for place in (30, 20, 10)]
    children = [place + radius for place, radius in zip((30, 20, 10), radii, strict=True)]
    torch.testing.assert_close(after.x[0], torch.tensor([30.0, 20.0, 10.0, *children, 0, 0, 0, 0, 0, 0]))
    assert parent_x.tolist() == [[0, 0, 0, 30, 20, 10, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("share", [0.0, 0.19, 0.2, 0.99, 1.0])
def test_numbers_deleted(share):
    settings = ColonySettings(critical_nodes=6)
    colony = colony_of([3.0, 1.0, 2.0, 5.0, 4.0], settings)
    deleted = select_deleted(colony, torch.tensor([share]), settings)
    expected = {0.0: [], 0.19: [], 0.2: [1], 0.99: [0, 1, 2, 4], 1.0: [0, 1, 2, 3, 4]}[share]
    assert deleted[0].nonzero().flatten().tolist() == expected
    assert deletion_count(torch.tensor([share]), colony.count).tolist() == [len(expected)]


def displacement(deletion):
    """Mean and standard error of the centroid's way in 20 steps without a gradient, angles from the full circle."""
    env = Durotaxis(400, slope=0.0, theta_max=math.pi, critical_nodes=10, deletion=deletion, seed=0)
    td = env.reset()
    # far from the edges, which hold back what goes left; the first nodes fill the first slots
    env.state_x[:, :5] += 160.0
    env.state_center_x += 160.0
    start = env.state_center_x.clone()
    for _ in range(20):
        action = torch.tensor([0.5, 5.0, 2.0, 0.5, 0.0]).repeat(400, 1)
        action[:, 4] = math.pi * (2.0 * torch.rand(400) - 1.0)
        out, td = env.step_and_maybe_reset(td.set("action", action))
        assert not out["next", "done"].any()
    way = env.state_center_x - start
    return way.mean().item(), way.std().item() / math.sqrt(400)


def test_selection_drives_the_colony_without_a_gradient():
    mean, error = displacement("random")
    assert abs(mean) < 4.0 * error
    mean, error = displacement("leftmost")
    assert mean > 10.0 * error
