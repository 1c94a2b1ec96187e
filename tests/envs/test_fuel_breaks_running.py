"""FuelBreaks in every way of running: without host reads, by rows, traced, compiled, captured, resumed, any action."""

import pytest
import torch
from breaks_envs import MODES, REWARDS, hilly, play, small
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.random_actions import RandomActions
from torchrl_perf.envs import FuelBreaks, Landscape
from torchrl_perf.runtime import no_host_sync


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reward", REWARDS)
def test_no_host_read(mode, reward, device):
    env = hilly(mode=mode, reward=reward, device=device)
    policy, mask = RandomActions(env), torch.tensor([[True], [False]] * 3, device=device)
    td = env.reset()
    with no_host_sync(device):
        for _ in range(6):
            _, td = env.step_and_maybe_reset(policy(td))
        env.step(policy(td.clone()))
        env._reset(td.clone().set("_reset", mask))
        env._reset(None)


def test_masked_resets_put_episodes_out_of_step():
    env = small(4, reward="shaped")
    td = env.rand_action(env.reset())
    env.step_and_maybe_reset(td)
    mask = torch.tensor([[True], [False], [True], [False]])
    root = env._reset(TensorDict({"_reset": mask}, batch_size=[4]))
    assert root["breaks"].sum((1, 2)).tolist() == [0, 1, 0, 1]
    out, root = env.step_and_maybe_reset(env.rand_action(root))
    out, root = env.step_and_maybe_reset(env.rand_action(root))
    assert out["next", "done"].flatten().tolist() == [False, True, False, True]
    assert root["breaks"].sum((1, 2)).tolist() == [2, 0, 2, 0]
    out, root = env.step_and_maybe_reset(env.rand_action(root))
    assert out["next", "done"].flatten().tolist() == [True, False, True, False]


@pytest.mark.parametrize("mode", MODES)
def test_one_env_is_that_row_of_many(mode, device):
    many = hilly(12, mode=mode, reward="shaped", device=device)
    one = hilly(1, mode=mode, reward="shaped", device=device)
    for name, buffer in one._state().items():
        buffer.copy_(many._state()[name][7:8])
    for _ in range(4):
        action = many.rand_action()
        left, right = many.step(action)["next"], one.step(action[7:8].clone())["next"]
        for key, value in right.items(True, True):
            assert torch.equal(left[key][7:8], value), key
        if right["done"].any():
            break


@pytest.mark.parametrize("reward", REWARDS)
def test_seeds(reward):
    logs = [play(hilly(reward=reward, seed=seed), 9)["next"] for seed in (3, 3, 4)]
    assert torch.equal(logs[0]["reward"], logs[1]["reward"])
    assert not torch.equal(logs[0]["reward"], logs[2]["reward"])


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_traced_whole_equals_eager(reward):
    envs = [hilly(reward=reward) for _ in range(2)]
    traced = torch.compile(envs[1].step_and_maybe_reset, backend="eager", fullgraph=True)
    logs = []
    for env, step in zip(envs, (envs[0].step_and_maybe_reset, traced), strict=True):
        env.set_seed(0)
        td, log = env.reset(), []
        for cell in (0, 7, 12, 19, 3, 5):
            out, td = step(td.set("action", torch.full((6,), cell)))
            log.append(out.clone())
        logs.append(torch.stack(log))
    for key, value in logs[0].items(True, True):
        assert torch.equal(value, logs[1][key]), key


def test_variants_agree(variant):
    env = hilly(reward="shaped", device=variant.device)

    def step(breaks, remaining, number, seed, burned, action):
        state = {"breaks": breaks, "remaining": remaining, "landscape_id": number, "fire_seed": seed, "burned": burned}
        made = env.advance(state, action)
        return made.entries["reward"], made.next_state["breaks"], env.observe(made.next_state)["observation"]

    names = ("breaks", "remaining", "landscape_id", "fire_seed", "burned")
    parts = [*(env.snapshot()[name] for name in names), env.rand_action()["action"]]
    (reward, *got), (expected_reward, *expected) = variant(step)(*parts), step(*parts)
    torch.testing.assert_close(reward, expected_reward, rtol=0, atol=1e-6)  # a sum over fires, in another order
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_collects_on_cuda_in_every_mode(mode, reward):
    env = FuelBreaks(64, device="cuda", seed=0, reward=reward, size=10, budget=5)
    policy = RandomActions(env)
    collector = DeviceCollector(env, policy, frames_per_batch=64 * 10, total_frames=64 * 20, mode=mode)
    for _ in range(2):
        batch = collector.collect()
        assert batch["next", "done"].sum() == 64 * 2
        ended = batch["next", "done"].squeeze(-1)
        assert (batch["next", "breaks"][ended].sum((1, 2)) == 5).all()
        burned = batch["next", "burned"][ended]
        assert 0.2 < burned.mean() < 0.95
        if reward == "terminal":
            assert torch.equal(batch["next", "reward"][ended], -burned)


def test_state_dict_resumes_bitwise():
    env, other = hilly(reward="shaped"), hilly(reward="shaped", seed=9)
    td = env.reset()
    for _ in range(2):
        _, td = env.step_and_maybe_reset(env.rand_action(td))
    other.load_state_dict(env.state_dict())
    logs = []
    for part in (env, other):
        torch.manual_seed(5)
        root, log = td.clone(), []
        for _ in range(5):
            out, root = part.step_and_maybe_reset(part.rand_action(root))
            log.append(out.clone())
        logs.append(torch.stack(log))
    for key, value in logs[0].items(True, True):
        assert torch.equal(value, logs[1][key]), key


@settings(max_examples=20, deadline=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.lists(st.integers(-3, 30), min_size=12, max_size=12),
    st.sampled_from(MODES),
    st.sampled_from(REWARDS),
    st.sampled_from([4, 8]),
    st.floats(0.0, 1.0),
)
def test_any_actions_keep_every_number_in_range(size, cells, mode, reward, neighbours, p):
    budget = max(1, size[0] * size[1] // 2)
    land = Landscape.uniform(p, size)
    env = FuelBreaks(2, landscape=land, budget=budget, mode=mode, reward=reward, neighbours=neighbours, fires=3)
    td = env.reset()
    for step in range(6):
        action = torch.tensor(cells[2 * step : 2 * step + 2])
        if mode == "one_shot":
            action = (action.unsqueeze(-1) + torch.arange(size[0] * size[1])) % 3
        out, td = env.step_and_maybe_reset(td.set("action", action))
        following = out["next"]
        assert ((following["burned"] >= 0) & (following["burned"] <= 1)).all()
        assert following["reward"].isfinite().all()
        assert following["observation"].isfinite().all()
        assert (following["breaks"].sum((1, 2)) <= budget).all()
        assert torch.equal(following["action_mask"], ~following["breaks"].flatten(1))
        period = budget if mode == "sequential" else 1
        assert following["done"].all() == ((step + 1) % period == 0)
