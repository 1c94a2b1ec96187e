"""What DeviceEnv owes to captured and resumed runs: no host reads, tracing, seeds, state, and its errors."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose, InitTracker, RewardSum, StepCounter, TransformedEnv

from torchrl_perf.envs import Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum
from torchrl_perf.runtime import host_syncs

TASKS = [CartPole, Pendulum, Acrobot, MountainCar, MountainCarContinuous]


def assert_equal(left, right):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        assert torch.equal(left[key], right[key]), key


def roll(env, steps, td=None):
    """Return the list of step TensorDicts and the last root."""
    td = env.reset() if td is None else td
    out = []
    for _ in range(steps):
        env.rand_action(td)
        td, root = env.step_and_maybe_reset(td)
        out.append(td.clone())
        td = root
    return out, td


@pytest.mark.parametrize("limit", [2, None])
@pytest.mark.parametrize("task", TASKS)
def test_no_host_reads_with_and_without_ends(task, limit):
    env = task(6, max_episode_steps=limit)
    td = env.reset()
    env.rand_action(td)
    action = td["action"].clone()
    mask = torch.tensor([[True], [False]] * 3)
    with host_syncs("cpu") as report:
        for _ in range(5):
            _, td = env.step_and_maybe_reset(td.set("action", action))
        env.step(td.clone())
        env._reset(td.set("_reset", mask))
        env._reset(None)
    assert report.total == 0, str(report)


def test_no_host_reads_under_transforms():
    # ObservationNorm is left out: TorchRL branches on its tensor `standard_normal` in each call, a host read.
    env = TransformedEnv(CartPole(6), Compose(StepCounter(max_steps=3), RewardSum(), InitTracker()))
    td = env.reset()
    env.rand_action(td)
    mask = torch.tensor([[True], [False]] * 3)
    with host_syncs("cpu") as report:
        nxt = env.step(td)["next"]
        env._reset(nxt.exclude("reward").set("_reset", mask))
    assert report.total == 0, str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS)
def test_no_synchronisation_on_cuda(task):
    env = task(64, max_episode_steps=2, device="cuda")
    td = env.reset()
    env.rand_action(td)
    action = td["action"].clone()
    mask = torch.arange(64, device="cuda").view(64, 1) % 2 == 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            _, td = env.step_and_maybe_reset(td.set("action", action))
        env._reset(td.set("_reset", mask))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_graph_replay_equals_eager_between_resets():
    env = CartPole(64, device="cuda", seed=0)
    td = env.reset()
    env.rand_action(td)
    action = td["action"].clone()
    static = td.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        env.step_and_maybe_reset(static.clone())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = env.step_and_maybe_reset(static.clone())
    env.reset()
    for _ in range(40):
        before = env.state.clone()
        graph.replay()
        expected, reward, terminated = env.dynamics(before, action)
        assert torch.equal(out["next", "observation"], expected)
        assert torch.equal(out["next", "reward"].squeeze(-1), reward)
        assert torch.equal(out["next", "terminated"].squeeze(-1), terminated)
        alive = ~out["next", "done"]
        assert torch.equal(torch.where(alive, env.state, 0), torch.where(alive, expected, 0))
        assert (env.state.abs() <= 0.05).logical_or(alive).all()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_fullgraph_step_equals_eager(task):
    eager, traced = task(3, max_episode_steps=4), task(3, max_episode_steps=4)
    compiled = torch.compile(traced.step_and_maybe_reset, backend="eager", fullgraph=True)
    eager.set_seed(0)
    left = eager.reset()
    actions = [eager.rand_action(left.clone())["action"] for _ in range(20)]
    results = []
    for env, step in ((eager, eager.step_and_maybe_reset), (traced, compiled)):
        env.set_seed(0)
        td = env.reset()
        log = []
        for action in actions:
            out, td = step(td.set("action", action))
            log.append(out)
        results.append((log, td))
    for ours, theirs in zip(*(log for log, _ in results), strict=True):
        assert_equal(ours, theirs)
    assert_equal(results[0][1], results[1][1])
    assert torch.equal(eager.state, traced.state)


def test_seed_gives_the_same_data_twice(device):
    env = Pendulum(3, max_episode_steps=3, device=device)

    def data():
        env.set_seed(11)
        return torch.stack(roll(env, 8)[0])

    first = data()
    assert_equal(first, data())
    env.set_seed(12)
    assert not torch.equal(first["observation"], torch.stack(roll(env, 8)[0])["observation"])
    assert torch.equal(Pendulum(3, device=device, seed=7).state, Pendulum(3, device=device, seed=7).state)


@pytest.mark.parametrize("task", TASKS)
def test_state_dict_resumes_bitwise(task, device, tmp_path):
    env = task(4, max_episode_steps=5, device=device, seed=0)
    _, root = roll(env, 7)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    root = root.clone()
    env.set_seed(3)
    expected = torch.stack(roll(env, 9, root.clone())[0])
    other = task(4, max_episode_steps=5, device=device, seed=99)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    assert set(other.state_dict()) == {"state", "elapsed"}
    other.set_seed(3)
    assert_equal(expected, torch.stack(roll(other, 9, root.clone())[0]))


def test_state_dict_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for state"):
        CartPole(3).load_state_dict(CartPole(4).state_dict())


def test_load_writes_in_place():
    env = CartPole(3)
    pointer = env.state.data_ptr()
    env.load_state_dict(CartPole(3).state_dict())
    roll(env, 3)
    assert env.state.data_ptr() == pointer


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_envs": 0}, ValueError, "num_envs >= 1 .*received 0"),
        ({"num_envs": 2.0}, ValueError, "num_envs >= 1 .*received 2.0"),
        ({"num_envs": True}, ValueError, "num_envs"),
        ({"num_envs": 2, "max_episode_steps": 0}, ValueError, "max_episode_steps >= 1 .*received 0"),
        ({"num_envs": 2, "dtype": torch.int64}, TypeError, "float32 or torch.float64, received torch.int64"),
        ({"num_envs": 2, "dtype": torch.float16}, TypeError, "received torch.float16"),
        ({"num_envs": 2, "device": "gpu"}, ValueError, "received 'gpu'"),
        ({"num_envs": 2, "device": "meta"}, ValueError, "CPU or CUDA device, received meta"),
        (
            {"num_envs": 2, "device": "cuda:31"},
            RuntimeError,
            "CUDA devices, received cuda:31. Remedy: pass device='cpu'",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        CartPole(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none():
    with pytest.raises(RuntimeError, match="one of 0 CUDA devices, received cuda"):
        CartPole(2, device="cuda")


@pytest.mark.parametrize(
    ("task", "action", "words"),
    [
        (CartPole, torch.zeros(2, 2, dtype=torch.int64), "index of the action, not one-hot"),
        (CartPole, torch.zeros(2), "integer indices, received .*float32"),
        (CartPole, torch.zeros(2, dtype=torch.bool), "integer indices, received .*bool"),
        (Pendulum, torch.zeros(2), r"action \(2, 1\) of floats, received \(2,\)"),
        (Pendulum, torch.zeros(2, 1, dtype=torch.int64), "of floats, received .*int64"),
    ],
)
def test_bad_actions_are_named(task, action, words):
    env = task(2)
    td = env.reset().set("action", action)
    with pytest.raises(ValueError, match=words):
        env.step(td)


def test_missing_action_and_wrong_batch_are_named():
    env = CartPole(2)
    with pytest.raises(KeyError, match=r"expected the key 'action', received \['done', 'is_init'"):
        env.step(env.reset())
    with pytest.raises(RuntimeError, match=r"batch_size"):
        env.step_and_maybe_reset(TensorDict({"action": torch.zeros(3, dtype=torch.int64)}, [3], device="cpu"))


def test_float32_action_of_a_float64_env_is_cast():
    env = Pendulum(2, dtype=torch.float64)
    assert env.step(env.reset().set("action", torch.ones(2, 1)))["next", "reward"].dtype == torch.float64
