"""LatentField as an env: specs, rewards, resets, rows, host waits, forms of execution, bad input."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import LatentField
from torchrl_perf.envs.latent_field import FIELDS, duffing, goal_reward, limit_cycle
from torchrl_perf.runtime import capture, no_host_sync
from torchrl_perf.runtime.compile import compiled


def act(env, action=None):
    zeros = torch.zeros(env.num_envs, 2, dtype=env.dtype, device=env.device)
    return env._reset(None).set("action", zeros if action is None else action)


@pytest.mark.parametrize(
    ("observation", "noise"),
    [("log_linear", "poisson"), ("linear", "gaussian"), ("identity", "none"), ("mlp", "gaussian")],
)
def test_specs(observation, noise, device):
    env = LatentField(3, observation=observation, noise=noise, max_episode_steps=5, device=device)
    check_env_specs(env)
    assert env.observation_spec["observation"].shape == (3, 2 if observation == "identity" else 20)
    assert float(env.action_spec.space.high.amax()) == pytest.approx(0.1)
    assert env.observation_noise == noise


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_field_runs(field):
    env = LatentField(4, field=field, observation_size=7, seed=0)
    data = env.rollout(5, auto_reset=True)
    assert data["observation"].shape == (4, 5, 7)
    assert data["next", "latent"].isfinite().all()
    assert (data["next", "reward"] == 0).all() and not data["next", "done"].any()


def test_action_is_clipped_and_pushes():
    env = LatentField(2, field="duffing", noise="none", process_noise=0.0, action_max=0.5, integrator="rk4", substeps=2)
    td = act(env, torch.tensor([[0.5, -0.5], [9.0, -9.0]]))
    env.state_latent.copy_(torch.tensor([[0.2, 0.1], [0.2, 0.1]]))
    step = env.step(td)["next", "latent"]
    assert torch.equal(step[0], step[1])
    assert torch.equal(step, env.predict(torch.tensor([[0.2, 0.1]]), torch.tensor([[0.5, -0.5]])).expand(2, 2))
    free = env.predict(torch.tensor([0.2, 0.1]), torch.zeros(2))
    torch.testing.assert_close(step[0] - free, torch.tensor([0.05, -0.05]), rtol=0.1, atol=1e-3)


def test_action_encoder_and_own_field():
    env = LatentField(
        2,
        field=partial(limit_cycle, d=4.0),
        noise="none",
        process_noise=0.0,
        action_encoder=lambda action, latent: action.flip(-1) * latent,
    )
    z, action = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.05, 0.1]])
    torch.testing.assert_close(env.predict(z, action), torch.tensor([[2.0 + 0.1 * 0.1 * 2.0, 0.1 * 2.0]]))


def test_reward_with_a_goal(device):
    env = LatentField(5, goal=(0.0, 1.0), action_cost=2.0, device=device, seed=0)
    step = env.step(act(env, torch.full((5, 2), 0.3, device=device)))["next"]
    z = step["latent"]
    expected = -(z[:, 0] ** 2) - (z[:, 1] - 1) ** 2 - 2.0 * 2 * 0.1**2
    torch.testing.assert_close(step["reward"].squeeze(-1), expected)
    assert goal_reward(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 2.0]), torch.zeros(2), 0.5).item() == -11.5


def test_episodes_end_by_the_limit_alone(device):
    env = LatentField(4, max_episode_steps=3, initial_range=0.25, device=device, seed=0)
    td = act(env)
    for t in range(6):
        stepped, td = env.step_and_maybe_reset(td)
        last = t % 3 == 2
        assert (stepped["next", "truncated"] == last).all() and not stepped["next", "terminated"].any()
        assert (td["is_init"] == last).all()
        if last:
            assert (td["latent"].abs() <= 0.25).all() and not torch.equal(td["latent"], stepped["next", "latent"])


def test_a_point_that_runs_away_begins_anew():
    env = LatentField(3, field=partial(duffing, a=0.1), seed=0)
    td = act(env)
    env.state_latent[1] = 1e30
    stepped, td = env.step_and_maybe_reset(td)
    assert stepped["next", "truncated"].squeeze(-1).tolist() == [False, True, False]
    assert td["latent"].isfinite().all() and (td["latent"].abs() <= 1.5).all()
    assert stepped["next", "observation"].isfinite().all()


def test_noise_belongs_to_the_state():
    env = LatentField(3, seed=0)
    td = act(env)
    stepped, following = env.step_and_maybe_reset(td)
    assert torch.equal(stepped["next", "observation"], following["observation"])
    again = env.observe(env._state())
    assert torch.equal(again["observation"], following["observation"])


@pytest.mark.parametrize("field", sorted(FIELDS))
@pytest.mark.parametrize("observation", ["log_linear", "mlp"])
def test_one_env_equals_its_row_of_many(field, observation, device):
    options = {"field": field, "observation": observation, "noise": "none", "process_noise": 0.0, "device": device}
    many, one = LatentField(257, integrator="rk4", **options), LatentField(1, integrator="rk4", **options)
    td = many._reset(None)
    starts, actions = td["latent"].clone(), [(torch.rand(257, 2, device=device) - 0.5) / 5 for _ in range(10)]
    log = []
    for action in actions:
        stepped, td = many.step_and_maybe_reset(td.set("action", action))
        log.append(stepped["next"])
    for row in (0, 100, 256):
        one._reset(None)
        one.state_latent.copy_(starts[row : row + 1])
        for action, step in zip(actions, log, strict=True):
            single = one.step(TensorDict({"action": action[row : row + 1]}, [1], device=device))["next"]
            exact = device.type == "cpu" and observation == "log_linear"
            for key in ("latent", "observation"):
                tolerance = {"rtol": 0.0, "atol": 0.0} if exact and key == "latent" else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(single[key][0], step[key][row], **tolerance)


def test_worlds_do_not_depend_on_the_seed(device):
    one, other = (LatentField(2, field="multi_attractor", seed=seed, device=device) for seed in (0, 1))
    assert torch.equal(one.observation_map.weight, other.observation_map.weight)
    assert torch.equal(one.field.table, other.field.table)
    assert not torch.equal(one.state_latent, other.state_latent)
    third = LatentField(2, field="multi_attractor", world_seed=1, device=device)
    assert not torch.equal(one.observation_map.weight, third.observation_map.weight)


@pytest.mark.parametrize("field", ["limit_cycle", "multi_attractor"])
@pytest.mark.parametrize(("observation", "noise"), [("log_linear", "poisson"), ("linear", "gaussian")])
def test_no_host_wait(field, observation, noise, device):
    env = LatentField(4, field=field, observation=observation, noise=noise, max_episode_steps=2, device=device, seed=0)
    td, mask = act(env), torch.tensor([[True], [False]] * 2, device=device)
    action = td["action"].clone()
    with no_host_sync(device):
        for _ in range(3):
            _, td = env.step_and_maybe_reset(td.set("action", action))
        env._reset(td.set("_reset", mask))
        env._reset(None)


def episodes(step, env, steps=6):
    env.set_seed(0)
    td, log = env._reset(None), []
    actions = (torch.linspace(-0.1, 0.1, steps * env.num_envs * 2).view(steps, -1, 2)).to(env.device)
    for action in actions:
        td, root = step(td.set("action", action))
        log.append(td.clone())
        td = root
    return torch.stack(log)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("field", "observation"), [("snowman", "log_linear"), ("multi_attractor", "mlp")])
def test_traced_whole_equals_eager_and_compiles_once(field, observation):
    options = {"field": field, "observation": observation, "max_episode_steps": 4, "integrator": "rk4"}
    eager, traced = LatentField(3, **options), LatentField(3, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        step = compiled(traced.step_and_maybe_reset, backend="aot_eager")
        ours = episodes(step, traced)
    theirs = episodes(eager.step_and_maybe_reset, eager)
    assert theirs["next", "done"].any() and not theirs["next", "done"].all()
    for key in theirs.keys(True, True):
        assert torch.equal(ours[key], theirs[key]), key


def test_step_agrees_in_all_forms(variant):
    """The true dynamics and the channels; the drawing of noise is compared above."""
    env = LatentField(5, field="snowman", integrator="rk4", substeps=2, noise="none", device=variant.device)
    z, action = torch.randn(5, 2, device=variant.device), torch.randn(5, 2, device=variant.device) / 10

    def step(z, action):
        following = env.predict(z, action)
        return following, env.observation_map(following)

    run = variant(step)
    for _ in range(4):
        result = run(z, action)
    for ours, theirs in zip(result, step(z, action), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("field", ["van_der_pol", "multi_attractor"])
def test_a_captured_step_equals_eager_between_resets(field, fresh_dynamo):
    options = {"field": field, "observation": "linear", "noise": "none", "process_noise": 0.0, "device": "cuda"}
    env, other = LatentField(64, max_episode_steps=7, **options), LatentField(64, **options)
    root = act(env)
    step = capture(lambda td: env.step_and_maybe_reset(td)[0].get("next"), compile=True)
    for _ in range(20):
        other.load_state_dict(env.state_dict())
        expected, ours = other.step(root.clone())["next"], step(root)
        for key in ("latent", "observation", "reward"):
            torch.testing.assert_close(ours[key], expected[key], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_counts_of_a_captured_step():
    env = LatentField(4096, max_episode_steps=50, device="cuda", seed=0)
    root = act(env)
    step = capture(lambda td: env.step_and_maybe_reset(td)[0].get("next"))
    seen = [step(root)["observation"].clone() for _ in range(10)]
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    assert 0.5 < torch.stack(seen).mean().item() < 2.0


def test_in_the_device_collector(device):
    env = LatentField(6, max_episode_steps=7, device=device, seed=0)
    data = DeviceCollector(env, None, frames_per_batch=120, mode="eager").collect()
    assert data.batch_size == (6, 20)
    done = data["next", "done"]
    assert done.sum() == 6 * 2
    same = (data["latent"][:, 1:] == data["next", "latent"][:, :-1]).all(-1)
    assert torch.equal(same, ~done[:, :-1].squeeze(-1))


def test_state_dict_resumes_bitwise(tmp_path):
    env = LatentField(4, max_episode_steps=6, seed=0)
    episodes(env.step_and_maybe_reset, env, 4)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    other = LatentField(4, max_episode_steps=6, seed=9)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    logs = []
    for each in (env, other):
        each.set_seed(2)
        td, log = each._root(each._state()), []
        for _ in range(5):
            td, root = each.step_and_maybe_reset(td.set("action", torch.full((4, 2), 0.05)))
            log.append(td.clone())
            td = root
        logs.append(torch.stack(log))
    for key in logs[0].keys(True, True):
        assert torch.equal(logs[0][key], logs[1][key]), key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": "lorenz"}, r"field: expected one of \['double_limit_cycle', .*received 'lorenz'. Remedy"),
        ({"field": 3}, r"expected a name or a function that maps points \[3, 2\].*received 3"),
        ({"field": lambda z: z[..., 0]}, r"received torch.float32 \[3\]. Remedy: stack both components"),
        ({"observation": "quadratic"}, "observation: expected one of .*received 'quadratic'"),
        ({"noise": "uniform"}, "noise: expected one of .*received 'uniform'"),
        ({"observation": "linear", "noise": "poisson"}, "means may be negative.*Remedy: observation='log_linear'"),
        ({"observation": "identity", "observation_size": 20}, "expected 2 with observation='identity', received 20"),
        ({"observation_size": 0}, "observation_size: expected a positive int, received 0"),
        ({"action_max": 0.0}, "action_max: expected a finite number above 0, received 0"),
        ({"dt": -0.1}, "dt: expected a finite number above 0, received -0.1"),
        ({"process_noise": math.nan}, "process_noise: expected a finite number of at least 0, received nan"),
        ({"integrator": "heun"}, r"integrator: expected one of \['euler', 'rk4'\], received 'heun'"),
        ({"substeps": 0}, "substeps >= 1"),
        ({"rate": 0.0}, "rate: expected a positive number"),
        ({"goal": (1.0, 2.0, 3.0)}, "goal: expected a point of two finite numbers"),
        ({"max_episode_steps": 0}, "max_episode_steps >= 1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        LatentField(2, **options)


def test_bad_options_and_actions():
    with pytest.raises(TypeError, match=r"LatentField expected options of .*received \['obs_dim'\]"):
        LatentField(2, obs_dim=20)
    with pytest.raises(TypeError, match=r"expected dtype torch.float32 or torch.float64, received torch.float16"):
        LatentField(2, dtype=torch.float16)
    env = LatentField(2)
    with pytest.raises(ValueError, match=r"expected action \(2, 2\) of floats, received \(2, 1\)"):
        env._step(TensorDict({"action": torch.zeros(2, 1)}, [2]))


def test_a_point_that_leaves_the_extent_ends_its_episode():
    env = LatentField(
        3, field=torch.zeros_like, process_noise=0.0, action_max=10.0, extent=2.0, initial_range=1.5, seed=0
    )
    td = env.reset()
    td["action"] = torch.tensor([[10.0, 0.0], [0.0, -10.0], [0.0, 0.0]])
    out = env.step(td)
    for _ in range(4):
        before, expected = out["next", "terminated"].squeeze(-1), out["next", "latent"].abs().amax(-1) > 2.0
        assert torch.equal(before, expected)
        root = env.maybe_reset(out["next"].exclude("reward"))
        root["action"] = td["action"]
        out = env.step(root)
    assert not LatentField(3, action_max=10.0).extent
    with pytest.raises(ValueError, match="extent: expected a finite number above"):
        LatentField(1, extent=1.0)
