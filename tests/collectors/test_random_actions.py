"""Random actions: TorchRL's own numbers, inside the bounds and masks, evenly, without a host read."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from torchrl.envs import StepCounter, TransformedEnv

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.random_actions import RandomActions, draw
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.runtime import host_syncs, no_host_sync

N = 6
LOW, HIGH = torch.tensor([-1.0, 0.0]).expand(N, 2), torch.tensor([1.0, 5.0]).expand(N, 2)
MASK = torch.eye(4, dtype=torch.bool)[torch.arange(N) % 4] | torch.tensor([True, False, False, True])
PARTS = torch.tensor([True, False, False, True, True]).expand(N, 5)

SPECS = {
    "bounded": Bounded(-2.0, 3.0, (N, 2)),
    "bounds_of_each": Bounded(LOW, HIGH, (N, 2)),
    "float64": Bounded(LOW.double(), HIGH.double(), (N, 2), dtype=torch.float64),
    "float16": Bounded(-1.0, 1.0, (N, 1), dtype=torch.float16),
    "bfloat16": Bounded(-1.0, 1.0, (N, 1), dtype=torch.bfloat16),
    "no_width": Bounded(0.5, 0.5, (N, 1)),
    "int64": Bounded(-3, 5, (N, 1), dtype=torch.int64),
    "int32": Bounded(0, 5, (N,), dtype=torch.int32),
    "categorical": Categorical(4, (N,)),
    "categorical_int32": Categorical(4, (N, 1), dtype=torch.int32),
    "categorical_masked": Categorical(4, (N,), mask=MASK),
    "binary": Binary(3, (N, 3)),
    "multi_categorical_masked": MultiCategorical([2, 3], (N, 2), mask=PARTS),
    "multi_categorical_flat": MultiCategorical([2, 3]),
    "one_hot": OneHot(4, (N, 4)),
    "one_hot_masked": OneHot(4, (N, 4), mask=MASK),
    "one_hot_int32": OneHot(4, (N, 2, 4), dtype=torch.int32),
    "multi_one_hot": MultiOneHot([2, 3], (N, 5)),
    "multi_one_hot_masked": MultiOneHot([2, 3], (N, 5), mask=PARTS),
    "unbounded": Unbounded((N, 2)),
    "one": OneHot(1, (1, 1)),
}
NESTED = {
    "composite": Composite(a=SPECS["bounded"], b=Composite(c=SPECS["one_hot"], shape=(N,)), shape=(N,)),
    "agents": Composite(agents=Composite(action=OneHot(3, (N, 2, 3)), shape=(N, 2)), shape=(N,)),
    "unlike_agents": torch.stack([Composite(a=Bounded(-1.0, 1.0, (N, k)), shape=(N,)) for k in (2, 3)], 1),
}


def seeded(fn):
    torch.manual_seed(3)
    return fn()


@pytest.mark.parametrize("name", SPECS)
def test_the_numbers_of_torchrl_without_a_read(name, device):
    spec = SPECS[name].to(device)
    with host_syncs(device) as report:
        ours = seeded(lambda: draw(spec))
    theirs = seeded(spec.rand)
    assert report.total == 0, report.rows
    assert ours.shape == theirs.shape
    assert spec.is_in(ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", NESTED)
def test_nested_actions(name, device):
    spec = NESTED[name].to(device)
    with host_syncs(device) as report:
        ours = seeded(lambda: draw(spec))
    theirs = seeded(spec.rand)
    assert report.total == 0
    assert isinstance(ours, TensorDictBase)
    assert (ours.batch_size, ours.device) == (theirs.batch_size, theirs.device)
    assert (ours == theirs).all()


def test_multi_categorical_is_even_and_of_its_shape(device):
    spec = MultiCategorical([2, 3], (600, 2)).to(device)
    with no_host_sync(device):
        action = draw(spec)
    assert (action.shape, action.dtype, action.device.type) == ((600, 2), spec.dtype, device.type)
    for column, n in enumerate((2, 3)):
        share = torch.bincount(action[:, column].cpu(), minlength=n) / 600
        torch.testing.assert_close(share, torch.full((n,), 1 / n), rtol=0, atol=0.1)


def test_rows_with_other_numbers_of_choices_are_torchrls():
    spec = MultiCategorical(torch.tensor([[2, 3], [4, 5]]))
    torch.testing.assert_close(seeded(lambda: draw(spec)), seeded(spec.rand))


def test_specs_that_are_not_known_draw_by_themselves():
    class Twos(Bounded):
        def rand(self, shape=None):
            return torch.full(self.shape, 2.0)

    spec = Composite(a=NonTensor((N,), example_data="x"), shape=(N,))
    assert (draw(spec) == spec.rand()).all()
    own = Bounded(0.0, 9.0, (N,))
    own.__class__ = Twos
    assert (draw(own) == 2).all()


@settings(max_examples=15, deadline=None)
@given(
    low=st.floats(-1e3, 1e3, width=32),
    width=st.floats(0, 1e3, width=32),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_bounds_hold(low, width, shape):
    spec = Bounded(low, low + width, shape)
    action = draw(spec)
    assert action.shape == torch.Size(shape)
    assert spec.is_in(action)


@settings(max_examples=15, deadline=None)
@given(mask=st.lists(st.lists(st.booleans(), min_size=3, max_size=3).filter(any), min_size=1, max_size=5))
def test_masks_hold(mask):
    mask = torch.tensor(mask)
    for spec in (Categorical(3, mask.shape[:1], mask=mask), OneHot(3, mask.shape, mask=mask)):
        action = draw(spec)
        index = action if isinstance(spec, Categorical) else action.int().argmax(-1)
        assert mask.gather(-1, index.long()[:, None]).all()


@pytest.mark.parametrize("spec", [Bounded(-1.0, 3.0, (4000,)), Bounded(-1.0, 3.0, (4000,), dtype=torch.float64)])
def test_uniform_between_the_bounds(spec):
    action = draw(spec).double()
    edges = torch.linspace(-1, 3, 9, dtype=torch.float64)
    share = torch.histogram(action, edges).hist / 4000
    torch.testing.assert_close(share, torch.full_like(share, 1 / 8), rtol=0, atol=0.03)


def test_masked_choices_are_even():
    mask = torch.tensor([True, False, True, True]).expand(3000, 4)
    share = torch.bincount(draw(Categorical(4, (3000,), mask=mask)), minlength=4) / 3000
    torch.testing.assert_close(share, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]), rtol=0, atol=0.04)


@pytest.mark.parametrize("make", [CartPole, Pendulum])
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_collected_as_a_policy(make, mode, device, request):
    request.getfixturevalue("traced" if device.type == "cpu" else "fresh_dynamo")
    collector = DeviceCollector(make(N, device=device), None, frames_per_batch=3 * N, mode=mode)
    collector.collect()
    with no_host_sync(device):
        batch = collector.collect().clone()
    spec = collector.env.action_spec_unbatched
    assert all(spec.is_in(action) for action in batch["action"].flatten(0, 1)[:8])
    assert not torch.equal(batch["action"][:, 0], batch["action"][:, 1])


@pytest.mark.gpu
def test_recorded_draws_are_new_at_each_replay():
    collector = DeviceCollector(Pendulum(N, device="cuda"), None, frames_per_batch=3 * N, mode="graph")
    batches = [collector.collect()["action"].clone() for _ in range(6)]
    assert all(not torch.equal(a, b) for a, b in pairwise(batches))


def test_random_frames_do_not_wait(device):
    env = Pendulum(N, device=device)
    collector = DeviceCollector(env, None, frames_per_batch=3 * N, init_random_frames=6 * N, mode="eager")
    with host_syncs(device) as report:
        collector.collect()
    assert report.total == 0


class TestAnEnvThatDrawsItself:
    class Own(Pendulum):
        """Pendulum that overrides ``rand_action``."""

        def rand_action(self, tensordict=None):
            """Always one."""
            return tensordict.set("action", torch.ones(N, 1))

    @pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TransformedEnv(env, StepCounter())])
    def test_it_is_asked(self, wrap):
        env = wrap(self.Own(N))
        assert (RandomActions(env)(env.reset())["action"] == 1).all()

    def test_others_are_not(self):
        inner = TransformedEnv(Pendulum(N), StepCounter())
        env = TransformedEnv(inner, StepCounter(step_count_key="other"), auto_unwrap=False)
        td = env.fake_tensordict()
        with no_host_sync(env.device):
            action = RandomActions(env)(td)["action"]
        assert env.action_spec.is_in(action)


class Cautious(TransformedEnv):
    """Transforms whose random actions are their own."""

    def rand_action(self, tensordict=None):
        return tensordict.set("action", torch.zeros(self.full_action_spec["action"].shape))


def test_a_rand_action_of_the_transforms_acts():
    for env in (Cautious(Pendulum(3)), TransformedEnv(Cautious(Pendulum(3)), StepCounter())):
        assert (RandomActions(env)(env.reset())["action"] == 0).all()
