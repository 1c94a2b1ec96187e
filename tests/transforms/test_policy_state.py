"""PolicyState: initial values at resets, entries that a policy wrote, masks, specs, and bad input."""

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs import Compose, TransformedEnv, check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.modules import ICEMPlanner, ICEMSettings
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import OptionState, PolicyState

N = 3


def make_state():
    specs = {
        "hidden": Unbounded(shape=(2, 3)),
        "count": Unbounded(shape=(), dtype=torch.int64),
        "flag": Categorical(2, shape=(1,), dtype=torch.bool),
        "scale": Bounded(0.5, 2.0, shape=(4,), dtype=torch.float64),
    }
    return PolicyState(specs, {"hidden": -0.5, "flag": True, "scale": 1.0})


def make_env(device="cpu", **options):
    return TransformedEnv(CartPole(N, device=device, seed=0, **options), make_state())


def is_initial(td, rows=slice(None)):
    numbers = {"hidden": -0.5, "count": 0, "flag": True, "scale": 1.0}
    return all(bool((td[key][rows] == number).all()) for key, number in numbers.items())


def policy():
    """Counts and adds; leaves the flag and the scale to the env."""

    def act(hidden, count):
        return torch.zeros_like(count), hidden + 1.0, count + 1

    return TensorDictModule(act, ["hidden", "count"], ["action", ("next", "hidden"), ("next", "count")])


def test_specs(device):
    env = make_env(device)
    check_env_specs(env)
    specs = {key: env.observation_spec[key] for key in env.transform.specs}
    assert {key: (tuple(spec.shape), spec.dtype) for key, spec in specs.items()} == {
        "hidden": ((N, 2, 3), torch.float32),
        "count": ((N,), torch.int64),
        "flag": ((N, 1), torch.bool),
        "scale": ((N, 4), torch.float64),
    }
    assert env.transform.shapes == {"hidden": (2, 3), "count": (), "flag": (1,), "scale": (4,)}
    assert {spec.device.type for spec in specs.values()} == {device.type}
    assert isinstance(specs["flag"], Categorical)
    assert isinstance(env.observation_spec["flag"], Categorical)
    assert is_initial(env.reset())


def test_kept_from_step_to_step_and_initial_after_an_end(device):
    env = make_env(device, max_episode_steps=4)
    data = DeviceCollector(env, policy(), frames_per_batch=N * 10, mode="eager").collect()
    assert data["count"].tolist() == [[t % 4 for t in range(10)]] * N
    assert torch.equal(data["hidden"], (data["count"] - 0.5).view(N, 10, 1, 1).expand(N, 10, 2, 3))
    assert torch.equal(data["next", "count"], data["count"] + 1)
    # of what the policy did not write
    assert data["flag"].all() and (data["scale"] == 1.0).all() and (data["next", "scale"] == 1.0).all()


def test_a_step_without_the_policy_is_initial():
    env = make_env()
    td = env.reset()
    td["hidden"] += 7.0
    stepped, root = env.step_and_maybe_reset(env.rand_action(td))
    assert is_initial(stepped["next"]) and is_initial(root)
    assert (stepped["hidden"] == 6.5).all()


def test_a_masked_reset_sets_its_rows_alone():
    env = make_env()
    td = env.reset()
    td["hidden"] += 7.0
    td["count"] += 2
    out = env.reset(td.set("_reset", torch.tensor([[True], [False], [True]])))
    assert is_initial(out, [0, 2])
    assert (out["hidden"][1] == 6.5).all() and out["count"].tolist() == [0, 2, 0]
    # without entries there is nothing to keep
    assert is_initial(env._reset(TensorDict({"_reset": torch.tensor([[True], [False], [False]])}, [N])))


def test_no_host_wait(device):
    env = make_env(device, max_episode_steps=2)
    collector = DeviceCollector(env, policy(), frames_per_batch=N * 5, mode="eager")
    collector.collect()
    with no_host_sync(device):
        collector.collect()


@pytest.mark.gpu
def test_in_a_captured_collector(fresh_dynamo):
    collector = DeviceCollector(make_env("cuda", max_episode_steps=3), policy(), frames_per_batch=N * 6, mode="graph")
    for _ in range(4):
        batch = collector.collect()
        assert batch["count"].tolist() == [[0, 1, 2, 0, 1, 2]] * N
        assert torch.equal(batch["hidden"][..., 0, 0], batch["count"] - 0.5)


def test_two_of_them_and_none():
    env = TransformedEnv(CartPole(N), Compose(PolicyState({"hidden": Unbounded(shape=(2,))}), OptionState(3)))
    check_env_specs(env)
    assert {"hidden", "option", "option_age"} <= env.reset().keys()
    assert PolicyState({}).shapes == {}


def test_a_planners_state_has_the_planners_dtype():
    spec = Bounded(-1.0, 1.0, (N, 2), dtype=torch.float64)
    settings = ICEMSettings(horizon=4, candidates=6, iterations=1, elites=4, kept_share=0.5)
    planner = ICEMPlanner(
        lambda state, action: state, lambda states, actions: actions.sum(-1), spec=spec, settings=settings
    )
    state = planner.make_state()
    assert state.shapes == {"plan": (4, 2), "plan_elites": (2, 4, 2)}
    assert {spec.dtype for spec in state.specs.values()} == {torch.float64}


@pytest.mark.parametrize("first", ["modules", "transforms"])
def test_either_folder_is_imported_first(first):
    code = f"import torchrl_perf.{first}; from torchrl_perf.modules import ICEMPlanner"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


class TestBadInput:
    def test_a_value_of_no_entry(self):
        with pytest.raises(
            ValueError, match=r"initial: expected names among \['hidden'\], received \['hiden'\].*Remedy"
        ):
            PolicyState({"hidden": Unbounded(shape=(2,))}, {"hiden": 1.0})

    @pytest.mark.parametrize(
        ("spec", "number"),
        [
            (Categorical(3, shape=(), dtype=torch.int64), 3),
            (Bounded(0.5, 2.0, shape=(4,)), 0.0),
            (Unbounded(shape=(2,), dtype=torch.int64), 0.5),
            (Unbounded(shape=(2,), dtype=torch.int64), float("nan")),
        ],
    )
    def test_a_value_that_the_spec_refuses(self, spec, number):
        with pytest.raises(ValueError, match=r"initial: expected for 'x' a number .* received .*Remedy"):
            PolicyState({"x": spec}, {"x": number})

    def test_zero_must_be_allowed_where_nothing_else_is_said(self):
        with pytest.raises(ValueError, match=r"received 0\."):
            PolicyState({"x": Bounded(0.5, 2.0, shape=(4,))})

    def test_a_spec_that_is_no_composite(self):
        with pytest.raises(ValueError, match="expected a Composite observation spec, received Unbounded"):
            make_state().transform_observation_spec(Unbounded(shape=(N, 2)))
