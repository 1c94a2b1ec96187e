"""The auto-reset base of tasks with named state tensors, several keys and groups."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv, check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import AutoResetEnv, CartPole, EnvSpecs, StructuredEnv, Transition
from torchrl_perf.runtime import host_syncs

FLAGS = ("done", "terminated", "truncated")
MEMBERS = 3


class Tally(StructuredEnv):
    """Identifiable numbers: state ``row`` and ``count`` int64, ``alive`` bool [N, 3], ``noise`` drawn in each step.

    Action [N, 3] int64: 1 ends the member, whose reward is ``100 row + count``. The env ends with its last member.
    """

    def __init__(self, num_envs, *, limit=None, shared=None, **options):
        super().__init__(num_envs, max_episode_steps=limit, **options)
        self.shared = shared
        self.register_buffer("episodes", torch.zeros(num_envs, dtype=torch.int64, device=self.device))
        self.begin(0)

    def make_specs(self):
        return EnvSpecs(
            observation={
                ("team", "observation"): self.unbounded(MEMBERS, 2),
                ("team", "active"): self.choice(2, MEMBERS, 1, dtype=torch.bool),
                "clock": self.unbounded(1, dtype=torch.int64),
            },
            action={("team", "action"): self.choice(2, MEMBERS)},
            reward={("team", "reward"): self.unbounded(MEMBERS, 1)},
            info={("team", "ended"): self.unbounded(MEMBERS, 1, dtype=torch.int8)},
            groups={"team": MEMBERS},
        )

    def draw_state(self):
        n, device = self.num_envs, self.device
        return {
            "row": torch.arange(n, device=device),
            "count": torch.zeros(n, 1, dtype=torch.int64, device=device),
            "alive": torch.ones(n, MEMBERS, dtype=torch.bool, device=device),
            "noise": torch.rand(n, MEMBERS, 1, dtype=self.dtype, device=device),
        }

    def redraw_state(self, ended):
        state = self.draw_state()
        if self.shared is not None:
            index = (ended.squeeze(-1).cumsum(0) - 1).remainder(self.shared)
            state["noise"] = state["noise"][: self.shared].index_select(0, index)
        return state

    def advance(self, state, action):
        self.episodes.add_(1)
        ends = (action == 1) & state["alive"]
        count, alive = state["count"] + 1, state["alive"] & ~ends
        reward = (100 * state["row"].view(-1, 1) + count) * ends
        following = {**state, "count": count, "alive": alive, "noise": torch.rand_like(state["noise"])}
        entries = {("team", "reward"): reward.to(self.dtype).unsqueeze(-1)}
        entries["team", "ended"] = ends.to(torch.int8).unsqueeze(-1)
        return Transition(following, entries, ~alive.any(-1))

    def observe(self, state):
        count = state["count"].to(self.dtype).view(-1, 1, 1).expand(-1, MEMBERS, 1)
        return {
            ("team", "observation"): torch.cat((count, state["noise"]), -1),
            ("team", "active"): state["alive"].unsqueeze(-1),
            "clock": state["count"],
        }

    def group_flags(self, step, truncated):
        alive = step.next_state["alive"].unsqueeze(-1)
        return {("team", "terminated"): ~alive, ("team", "truncated"): alive & truncated.unsqueeze(1)}


def acted(td, ends):
    return td.set(("team", "action"), torch.as_tensor(ends, device=td.device).long())


def roll(env, steps, td=None):
    """The list of step TensorDicts and the last root, under random ends."""
    td = env.reset() if td is None else td
    out = []
    for _ in range(steps):
        td, root = env.step_and_maybe_reset(acted(td, torch.rand(env.num_envs, MEMBERS) < 0.3))
        out.append(td.clone())
        td = root
    return out, td


def assert_equal(left, right):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        assert torch.equal(left[key], right[key]), key


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_specs_pass_torchrl_check(num_envs, dtype, device):
    env = Tally(num_envs, limit=5, dtype=dtype, device=device)
    check_env_specs(env)
    assert env.reward_key == ("team", "reward")
    assert env.full_observation_spec["team"].shape == (num_envs, MEMBERS)
    assert isinstance(env, AutoResetEnv)
    assert isinstance(CartPole(1), AutoResetEnv)


@settings(max_examples=15, deadline=None)
@given(
    ends=st.lists(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=2), min_size=1, max_size=9
    ),
    limit=st.sampled_from([1, 2, 4, None]),
)
def test_auto_reset_equals_a_loop_over_single_episodes(ends, limit):
    env = Tally(2, limit=limit)
    td = env.reset()
    count, alive, ended_before = [0, 0], [[True] * 3 for _ in range(2)], [[False] * 3 for _ in range(2)]
    for step in ends:
        td, root = env.step_and_maybe_reset(acted(td, step))
        nxt = td["next"]
        for row in range(2):
            assert td["team", "active"][row, :, 0].tolist() == alive[row]
            assert td["team", "ended"][row, :, 0].bool().tolist() == ended_before[row]
            assert not td["team", "done"].any()
            count[row] += 1
            ended = [a and e for a, e in zip(alive[row], step[row], strict=True)]
            alive[row] = [a and not e for a, e in zip(alive[row], ended, strict=True)]
            truncated, terminated = limit is not None and count[row] >= limit, not any(alive[row])
            assert nxt["clock"][row] == count[row]
            assert nxt["team", "reward"][row, :, 0].tolist() == [(100 * row + count[row]) * e for e in ended]
            assert nxt["team", "terminated"][row, :, 0].tolist() == [not a for a in alive[row]]
            assert nxt["team", "truncated"][row, :, 0].tolist() == [a and truncated for a in alive[row]]
            assert torch.equal(nxt["team", "done"], nxt["team", "terminated"] | nxt["team", "truncated"])
            assert [nxt[flag][row].item() for flag in FLAGS] == [terminated or truncated, terminated, truncated]
            ended_before[row] = ended
            if terminated or truncated:
                count[row], alive[row], ended_before[row] = 0, [True] * 3, [False] * 3
            assert root["is_init"][row].item() == (terminated or truncated)
            assert env.elapsed[row] == count[row]
        td = root


def test_a_row_that_goes_on_is_observed_alike_under_next_and_at_the_root():
    env = Tally(5, limit=6)
    steps, _ = roll(env, 25)
    ends = 0
    for before, after in pairwise(steps):
        done = before["next", "done"]
        ends += int(done.sum())
        same = (before["next", "team", "observation"] == after["team", "observation"]).flatten(1).all(-1, keepdim=True)
        assert torch.equal(same, ~done)
    assert ends > 5


def test_masked_reset_redraws_its_rows_only_and_only_once():
    env = Tally(4)
    env.step_and_maybe_reset(acted(env.reset(), torch.zeros(4, MEMBERS)))
    mask = torch.tensor([[True], [False], [True], [False]])
    before = env.state_noise.clone()
    out = env._reset(TensorDict({"_reset": mask}, [4]))
    changed = (env.state_noise != before).flatten(1).any(-1, keepdim=True)
    assert torch.equal(changed, mask)
    assert torch.equal(out["is_init"], mask)
    assert torch.equal(out["team", "observation"], env.observe(env._state())["team", "observation"])
    again = env.state_noise.clone()
    env._reset(TensorDict({"_reset": mask}, [4]))
    assert torch.equal(env.state_noise, again)
    env._reset(None)
    assert (env.state_noise != again).all()


def test_fewer_fresh_states_are_handed_out_in_order():
    env = Tally(6, shared=2)
    td, root = env.step_and_maybe_reset(acted(env.reset(), torch.tensor([1, 1, 0, 1, 1, 1]).view(6, 1).expand(6, 3)))
    noise = root["team", "observation"][..., 1]
    assert torch.equal(noise[[0, 1]], noise[[3, 4]])
    assert torch.equal(noise[0], noise[5])
    assert (noise[0] != noise[1]).all()
    assert torch.equal(noise[2], td["next", "team", "observation"][2, :, 1])


def test_nothing_returned_is_internal_or_changed_later():
    env = Tally(4, limit=3)
    reset = env.reset()
    td, root = env.step_and_maybe_reset(acted(reset.clone(), torch.zeros(4, MEMBERS)))
    stepped = env.step(acted(root.clone(), torch.zeros(4, MEMBERS)))
    results = [reset, td, root, stepped]
    copies = [result.clone() for result in results]
    roll(env, 6, root.clone())
    env.reset()
    for result, copy in zip(results, copies, strict=True):
        assert_equal(result, copy)
    buffers = {buffer.untyped_storage().data_ptr() for buffer in env.buffers()}
    for result in results:
        for key, value in result.items(True, True):
            assert value.untyped_storage().data_ptr() not in buffers, key


def test_what_the_policy_wrote_travels_on_in_shells_of_its_own():
    env = Tally(2)
    td = acted(env.reset(), torch.zeros(2, MEMBERS))
    td["team", "loc"] = torch.ones(2, MEMBERS, 1)
    td["hidden"] = torch.ones(2)
    expected = env._step_mdp(env.step(td.clone()))
    stepped, root = env.step_and_maybe_reset(td)
    assert set(root.keys(True, True)) == set(expected.keys(True, True))
    root["team"]["extra"] = torch.zeros(2, MEMBERS)
    assert "extra" not in stepped["team"].keys()
    assert "reward" not in root["team"].keys()


def test_general_path_equals_the_short_one():
    logs = []
    for preset in (False, True):
        env = Tally(3, limit=4)
        env.set_seed(1)
        td, log = env.reset(), []
        for step in range(9):
            td = acted(td, torch.tensor([[step == 2] * 3, [step % 2 == 1] * 3, [False] * 3]))
            if preset:
                td["next"] = TensorDict({"note": torch.ones(3)}, [3])
            td, root = env.step_and_maybe_reset(td)
            log.append(td.exclude(("next", "note")).clone())
            td = root.exclude("note")
        logs.append(torch.stack(log))
    assert_equal(*logs)


def test_partial_steps_freeze_the_other_rows():
    env = Tally(3)
    td = acted(env.reset(), torch.zeros(3, MEMBERS))
    noise = env.state_noise.clone()
    env.step(td.set("_step", torch.tensor([True, False, True])))
    assert env.state_count[:, 0].tolist() == env.elapsed[:, 0].tolist() == [1, 0, 1]
    assert torch.equal(env.state_noise[1], noise[1])


def test_a_state_that_is_not_finite_is_truncated():
    env = Tally(3)
    env.resets_nonfinite = True

    def broken(state, action, advance=env.advance):
        step = advance(state, action)
        step.next_state["noise"][1] = float("nan")
        return step

    env.advance = broken
    td, root = env.step_and_maybe_reset(acted(env.reset(), torch.zeros(3, MEMBERS)))
    assert td["next", "truncated"][:, 0].tolist() == [False, True, False]
    assert td["next", "team", "truncated"][1].all()
    assert root["team", "observation"].isfinite().all()


def test_state_dict_resumes_bitwise(device, tmp_path):
    env = Tally(4, limit=5, device=device)
    _, root = roll(env, 7)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    root = root.clone()
    torch.manual_seed(3)
    expected = torch.stack(roll(env, 9, root.clone())[0])
    other = Tally(4, limit=5, device=device)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    state = {f"state_{name}" for name in ("row", "count", "alive", "noise")}
    assert set(other.state_dict()) == state | {"elapsed", "episodes"}
    torch.manual_seed(3)
    assert_equal(expected, torch.stack(roll(other, 9, root.clone())[0]))


def test_no_host_reads():
    env = Tally(4, limit=2)
    td = env.reset()
    action = torch.tensor([[1, 1, 1], [1, 0, 0]] * 2)
    mask = torch.tensor([[True], [False]] * 2)
    with host_syncs("cpu") as report:
        for _ in range(4):
            _, td = env.step_and_maybe_reset(td.set(("team", "action"), action))
        env.step(td.clone())
        env._reset(td.set("_reset", mask))
        env._reset(None)
    assert report.total == 0, str(report)


@pytest.mark.usefixtures("fresh_dynamo")
def test_fullgraph_step_equals_eager():
    logs = []
    for compile_it in (False, True):
        env = Tally(3, limit=4)
        step = env.step_and_maybe_reset
        if compile_it:
            step = torch.compile(step, backend="eager", fullgraph=True)
        env.set_seed(0)
        td, log = env.reset(), []
        for number in range(8):
            td, root = step(acted(td, torch.tensor([[number % 3 == 2] * 3, [True, False, False], [False] * 3])))
            log.append(td.clone())
            td = root
        logs.append(torch.stack(log))
    assert_equal(*logs)


@pytest.mark.parametrize("collector", ["torchrl", "eager", "compile", "rollout", "transformed"])
def test_in_torchrls_loops(collector):
    env = Tally(4, limit=5)
    if collector == "torchrl":
        loop = Collector(env, env.rand_action, frames_per_batch=80, total_frames=80)
        data = next(iter(loop)).clone()
        loop.shutdown()
    elif collector in ("eager", "compile"):
        data = DeviceCollector(env, None, frames_per_batch=80, mode=collector).collect()
    elif collector == "rollout":
        data = env.rollout(20, break_when_any_done=False)
    else:
        outer = TransformedEnv(env, Compose(StepCounter(), RewardSum(reset_keys=["_reset"])))
        data = outer.rollout(20, break_when_any_done=False)
        assert torch.equal(data["next", "step_count"], data["next", "clock"])
    done = data["next", "done"]
    assert done.any()
    follow = torch.where(done[:, :-1], 0, data["next", "clock"][:, :-1])
    assert torch.equal(data["clock"][:, 1:], follow)
    assert torch.equal(data["is_init"][:, 1:], done[:, :-1])
    ended = data["next", "team", "ended"].bool()
    assert torch.equal(ended, data["team", "active"] & ~data["next", "team", "active"])
    if collector != "transformed":  # there TorchRL carries the flags of a group over
        assert not data["team", "done"].any()
    repeated = ended[:, :-1] & ~done[:, :-1].unsqueeze(2)
    assert torch.equal(data["team", "ended"][:, 1:].bool(), repeated)


class Pair(StructuredEnv):
    """Two actions, neither in a group."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.begin()

    def make_specs(self):
        action = {("action", "kind"): self.choice(3), ("action", "size"): self.box(-1.0, torch.ones(2), 2)}
        return EnvSpecs({"observation": self.unbounded(2)}, action, {"reward": self.unbounded(1)})

    def draw_state(self):
        return {"x": torch.zeros(self.num_envs, 2)}

    def advance(self, state, action):
        x = state["x"] + action["action", "size"] * action["action", "kind"].unsqueeze(-1)
        return Transition({"x": x}, {"reward": x[:, :1].clone()}, torch.zeros(self.num_envs, dtype=torch.bool))

    def observe(self, state):
        return {"observation": state["x"]}


def test_several_actions_come_as_a_dict():
    env = Pair(2)
    check_env_specs(env)
    action = TensorDict({"kind": torch.tensor([0, 2]), "size": torch.ones(2, 2)}, [2])
    nxt = env.step(env.reset().set("action", action))["next"]
    assert nxt["observation"].tolist() == [[0, 0], [2, 2]]


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("kind", None, KeyError, r"expected the key \('action', 'kind'\), received"),
        ("kind", torch.zeros(2), ValueError, r"\(2,\) of integer indices, received \(2,\) .*float32"),
        ("size", torch.zeros(2, 3), ValueError, r"\(2, 2\) of floats, received \(2, 3\)"),
    ],
)
def test_bad_actions_are_named(key, value, error, words):
    env = Pair(2)
    action = TensorDict({"kind": torch.zeros(2, dtype=torch.int64), "size": torch.ones(2, 2)}, [2])
    action = action.exclude(key) if value is None else action.set(key, value)
    with pytest.raises(error, match=words):
        env.step(env.reset().set("action", action))
