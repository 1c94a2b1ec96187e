"""AgentStreams: rows of agents against the env itself, validity, ends, masked resets, the collector's modes, errors."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymEnv, check_env_specs
from walkers import LIMIT, Walkers

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime import no_host_sync


def collected(env, steps, mode="eager", policy=None):
    collector = DeviceCollector(env, policy, frames_per_batch=env.batch_size[0] * steps, mode=mode)
    return collector.collect()


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("own_flags", [True, False])
def test_specs(discrete, own_flags, device):
    env = AgentStreams(Walkers(discrete=discrete, own_flags=own_flags, device=device))
    assert env.batch_size == (6,)
    assert (env.num_agents, env.group) == (2, "agents")
    check_env_specs(env)


def test_all_agents_of_an_env_in_each_row(device):
    """The row's own agent first, then the others in turn; zeros for those that are gone."""
    env = AgentStreams(Walkers(3, 2, device=device), joint=True)
    check_env_specs(env)
    td, gone = env.reset(), 0
    for _ in range(40):
        own, there = td["observation"].view(3, 2, -1), td["valid"].view(3, 2, 1)
        seen = torch.cat((own * there, there.to(own.dtype)), -1)
        expected = torch.stack((seen, seen.flip(1)), 2).flatten(2).flatten(0, 1)
        torch.testing.assert_close(td["joint"], expected)
        gone += int((~there).sum())
        td["action"] = torch.ones(6, dtype=torch.int64, device=device)
        _, td = env.step_and_maybe_reset(td)
    assert gone


def test_no_joint_view_without_a_vector_of_each_agent():
    base = Walkers(3, 2)
    base.set_spec_lock_(mode=False)
    base.observation_spec["agents", "observation"] = Unbounded(shape=(3, 2, 4, 4))
    with pytest.raises(ValueError, match=r"joint: expected a vector of floats \('agents', 'observation'\)"):
        AgentStreams(base, joint=True)


def test_a_row_is_an_agent_of_an_env(device):
    """Every step against the env that is stepped beside it, agent by agent."""
    base, env = Walkers(3, 2, device=device), AgentStreams(Walkers(3, 2, device=device))
    ours, theirs = env.reset(), base.reset()
    for step in range(40):
        action = torch.randint(2, (6,), device=device, generator=torch.Generator(device).manual_seed(step))
        torch.testing.assert_close(ours["observation"], theirs["agents", "observation"].flatten(0, 1))
        assert torch.equal(ours["valid"], theirs["agents", "active"].flatten(0, 1))
        assert torch.equal(ours["is_init"], theirs["is_init"].repeat_interleave(2, 0))
        ours["action"], theirs["agents", "action"] = action, action.view(3, 2)
        ours, after = env.step_and_maybe_reset(ours)
        theirs, following = base.step(theirs), None
        for key in ("reward", "event", "observation"):
            assert torch.equal(ours["next", key], theirs["next", "agents", key].flatten(0, 1)), key
        valid = ours["valid"]
        assert torch.equal(ours["next", "terminated"], theirs["next", "agents", "terminated"].flatten(0, 1) & valid)
        of_env = theirs["next", "done"].repeat_interleave(2, 0)
        own = theirs["next", "agents", "done"].flatten(0, 1)
        assert torch.equal(ours["next", "done"], torch.where(valid, own, of_env))
        assert torch.equal(ours["next", "done"], ours["next", "terminated"] | ours["next", "truncated"])
        following = base._step_mdp(theirs)
        if theirs["next", "done"].any():
            fresh = base._reset(TensorDict({"_reset": theirs["next", "done"]}, [3], device=device))
            for key in (("agents", "observation"), ("agents", "active"), "is_init"):
                following[key] = fresh[key]
        ours, theirs = after, following


def test_entries_are_views_where_the_env_is_contiguous():
    base = Walkers(3, 2)
    env = AgentStreams(base)
    td = base.reset()
    streams = env._observed(td)
    assert streams["observation"].data_ptr() == td["agents", "observation"].data_ptr()
    assert env.env_action(env.rand_action(env.reset()))["agents", "action"].shape == (3, 2)


def test_what_an_agent_that_is_gone_leaves():
    batch = collected(AgentStreams(Walkers(64, 3)), 60)
    valid, following = batch["valid"], batch["next"]
    assert 0.3 < valid.float().mean() < 0.9
    assert not (following["terminated"] & ~valid).any()
    assert (following["reward"] == 0)[~valid].all()
    # an agent is valid from its env's start to its own end
    ended = (following["done"] & valid)[:, :-1]
    assert not (batch["valid"][:, 1:] & ended & ~batch["is_init"][:, 1:]).any()
    assert batch["valid"][batch["is_init"]].all()
    # all of an env's streams are done together where it is reset
    last = batch["is_init"][:, 1:]
    assert following["done"][:, :-1][last].all()
    together = following["done"].unflatten(0, (64, 3)).all(1)[:, :-1]
    assert torch.equal(together, last.unflatten(0, (64, 3))[:, 0])


def test_without_flags_of_their_own_agents_end_with_their_env():
    batch = collected(AgentStreams(Walkers(16, 2, own_flags=False)), 30)
    assert batch["valid"].all()
    done = batch["next", "done"].unflatten(0, (16, 2))
    assert done.any()
    assert torch.equal(done[:, 0], done[:, 1])


@pytest.mark.parametrize("sampler", ["random", "prioritized"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_terminals_in_the_buffer_are_the_events(sampler, n_step, device):
    """Each end that an env reports is a row that is drawn, and rows of agents that are gone never are."""
    env = AgentStreams(Walkers(16, 3, device=device))
    collector = DeviceCollector(env, None, frames_per_batch=48 * 8, mode="eager")
    buffer = make_replay_buffer(
        48 * 40, batch_size=256, device=device, sampler=sampler, n_step=n_step, mask_key="valid", gamma=0.9
    )
    events = 0
    for _ in range(5):
        batch = collector.collect()
        events += int(batch["next", "event"].sum())
        buffer.extend(batch.exclude("collector"))
    terminated, valid = buffer.storage.field(("next", "terminated")), buffer.storage.field("valid")
    assert int(terminated.sum()) == int((terminated & valid).sum()) == events > 50
    index = torch.arange(48 * 40, device=device)
    rows = buffer.storage.get(index)
    seen = torch.zeros(48 * 40, dtype=torch.bool, device=device)
    for _ in range(120):
        sample = buffer.sample()
        assert sample["valid"].all()
        seen[sample["index"]] = True
    # every end is drawn
    plain = terminated.view(-1, 1)[index] & rows["valid"]
    assert seen[plain.squeeze(-1)].all()


def test_n_step_returns_stay_within_an_agent(device):
    """Against a loop over each agent's own steps."""
    env = AgentStreams(Walkers(8, 3, device=device))
    collector = DeviceCollector(env, None, frames_per_batch=24 * 30, mode="eager")
    buffer = make_replay_buffer(24 * 30, batch_size=8, device=device, n_step=3, mask_key="valid", gamma=0.9)
    batch = collector.collect()
    index = buffer.extend(batch.exclude("collector"))
    rows = buffer.storage.get(index)
    reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
    for n in range(24):
        for t in range(27):
            if not batch["valid"][n, t]:
                continue
            total, steps = 0.0, 0
            for k in range(3):
                assert batch["valid"][n, t + k]
                total += 0.9**k * float(reward[n, t + k])
                steps += 1
                if done[n, t + k]:
                    break
            assert float(rows["next", "reward"][n, t]) == pytest.approx(total, abs=1e-6)
            assert int(rows["steps_to_next_obs"][n, t]) == steps
            end = batch["next", "terminated"][n, t + steps - 1]
            assert torch.equal(rows["next", "terminated"][n, t], end)


@pytest.mark.parametrize("mode", ["eager", "compile", pytest.param("graph", marks=pytest.mark.gpu)])
@pytest.mark.slow_compiled
def test_modes_agree(mode, device, fresh_dynamo):
    if mode == "graph" and device.type == "cpu":
        pytest.skip("graphs need CUDA")

    def policy(td):
        # of the observation alone, so that the modes need not share random numbers
        noise = (td["observation"].sum(-1) * 12.9898).sin() * 43758.5453
        return td.set("action", (noise.frac().abs() > 0.4).to(torch.int64))

    expected = collected(AgentStreams(Walkers(8, 3, device=device)), 40, policy=policy)
    batch = collected(AgentStreams(Walkers(8, 3, device=device)), 40, mode, policy)
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in batch.keys(True, True):
        torch.testing.assert_close(batch[key], expected[key], msg=str(key))
    assert (batch["next", "done"] & batch["valid"]).sum() > 8


def test_a_rollout_waits_for_nothing():
    collector = DeviceCollector(AgentStreams(Walkers(8, 3)), None, frames_per_batch=24 * 20, mode="compile")
    collector._step_fn = collector._step
    collector.collect()
    with no_host_sync():
        collector.collect()


def test_a_truncation_of_all_streams_from_outside_resets_the_env():
    env = AgentStreams(Walkers(2, 2))
    env.reset()
    for _ in range(2):
        env.step(env.reset().set("action", torch.ones(4, dtype=torch.int64)))
    mask = torch.tensor([[True], [True], [True], [False]])
    env.base_env.place.fill_(2.0)
    root = env._reset(TensorDict({"_reset": mask}, [4]))
    assert env.base_env.place.tolist() == [[-1.0, 0.0], [2.0, 2.0]]
    assert root["is_init"].squeeze(-1).tolist() == [True, True, False, False]


def test_limit_is_a_truncation():
    env = AgentStreams(Walkers(1, 2))
    td = env.reset()
    for step in range(LIMIT):
        td["action"] = torch.tensor([0, step % 2])
        stepped, td = env.step_and_maybe_reset(td)
    assert stepped["valid"].squeeze(-1).tolist() == [False, True]  # the first has fallen off
    assert stepped["next", "truncated"].all()
    assert not stepped["next", "terminated"].any()
    assert td["valid"].all()


class TestErrors:
    def test_no_such_group(self):
        with pytest.raises(ValueError, match=r"group: expected a group of agents .* received 'boats'; there are"):
            AgentStreams(Walkers(), "boats")

    def test_an_env_without_groups(self):
        with pytest.raises(ValueError, match=r"group: expected a group of agents"):
            AgentStreams(CartPole(2))

    def test_an_env_that_is_no_batch(self):
        with pytest.raises(ValueError, match=r"env: expected batch_size \[E\], received \[\]"):
            AgentStreams(GymEnv("CartPole-v1"))

    def test_a_reward_of_the_env_alone(self):
        env = Walkers()
        env.reward_spec = Composite(reward=Unbounded((3, 1)), shape=(3,))
        with pytest.raises(ValueError, match=r"env: expected a reward \('agents', 'reward'\) for each agent"):
            AgentStreams(env)

    def test_another_action_beside(self):
        env = Walkers()
        env.action_spec = Composite(agents=env.full_action_spec["agents"], brake=Unbounded((3, 1)), shape=(3,))
        with pytest.raises(ValueError, match=r"env: expected one action below 'agents' and no other"):
            AgentStreams(env)

    def test_no_action(self):
        env = AgentStreams(Walkers())
        with pytest.raises(KeyError, match="expected the key 'action', received"):
            env._step(env.reset())

    def test_no_validity(self):
        env = AgentStreams(Walkers())
        with pytest.raises(KeyError, match="expected the key 'valid', received"):
            env._step(env.rand_action(env.reset()).exclude("valid"))
