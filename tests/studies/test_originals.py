"""The originals' patterns: the same results as the package's, known numbers, and faults that are noticed."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from studies.durotaxis import claims as colony_claims
from studies.durotaxis import colony as colony_colony
from studies.marine import agents as vessels_agents
from studies.marine import claims as vessels_claims
from studies.marine import env as vessels_env
from studies.originals import advantages, navigation, rewards, sampled, selection
from studies.originals.colony import ColonyLoop
from studies.originals.colony_ppo import LoopPPO, Switches
from studies.originals.experience import ListReplay, insert_by_robot, insert_whole
from studies.originals.navigation_loop import fresh_env
from studies.originals.policy_wrapper import SampleAgent, SampleWrapper
from studies.sitting import REFUSED, Sitting, as_tuple, difference
from torchrl_perf.functional import generalized_advantage_estimate, leftmost_k

CPU = torch.device("cpu")


class TestSelection:
    """Deletion of the leftmost nodes."""

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 12))
    def test_rank_mask_is_the_stable_sort_and_partition_is_as_large(self, xs, k):
        x = torch.tensor(xs, dtype=torch.float32)
        k = min(k, len(xs))
        want = selection.by_sort(x.unsqueeze(-1), k)
        assert want == set(sorted(range(len(xs)), key=lambda index: xs[index])[:k])
        assert selection.as_mask(want, len(xs)).equal(leftmost_k(x, torch.ones(len(xs), dtype=torch.bool), k))
        for form in (selection.by_partition, selection.by_partition_of_one_copy):
            found = form(x.unsqueeze(-1), k)
            assert len(found) == k
            assert sorted(xs[index] for index in found) == sorted(xs)[:k]
        assert selection.by_topk(x, k).sum() == k

    def test_a_selection_that_deletes_others_is_refused(self, monkeypatch):
        monkeypatch.setattr(colony_claims, "leftmost_k", lambda x, alive, k: leftmost_k(-x, alive, k))
        sitting = Sitting("durotaxis", CPU, quick=True)
        colony_claims.deletion(sitting)
        bad = [row for row in sitting.rows if row.get("ok") is False]
        assert {row["variant"] for row in bad} == {colony_claims.RANKS}
        assert all("us" not in row for row in bad)
        assert {row["verdict"] for row in sitting.verdicts} == {REFUSED}


def test_reward_dicts_are_equal_and_the_template_shares_its_list():
    values = tuple(map(float, range(len(rewards.SCALARS))))
    base = rewards.template()
    one, other = rewards.literal(values), rewards.from_template(base, values)
    assert one == other
    assert tuple(one) == rewards.NAMES
    other["node_rewards"].append(1.0)
    assert rewards.from_template(base, values)["node_rewards"] == [1.0]
    assert rewards.literal(values)["node_rewards"] == []


class TestAdvantages:
    """Advantages of one episode."""

    @pytest.mark.parametrize("form", [advantages.by_list, advantages.by_steps, advantages.by_floats])
    def test_constant_reward(self, form):
        zeros, ones = torch.zeros(5), torch.ones(5)
        advantage, returns = form(0.99, 0.95, zeros, zeros, ones)
        torch.testing.assert_close(advantage, torch.tensor([4.43936, 3.65695, 2.82504, 1.9405, 1.0]), atol=1e-5, rtol=0)
        assert returns.equal(advantage)

    @pytest.mark.parametrize("form", [advantages.by_list, advantages.by_steps, advantages.by_floats])
    def test_all_forms_are_the_packages(self, form):
        values, following, reward, done = colony_claims._episodes(7, 1, CPU)
        got = form(0.9, 0.8, *(part[0, :, 0] for part in (values, following, reward)))
        want = generalized_advantage_estimate(0.9, 0.8, values, following, reward, done, done)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other[0, :, 0])

    def test_normalisation_of_one_step_is_nan(self):
        assert advantages.normalized(torch.ones(1)).isnan().all()


def test_sampled_entropy_and_divergence_come_near_the_closed_forms():
    loc, scale = torch.zeros(1, 5), torch.full((1, 5), 0.5)
    exact = 5 * (0.5 * (1 + math.log(2 * math.pi)) + math.log(0.5))
    assert float(sampled.entropy(loc, scale, 20_000)) == pytest.approx(exact, abs=0.06)
    assert float(sampled.divergence(loc, scale, loc + 0.5, scale, 20_000)) == pytest.approx(2.5, abs=0.1)


class TestColony:
    """One colony in Python."""

    def test_steps_are_those_of_the_batched_env(self):
        loops, batched = colony_colony.one_step_of_both(CPU, count=12, steps=5)
        assert len(loops) == len(batched) == 12 * 5 + 5
        assert difference(as_tuple(loops), as_tuple(batched)) < 1e-4

    def test_a_wrong_step_is_noticed(self, monkeypatch):
        monkeypatch.setattr(colony_colony.selection, "by_sort", lambda nodes, k: set(range(len(nodes) - k, len(nodes))))
        loops, batched = colony_colony.one_step_of_both(CPU, count=4, steps=3)
        assert difference(as_tuple(loops), as_tuple(batched)) > 1e-2

    @pytest.mark.parametrize(("share", "counts"), [(0.0, [10, 20, 40, 80, 160]), (0.5, [6, 6, 6])])
    def test_number_of_nodes(self, share, counts):
        colony = ColonyLoop(selection.by_sort)
        features, found = colony.reset(), []
        for _ in counts:
            _, ending, _ = colony.step((share, 5.0, 2.0, 0.5, 0.0), features)
            features = colony.features()
            found.append(len(features))
        assert found == counts
        assert ending == ("over" if share == 0.0 else "")

    def test_fixed_action_succeeds_and_the_return_telescopes(self):
        random.seed(0)
        colony = ColonyLoop(selection.by_partition)
        features = colony.reset()
        start, total, ending = colony.centroid, 0.0, ""
        while not ending:
            reward, ending, parts = colony.step((0.5, 15.0, 0.5, 0.5, 0.0), features)
            features, total = colony.features(), total + reward
        assert ending == "success"
        assert 20 <= colony.steps <= 28
        assert total == pytest.approx(5.0 * (colony.centroid - start) / 380.0 + 10.0)
        assert parts["termination_reward"] == 10.0

    def test_no_optimisation_changes_the_rollout(self):
        want = colony_colony._first_rollout(Switches(), CPU)
        for switches in colony_colony.ABLATION.values():
            assert difference(as_tuple(colony_colony._first_rollout(switches, CPU)), as_tuple(want)) < 1e-4

    def test_an_iteration_changes_the_network(self):
        loop = LoopPPO(Switches(closed_entropy=True), CPU, 32, epochs=1)
        before = [parameter.clone() for parameter in loop.network.parameters()]
        loop.iteration()
        assert any(not torch.equal(a, b) for a, b in zip(before, loop.network.parameters(), strict=True))


class TestNavigation:
    """One env in NumPy."""

    @pytest.mark.parametrize(
        ("thrust", "steady"),
        [
            ((1000, 1000), (3.3333, 0.0, 0.0)),
            ((500, 500), (2.2701, 0.0, 0.0)),
            ((500, -500), (0.0, 0.0, 0.7419)),
            ((1000, 500), (2.0095, -1.8773, 0.486)),
            ((1000, -500), (0.1831, -0.6224, 0.9815)),
        ],
    )
    def test_steady_states(self, thrust, steady):
        robot = navigation.Robot(np.zeros(2), 0.0, np.zeros(2), thrust=np.array(thrust, float))
        for _ in range(1500):
            robot.substep(np.zeros(2), None)
        found = (*robot.to_body(robot.velocity[:2]), robot.velocity[2])
        np.testing.assert_allclose(found, steady, atol=2e-3)

    def test_vortex(self):
        core = np.array([[0.0, 0.0, 1.0, 2 * math.pi * 0.5 * 3.0]])
        speeds = [math.hypot(*navigation.current_at(np.array([d, 0.0]), core)) for d in (0.25, 0.5, 1.0, 5.0)]
        np.testing.assert_allclose(speeds, [1.5, 3.0, 1.5, 0.3])
        assert navigation.current_at(np.zeros(2), core).tolist() == [0.0, 0.0]

    def test_steps_are_those_of_the_batched_env(self, monkeypatch):
        turns, events = [], []
        turn_angle, event = navigation.turn_angle, navigation.NavigationLoop._event

        def noted_turn(own, others):
            turns.append(turn_angle(own, others))
            return turns[-1]

        def noted_event(loop, index):
            events.append(event(loop, index))
            return events[-1]

        monkeypatch.setattr(navigation, "turn_angle", noted_turn)
        monkeypatch.setattr(navigation.NavigationLoop, "_event", noted_event)
        loops, batched = vessels_env.same_steps(CPU, count=12, steps=32, every=2)
        assert difference(as_tuple(loops), as_tuple(batched)) < 2e-3
        # what is compared has happened
        assert sum(turn > 0 for turn in turns) > 0
        assert "collision" in events

    def test_a_wrong_step_is_noticed(self, monkeypatch):
        monkeypatch.setattr(navigation, "ARM", 1.0)
        loops, batched = vessels_env.same_steps(CPU, count=3, steps=4, every=1)
        assert difference(as_tuple(loops), as_tuple(batched)) > 2e-3

    def test_fresh_worlds_keep_their_distances(self):
        np.random.seed(1)
        env = fresh_env()
        assert all(math.dist(robot.position, robot.goal) >= 40.0 for robot in env.robots)
        observations, reward, done, _ = env.step(np.zeros((5, 2)))
        assert observations[0].shape == (37,)
        assert observations[0].dtype == np.float32
        assert len(reward) == len(done) == 5


class TestWrapper:
    """The wrapper that asks its agent for each row."""

    def test_actions_are_the_networks(self):
        network = nn.Linear(3, 4)
        rows = torch.randn(6, 3)
        greedy = SampleWrapper(SampleAgent(network, CPU, 0.0))(rows)
        assert greedy.equal(network(rows).argmax(-1))
        torch.testing.assert_close(SampleWrapper(SampleAgent(network, CPU, None))(rows), network(rows).detach())
        random.seed(0)
        assert len(SampleWrapper(SampleAgent(network, CPU, 1.0))(rows.repeat(30, 1)).unique()) == 4

    @pytest.mark.parametrize("name", vessels_agents.AGENTS)
    def test_each_agent_acts_alike_in_both_forms(self, name):
        agent = vessels_agents.build(name, 5, CPU)
        vessels_agents.fixed_levels(agent)
        alone = vessels_agents.without_noise(agent).wrapper(0.0)(agent.td["observation"])
        with torch.no_grad():
            values = agent.values(agent.td["observation"])
        want = values.argmax(-1) if agent.discrete else values
        torch.testing.assert_close(alone, want, atol=1e-5, rtol=0)
        assert agent.act().shape == want.shape

    def test_a_policy_that_mixes_its_rows_is_refused(self, monkeypatch):
        build = vessels_claims.build

        def mixing(name, num_rows, device):
            agent = build(name, num_rows, device)
            return vessels_agents.Agent(
                agent.policy,
                agent.td,
                agent.single,
                lambda rows: agent.values(rows) - agent.values(rows).mean(0),
                agent.discrete,
            )

        monkeypatch.setattr(vessels_claims, "build", mixing)
        sitting = Sitting("marine", CPU, quick=True)
        vessels_claims.same(sitting)
        assert any(row.get("ok") is False for row in sitting.rows)
        assert {row["verdict"] for row in sitting.verdicts} == {REFUSED}


def test_both_insertions_keep_the_rows_of_robots_that_were_active_and_their_ends():
    step = vessels_claims.one_step(6, CPU)
    first, second = ListReplay(100), ListReplay(100)
    insert_by_robot(step, first)
    events = insert_whole(step, second)
    assert len(first.rows) == len(second.rows) == int(step["active"].sum())
    for one, other in zip(first.rows, second.rows, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    # the transition that ends a robot is kept
    assert sum(bool(row[4]) for row in first.rows) == int((step["done"] & step["active"]).sum()) > 0
    assert events["goal"] == step["goal"].tolist()
    sample = first.sample(4, CPU)
    assert sample["observation"].shape == (4, 37)
