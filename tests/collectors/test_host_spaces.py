"""Gymnasium spaces as leaves and specs, with values written out by hand."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from host_oracle import vector
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, Unbounded

from torchrl_perf.collectors import host_specs
from torchrl_perf.collectors.host_groups import autoreset_mode
from torchrl_perf.collectors.host_spaces import action_leaf, observation_leaves

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("space", "dtype", "kind"),
    [
        (spaces.Box(0, 255, (2, 3), np.uint8), torch.uint8, Bounded),
        (spaces.Box(-np.inf, np.inf, (4,), np.float64), torch.float32, Unbounded),
        (spaces.Box(-1, 1, (4,), np.float16), torch.float16, Bounded),
        (spaces.Box(0, 9, (2,), np.uint16), torch.int32, Bounded),
        (spaces.Box(0, 9, (2,), np.uint32), torch.int64, Bounded),
        (spaces.Discrete(3, start=-1), torch.int64, Categorical),
        (spaces.MultiDiscrete([2, 3]), torch.int64, MultiCategorical),
        (spaces.MultiBinary(4), torch.int8, Binary),
    ],
    ids=str,
)
def test_leaf_and_spec_of_a_space(space, dtype, kind):
    (leaf,) = observation_leaves(space)
    assert (leaf.key, leaf.dtype) == ("observation", dtype)
    spec = leaf.spec(5, CPU)
    assert isinstance(spec, kind)
    assert (spec.shape, spec.dtype) == ((5, *leaf.shape), dtype)
    values = np.stack([leaf.read(space.sample()) for _ in range(5)])
    assert spec.is_in(torch.as_tensor(values.astype(np.float64)).to(dtype))


def test_keys_of_nested_spaces():
    inner = spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2,))])})
    keys = [leaf.key for leaf in observation_leaves(spaces.Dict({"x": inner, "y": spaces.Discrete(2)}))]
    assert sorted(keys, key=str) == sorted([("x", "a", "0"), ("x", "a", "1"), ("x", "b"), "y"], key=str)
    keys = [leaf.key for leaf in observation_leaves(spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]))]
    assert keys == [("observation", "0"), ("observation", "1")]


def test_start_is_taken_off():
    (leaf,) = observation_leaves(spaces.Discrete(3, start=-1))
    assert leaf.read(np.array([-1, 0, 1])).tolist() == [0, 1, 2]
    (leaf,) = observation_leaves(spaces.MultiDiscrete([3, 4], start=[1, -1]))
    assert leaf.read(np.array([[1, -1], [3, 2]])).tolist() == [[0, 0], [2, 3]]


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Box(0, 1, (2,), np.uint64)]
)
def test_spaces_without_a_tensor_are_refused(space):
    with pytest.raises(ValueError, match=r"'a': expected"):
        observation_leaves(spaces.Dict({"a": space}))


@pytest.mark.parametrize("key", ["reward", "next", "done", "action", "collector"])
def test_keys_of_the_batch_are_refused(key):
    with pytest.raises(ValueError, match=f"received '{key}'. Remedy: rename"):
        observation_leaves(spaces.Dict({key: spaces.Discrete(2)}))


def test_composed_actions_are_refused():
    with pytest.raises(ValueError, match="Remedy: flatten"):
        action_leaf(spaces.Tuple([spaces.Discrete(2)]))


def test_default_dtype_is_torchs():
    torch.set_default_dtype(torch.float64)
    try:
        (leaf,) = observation_leaves(spaces.Box(-1, 1, (2,), np.float64))
    finally:
        torch.set_default_dtype(torch.float32)
    assert leaf.dtype == torch.float64


def test_specs_of_groups():
    specs = host_specs([vector("maze", 2, "SameStep"), vector("maze", 3, "NextStep")])
    assert specs.batch_size == (5,)
    assert specs.action_spec.space.n == 5
    assert specs.action_spec_unbatched.shape == ()
    assert specs.observation_spec_unbatched["state", "pos"].shape == (2,)
    assert specs.fake_tensordict()["next", "reward"].shape == (5, 1)


@pytest.mark.parametrize(
    ("received", "mode"),
    [
        (gym.vector.AutoresetMode.NEXT_STEP, "next_step"),
        ("SameStep", "same_step"),
        ("same_step", "same_step"),
        ("DISABLED", "disabled"),
    ],
)
def test_autoreset_mode(received, mode):
    envs = gym.make_vec("CartPole-v1", 1, vectorization_mode="vector_entry_point")
    envs.metadata = {"autoreset_mode": received}
    assert autoreset_mode(envs) == mode
