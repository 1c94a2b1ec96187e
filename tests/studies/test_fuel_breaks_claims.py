"""Fires, breaks and training loops of fuel_breaks against the package and hand numbers; its experiments, small."""

import gc
from dataclasses import asdict

import numpy as np
import pytest
import torch

from studies import claims
from studies.fuel_breaks.costs import as_rows, due_in_test
from studies.fuel_breaks.images import Images
from studies.fuel_breaks.loops import ADDED, MAIN, PackageLoop, full_collections, seconds_of
from studies.originals import fire as loops
from studies.originals.episodes import FORBIDDEN, BreakLoop, ImageLearner, Task, allowed, stacked
from studies.originals.fire import BreakEnvLoop, Ground
from studies.sitting import CONFIRMED, NOT_HERE, NOT_REPRODUCED, PARTLY, Sitting
from torchrl_perf.bench.memory_loops import AGGRESSIVE, LEAKY, NUM_ENVS, OPTIMISED
from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape
from torchrl_perf.envs.fuel_breaks.fire import burn, thresholds

CPU = torch.device("cpu")
SMALL = Task(size=5, cells=4, fires=4, hidden_size=4)
CLAIMS = {
    "loops": 11, "episodes": 4, "plateau": 4, "cleanup": 5, "trims": 3, "remember": 2, "threshold": 2,
    "configuration": 2, "fires": 2, "percolation": 1, "placements": 2, "environment": 2, "simulations": 1, "images": 3,
}  # fmt: skip
"""Verdicts of each experiment."""


def ground(p, size, neighbours=8):
    return Ground.of(Landscape.uniform(p, size), neighbours)


class TestFires:
    """Cell by cell, grid by grid, and all at once."""

    def test_a_certain_fire_burns_what_it_reaches(self):
        row = ground(1.0, (1, 4))
        is_open = loops.drawn(row)
        assert loops.by_cell(row, [True] * 4, 1, is_open) == {0, 1, 2, 3}
        assert loops.by_cell(row, [True, True, False, True], 1, is_open) == {0, 1}  # a break at the third cell
        assert loops.by_cell(ground(0.0, (1, 4)), [True] * 4, 1, loops.drawn(ground(0.0, (1, 4)))) == {1}

    @pytest.mark.parametrize(("neighbours", "burned"), [(8, {0, 3}), (4, {0})])
    def test_a_diagonal_leaks_with_eight_neighbours(self, neighbours, burned):
        square, free = ground(1.0, 2, neighbours), [True, False, False, True]
        assert loops.by_cell(square, free, 0, loops.drawn(square)) == burned
        grid = loops.by_grid(square, np.array(free).reshape(2, 2), 0, loops.drawn_grid(square))
        assert set(np.flatnonzero(grid)) == burned

    @pytest.mark.parametrize("neighbours", [4, 8])
    def test_the_same_numbers_burn_the_same_cells(self, neighbours):
        land = Landscape.fractal(3, (7, 5), wind=(4.0, -2.0), bare=0.2, base=0.4)  # bonds differ both ways
        place, level = Ground.of(land, neighbours), thresholds(land.bond_probabilities(neighbours))
        assert len(level[0]) == neighbours
        for seed in (0, 11):
            words = burn(torch.tensor([seed]), land.burnable, land.burnable, level, fires=9, neighbours=neighbours)
            want = (words[0].unsqueeze(0) >> torch.arange(9).view(-1, 1, 1)) & 1
            assert 9 < int(want.sum()) < want.numel()
            for found in (loops.masks_by_cell(place, seed, 9), loops.masks_by_grid(place, seed, 9)):
                assert torch.equal(torch.from_numpy(found).long(), want.long())

    def test_a_start_on_a_break_moves_to_a_free_cell(self):
        square = ground(1.0, 2)
        word = (3 << 30) | (1 << 63)  # the first half asks for the fourth of 4 cells, the second for the middle one
        assert loops.given_start(square, [True] * 4, word) == 3
        assert loops.given_start(square, [True, True, True, False], word) == 1

    def test_bonds_are_drawn_as_often_as_they_should(self):
        half = ground(0.5, 40)
        is_open = loops.drawn(half)
        share = np.mean([is_open(0, 41) for _ in range(4000)])
        assert abs(share - 0.5) < 0.04
        grid = loops.drawn_grid(half)
        assert grid.shape == (8, 40, 40)
        assert (grid[:4, 1:-1, 1:-1] == grid[4:, 1:-1, 1:-1]).all()  # one number for both ways
        assert abs(grid[:4, 1:-1, 1:-1].mean() - 0.5) < 0.03


class TestEnv:
    """One step, minus the sum of what all fires burn."""

    def test_reward_is_that_of_the_package(self):
        land = Landscape.fractal(1, (5, 6), base=0.4, bare=0.1)
        env = FuelBreaks(3, landscape=land, budget=4, mode="one_shot", fires=7)
        mask = torch.zeros(30, dtype=torch.bool)
        mask[land.burnable.flatten().nonzero().flatten()[:4]] = True
        td = env.reset().set("action", mask.expand(3, -1).contiguous())
        torch.manual_seed(5)
        seeds = torch.randint(1 << 62, (3,))
        torch.manual_seed(5)
        want = env.step(td)["next", "reward"].flatten()
        loop = BreakEnvLoop(Ground.of(land), np.zeros((12, 5, 6), np.float32), 7)
        assert [loop.step(mask.tolist(), seed)[1] for seed in seeds.tolist()] == want.tolist()
        assert (want < -7).all()

    def test_the_next_state_is_the_state_and_the_episode_is_over(self):
        planes = np.arange(8.0).reshape(2, 2, 2)
        loop = BreakEnvLoop(ground(1.0, 2), planes, 3)
        state, reward, over = loop.step([False] * 4)
        assert (state == planes).all() and state is not planes
        assert (reward, over) == (-12.0, True)  # a sum over the fires
        assert loop.step([True, True, True, False])[1] == -3.0
        assert loop.burned_by_grid([True, True, True, False]) == [3, 3, 3]


class TestLoops:
    """The same training with each memory rule, and the package's."""

    def test_breaks_are_only_placed_where_they_may(self):
        loop = BreakLoop(OPTIMISED, CPU, SMALL)
        loop.episode()
        assert loop.finished == NUM_ENVS == len(loop.burned)
        last = torch.stack([row[3] for row in loop.memory[-NUM_ENVS:]])  # next observations of the last step
        assert last[:, -2].flatten(1).sum(-1).tolist() == [4.0] * NUM_ENVS
        assert torch.equal(allowed(last), last[:, -2].flatten(1) == 0)
        assert (loop.net(last)[~allowed(last)] == FORBIDDEN).all()

    def test_the_rules_do_not_change_what_is_learnt(self, small_heap):
        found = {}
        for setting in (*MAIN, *ADDED.values()):
            loop = BreakLoop(setting, CPU, SMALL, seed=3)
            for _ in range(4):
                loop.episode()
            found[setting.name] = (loop.burned, [value.detach() for value in loop.net.parameters()], loop.trained)
        burned, weights, trained = found[LEAKY.name]
        assert trained == 4 and len(burned) == 4 * NUM_ENVS
        for other, values, _ in found.values():
            assert other == burned
            assert all(torch.equal(a, b) for a, b in zip(values, weights, strict=True))

    def test_each_added_cost_is_that_of_the_aggressive_rules(self):
        plain, costly = asdict(OPTIMISED), asdict(AGGRESSIVE)
        assert ADDED["copies"].to_cpu
        assert ADDED["trim at each overflow"].tolerance == 1.0
        for name, setting in ADDED.items():
            changed = {key for key, value in asdict(setting).items() if value != plain[key]} - {"name"}
            assert changed, name
            assert all(asdict(setting)[key] == costly[key] for key in changed - {"collects"})
        assert not ADDED["frequent cleanup"].collects

    @pytest.mark.parametrize("num_envs", [NUM_ENVS, 2 * NUM_ENVS])
    def test_the_package_learns_from_as_many_rows_for_each_that_it_collects(self, num_envs, device):
        loop = PackageLoop(device, SMALL, num_envs=num_envs)
        config, before = loop.trainer.config, int(loop.trainer.updates)
        loop.episode()
        loop.flush()
        assert int(loop.trainer.updates) - before == 1  # four steps, one update
        assert config.minibatch_size == config.batch_size == 4 * num_envs
        assert len(loop.burned) == 1 and 0 < loop.burned[0] <= 1
        loop.close()

    def test_collections_are_counted_and_calls_timed(self):
        with full_collections() as found:
            gc.collect()
            gc.collect(0)
        gc.collect()
        assert len(found) == 1
        calls = []
        assert seconds_of(lambda: calls.append(1), 120, CPU) > 0
        assert len(calls) == 120

    def test_how_often_rules_come_due_in_a_hundred_episodes(self):
        # 5,000 steps and 1,250 training steps of one env; eight have 40,000 and 10,000
        costly = {"steps": 100, "training steps": 12, "episodes": 10, "collections": 0}
        assert due_in_test(AGGRESSIVE, 1) == costly
        assert due_in_test(OPTIMISED, 1) == {"steps": 25, "training steps": 0, "episodes": 2, "collections": 0}
        assert due_in_test(OPTIMISED, 8) == {"steps": 200, "training steps": 5, "episodes": 2, "collections": 2}


class TestImages:
    """Batches of lists and of the replay."""

    def test_loss_by_hand(self):
        class Sums(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(()))

            def forward(self, planes):
                return self.scale * planes.flatten(1)

        learner = ImageLearner(Sums(), CPU)
        row = (torch.tensor([[[1.0, 2.0]]]), torch.tensor(1), torch.tensor([0.5]), torch.tensor([[[3.0, 4.0]]]))
        batch = stacked([(*row, torch.tensor([False])), (*row, torch.tensor([True]))], CPU)
        # 2 against 0.5 + 0.95 * 4 = 4.3, and against 0.5 where the episode ends
        assert learner.loss(batch).item() == pytest.approx((2.3**2 + 1.5**2) / 2)
        assert learner.update(batch).item() == pytest.approx((2.3**2 + 1.5**2) / 2)
        assert learner.network.scale.item() != 1.0

    def test_the_replay_holds_the_rows_of_the_list(self):
        made = Images(6, 48, 4, CPU)
        rows = torch.stack([made.replay[number] for number in range(48)])
        batch, listed = made.of_rows(rows), stacked(made.listed, CPU)
        assert batch["observation"].shape == (48, 12, 6, 6)
        for name, value in listed.items():
            assert torch.equal(batch[name], value), name
        assert made.of_replay()["observation"].shape[0] == 32
        assert made.of_list(made.host)()["done"].shape == (32, 1)

    def test_a_stored_row_has_no_planes(self):
        env = FuelBreaks(2, size=4, budget=2)
        rows = as_rows(env.step(env.rand_action(env.reset())))
        assert rows.batch_size == (2, 1)
        assert "observation" not in rows.keys()
        assert rows["breaks"].dtype == torch.bool


class TestExperiments:
    """Every experiment of a quick sitting: equal outputs, all claims."""

    def test_all_are_there(self):
        assert list(claims.experiments("fuel_breaks")) == list(CLAIMS)

    @pytest.mark.parametrize("name", CLAIMS)
    def test_experiment(self, name, small_heap, capsys):
        sitting = Sitting("fuel_breaks", CPU, quick=True)
        claims.run(sitting, {name: claims.experiments("fuel_breaks")[name]})
        assert not [row for row in sitting.rows if row.get("ok") is False]
        verdicts = [row for row in sitting.verdicts if row["experiment"] == name]
        assert len({row["claim"] for row in verdicts}) == len(verdicts) == len(sitting.verdicts) == CLAIMS[name]
        assert {row["verdict"] for row in verdicts} <= {CONFIRMED, PARTLY, NOT_REPRODUCED, NOT_HERE}
        assert all(0 < row["p10_us"] <= row["us"] <= row["p90_us"] for row in sitting.rows if "us" in row)
        said = {row["claim"]: row["verdict"] for row in verdicts}
        known = {
            "episodes": ("the rules change speed alone: the same episodes", CONFIRMED),
            "plateau": ("without the fixes memory grows", CONFIRMED),
            "percolation": ("fires are bond percolation", CONFIRMED),
            "placements": ("breaks in a line hold fires, random ones do not", CONFIRMED),
            "simulations": ("the optimised configuration changes cleanup alone", NOT_REPRODUCED),
            "trims": ("deque[-1000:] crashes, a list of it works", PARTLY),
            "threshold": ("GPU memory is only cleared when >80% full", CONFIRMED),
        }
        if name in known:
            claim, word = known[name]
            assert said[claim] == word
        if name == "plateau":
            rows = {row["variant"]: row for row in sitting.rows}
            assert rows["leaky"]["low"] > 0.1
            assert rows["package"]["high"] < 0.1
            assert not rows["aggressive"]["leaks"]
        capsys.readouterr()
