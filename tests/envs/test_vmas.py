"""VMAS scenarios under masked resets: the numbers of VMAS itself, rows that are left alone, what is refused."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torchrl.envs import VmasEnv
from torchrl.envs.utils import MarlGroupMapType, check_env_specs

pytest.importorskip("vmas", reason="needs the extra 'marl'")

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import vmas as vmas_env
from torchrl_perf.envs import vmas_slots, vmas_state, vmas_world
from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.vmas import DeviceVmasEnv
from torchrl_perf.envs.vmas_slots import scan
from torchrl_perf.runtime import host_syncs, no_host_sync

# VMAS depends on gym, which says that it is unmaintained, and on old habits of NumPy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SAME_STEPS = ["navigation", "balance", "wheel", "transport", "give_way", "simple_tag", "simple_crypto", "buzz_wire"]
DISCRETE = [("navigation", False), ("simple_tag", False), ("simple_crypto", False)]
REFUSED = {
    "simple_adversary": "_world",
    "football": "changes",
    "het_mass": "_mass",
    "ball_trajectory": "a reset of one env turns pos_shaping",
}


def make(scenario="navigation", num_envs=4, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DeviceVmasEnv(scenario, num_envs, **{"pool_size": 16, "seed": 0, "device": "cpu", **settings})


def state_of(env):
    return {name: value.clone() for name, value in env.state_dict().items() if name.startswith(("state_", "elapsed"))}


def mask(*rows):
    return torch.tensor(rows).unsqueeze(-1)


def reset_rows(env, root, rows):
    return env._reset(root.empty().set("_reset", rows))


def actions(env, steps, seed=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        td = env.reset().clone()
        return [env.rand_action(td.clone()).select(*env.action_keys) for _ in range(steps)]


@pytest.mark.parametrize(("scenario", "continuous"), [*((name, True) for name in SAME_STEPS), *DISCRETE])
def test_steps_are_those_of_vmas(scenario, continuous):
    env = make(scenario, continuous_actions=continuous, max_steps=3)
    stock = VmasEnv(scenario, num_envs=4, continuous_actions=continuous, device="cpu")
    stock.rand_step(stock.reset())  # what VMAS makes at its first step is there
    acts = actions(env, 10)
    env.set_seed(3)
    root = env.reset()
    for act in acts:
        slots = scan(stock._env.scenario).slots
        for path, slot in slots.items():
            if path in env._slots.read():
                slot.set(env.get_buffer(f"state_{path}").clone())
        expected = stock.step(stock.reset().clone().update(act) if False else root.clone().update(act))
        stepped, root = env.step_and_maybe_reset(root.clone().update(act))
        for group in env.vmas_env.group_map:
            for key in ("reward", "observation"):
                # VMAS computes fewer pairs of entities where none is near, and rounds by the size of a batch
                torch.testing.assert_close(
                    stepped["next", group, key], expected["next", group, key], rtol=1e-5, atol=2e-6
                )
        assert torch.equal(stepped["next", "terminated"], expected["next", "terminated"])


@pytest.mark.parametrize(
    "scenario", ["navigation", "give_way", "simple_tag", "simple_crypto", "dispersion", "discovery"]
)
def test_rows_outside_the_mask_are_left_alone(scenario):
    env = make(scenario)
    root = env.reset()
    for act in actions(env, 3):
        _, root = env.step_and_maybe_reset(root.update(act))
    before, rows = state_of(env), mask(True, False, True, False)
    fresh = reset_rows(env, root, rows)
    after = state_of(env)
    for name, value in after.items():
        assert torch.equal(value[1::2], before[name][1::2]), name
    assert fresh["is_init"].squeeze(-1).tolist() == [True, False, True, False]
    for group in env.vmas_env.group_map:
        assert torch.equal(fresh[group, "observation"][1::2], root[group, "observation"][1::2])
    pool = {path: env.get_buffer(f"pool_{path}") for path in env._drawn}
    for row in (0, 2):
        here = {path: after[f"state_{path}"][row] for path in pool}
        found = [all(torch.equal(pool[path][i], here[path]) for path in pool) for i in range(16)]
        assert any(found)


@pytest.mark.parametrize("scenario", ["navigation", "wheel", "balance"])
def test_rows_outside_the_mask_go_on_as_if_nothing_had_been(scenario):
    one, other = make(scenario), make(scenario)
    acts = actions(one, 8)
    roots = []
    for env in (one, other):
        env.set_seed(5)
        roots.append(env.reset())
    for t, act in enumerate(acts):
        if t == 3:
            roots[0] = reset_rows(one, roots[0], mask(False, True, True, False))
        for i, env in enumerate((one, other)):
            _, roots[i] = env.step_and_maybe_reset(roots[i].clone().update(act))
    for name, value in state_of(one).items():
        if name != "elapsed":
            assert torch.equal(value[[0, 3]], state_of(other)[name][[0, 3]]), name
            continue
        assert value.squeeze(-1).tolist() == [8, 5, 5, 8]


def test_a_reset_does_not_wait_for_the_host():
    env = make("wheel", max_steps=2)
    root = env.reset()
    act = actions(env, 1)[0]
    with no_host_sync(env.device):
        for _ in range(4):
            _, root = env.step_and_maybe_reset(root.update(act))
        reset_rows(env, root, mask(True, False, True, False))
    # a lidar asks nothing of the host either: an assignment by mask of one number is a masked fill on CUDA
    env = make("navigation")
    root = env.reset()
    with host_syncs(env.device) as report:
        reset_rows(env, root, mask(True, False, True, False))
    assert {row.op for row in report.rows} <= {"index_put_"}


def test_initial_states_are_those_of_the_scenario():
    env = make("navigation", pool_size=64, n_agents=3)
    places = torch.stack([env.get_buffer(f"pool__world/_agents/{i}/_state/_pos") for i in range(3)], 1)
    apart = torch.cdist(places, places) + torch.eye(3)
    assert apart.min() >= 0.05 * 2  # two agents do not overlap
    assert len(places.flatten(1).unique(dim=0)) == 64
    before = places.clone()
    env.refill()
    assert not torch.equal(before[:, 0], env.get_buffer("pool__world/_agents/0/_state/_pos"))


def test_numbers_drawn_once_for_all_envs_are_drawn_for_each():
    env = make("give_way", pool_size=64)
    assert env._one_by_one
    assert any(len(env.get_buffer(f"pool_{path}").flatten(1).unique(dim=0)) > 32 for path in env._drawn)


def test_time_limit_truncates():
    env = make("navigation", max_steps=3)
    rollout = env.rollout(7, break_when_any_done=False)
    assert rollout["next", "truncated"][0].squeeze(-1).tolist() == [False, False, True, False, False, True, False]
    assert not rollout["next", "terminated"].any()
    assert torch.equal(rollout["next", "agents", "done"], rollout["next", "done"].unsqueeze(2).expand(-1, -1, 4, -1))
    # the final observation is under "next", the reset one at the root that follows
    ended = rollout["next", "agents", "observation"][:, 2]
    assert not torch.equal(ended, rollout["agents", "observation"][:, 3])
    assert torch.equal(rollout["next", "agents", "observation"][:, 0], rollout["agents", "observation"][:, 1])


@pytest.mark.parametrize("scenario", ["navigation", "simple_tag"])
@pytest.mark.parametrize("continuous", [True, False])
def test_specs(scenario, continuous):
    env = make(scenario, continuous_actions=continuous, max_steps=4)
    check_env_specs(env)
    groups = {"navigation": {"agents": 4}, "simple_tag": {"adversary": 3, "agent": 1}}[scenario]
    for group, members in groups.items():
        assert env.full_action_spec[group, "action"].shape[:2] == (4, members)


def test_same_seed_same_episodes_and_resume():
    one, other = make(max_steps=3), make(max_steps=3, seed=9)
    acts = actions(one, 6)

    def run(env, root):
        seen = []
        for act in acts:
            stepped, root = env.step_and_maybe_reset(root.clone().update(act))
            seen.append(stepped["next", "agents", "observation"])
        return torch.stack(seen), root

    one.set_seed(4)
    first, root = run(one, one.reset())
    other.set_seed(4)
    assert torch.equal(first, run(other, other.reset())[0])
    saved, generator = {k: v.clone() for k, v in one.state_dict().items()}, torch.get_rng_state()
    later = run(one, root)[0]
    resumed = make(max_steps=3, seed=1)
    resumed.load_state_dict(saved)
    torch.set_rng_state(generator)
    assert torch.equal(later, run(resumed, root)[0])


def test_device_collector():
    env = make(max_steps=5)
    collector = DeviceCollector(env, None, frames_per_batch=4 * 12, total_frames=4 * 24)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(4, 12)] * 2
    done = torch.cat([batch["next", "done"] for batch in batches], 1)
    assert done[0].squeeze(-1).nonzero().flatten().tolist() == [4, 9, 14, 19]
    assert not batches[0]["agents", "done"].any()
    collector.shutdown()


def test_shared_policy_streams():
    env = AgentStreams(make(max_steps=5))
    batch = next(iter(DeviceCollector(env, None, frames_per_batch=16 * 7, total_frames=16 * 7)))
    assert batch.shape == (16, 7)
    assert batch["observation"].shape[:2] == (16, 7)
    assert batch["valid"].all()
    assert batch["next", "truncated"].sum() == 16


@pytest.mark.parametrize("scenario", REFUSED)
def test_refused_scenarios(scenario):
    with pytest.raises(ValueError, match="expected one whose reset can be masked exactly") as error:
        make(scenario)
    assert REFUSED[scenario] in str(error.value)
    assert "Remedy: torchrl.envs.VmasEnv" in str(error.value)


def scenario_of_ones_own(change):
    from vmas.scenarios.mpe.simple import Scenario

    class Changed(Scenario):
        def reset_world_at(self, env_index=None):
            super().reset_world_at(env_index)
            change(self)

    return Changed()


def test_refused_scenario_with_a_number_in_python():
    def count(scenario):
        scenario.episodes = getattr(scenario, "episodes", 0) + 1

    with pytest.raises(ValueError, match="episodes changes, which is no tensor with a row for each env"):
        make(scenario_of_ones_own(count))


def test_refused_scenario_that_reads_the_episode_before():
    def count(scenario):
        scenario.episodes = getattr(scenario, "episodes", torch.zeros(scenario.world.batch_dim)) + 1

    with pytest.raises(ValueError, match="its reset makes episodes from what the episode before left"):
        make(scenario_of_ones_own(count))


def test_own_scenario():
    env = make(scenario_of_ones_own(lambda scenario: None), num_envs=2)
    assert env.rollout(3).shape == (2, 3)


def test_a_constant_that_changes_later_is_noticed():
    from vmas.scenarios.mpe.simple import Scenario

    class Late(Scenario):
        steps = 0

        def make_world(self, batch_dim, device, **kwargs):
            self.light = torch.zeros(batch_dim, device=device)
            return super().make_world(batch_dim, device, **kwargs)

        def post_step(self):
            type(self).steps += 1
            if self.world.batch_dim == 4 and self.steps > 20:
                self.light = self.light + 1

    env = make(Late())
    with pytest.raises(RuntimeError, match="expected light to stay as it was"):
        env.rollout(40)


def test_uneven_groups_are_refused():
    with pytest.raises(ValueError, match="agents of one group with the same shapes"):
        make("simple_crypto", group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)


def test_vmas_is_not_imported_with_the_package():
    for module in (vmas_env, vmas_slots, vmas_state, vmas_world):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        assert not [name for name in names if name.split(".")[0] == "vmas"]
