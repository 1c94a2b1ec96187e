"""GaussianNoise and OUNoise: schedules, moments, bounds, state, agents that do not exist, resets, variants."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import Pendulum
from torchrl_perf.modules import DeterministicActor, GaussianNoise, OUNoise
from torchrl_perf.runtime import no_host_sync


class Zero(nn.Module):
    """The middle of the bounds, whatever is observed."""

    def __init__(self, size=1, device="cpu"):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x):
        return self.bias.expand(*x.shape[:-1], -1)


def make(kind, n=4, d=1, bound=2.0, device="cpu", valid_key=None, **options):
    spec = Bounded(-bound, bound, (n, d), device=device)
    return kind(DeterministicActor(Zero(d, device), spec=spec, valid_key=valid_key), **options)


def rows(n=4, device="cpu", init=False, **entries):
    td = {"observation": torch.zeros(n, 2), "is_init": torch.full((n, 1), init), **entries}
    return TensorDict(td, [n]).to(device)


def act(policy, td, kind=ExplorationType.RANDOM):
    with torch.no_grad(), set_exploration_type(kind):
        return policy(td.copy())["action"]


@pytest.mark.parametrize("kind", [GaussianNoise, OUNoise])
class TestBoth:
    def test_schedule_in_closed_form(self, kind, device):
        policy = make(kind, device=device, sigma_start=1.0, sigma_end=0.1, decay_frames=10)
        policy.step(7)
        assert float(policy.sigma) == pytest.approx(0.37)
        policy.step(torch.tensor(93, device=device))
        assert float(policy.sigma) == pytest.approx(0.1)

    def test_many_frames_cost_what_one_costs(self, kind):
        counts = []
        for frames in (1, 131_072):
            policy = make(kind, sigma_start=1.0, sigma_end=0.0, decay_frames=1_000_000)
            with torch.profiler.profile() as profile:
                policy.step(frames)
            counts.append(len(profile.events()))
        assert counts[0] == counts[1]
        assert float(policy.sigma) == pytest.approx(1 - 0.131072)

    def test_constant_by_default(self, kind):
        policy = make(kind, sigma_start=0.3)
        policy.step(100_000)
        assert float(policy.sigma) == pytest.approx(0.3)

    @pytest.mark.parametrize("type_", [ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN])
    def test_no_noise_where_nothing_is_to_be_explored(self, kind, type_):
        policy = make(kind)
        before = {name: value.clone() for name, value in policy.state_dict().items()}
        assert (act(policy, rows(), type_) == 0).all()
        assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())

    def test_stays_within_the_bounds(self, kind):
        policy = make(kind, n=500, sigma_start=10.0, bound=0.3)
        action = act(policy, rows(500))
        assert policy.spec["action"].is_in(action)
        assert action.abs().max() == pytest.approx(0.3)

    def test_agents_that_do_not_exist_keep_the_neutral_action(self, kind):
        policy = make(kind, valid_key="valid")
        assert "valid" in policy.in_keys
        action = act(policy, rows(valid=torch.tensor([True, False, True, False])))
        assert (action.flatten() != 0).tolist() == [True, False, True, False]

    def test_agents_and_a_flag_of_their_env(self, kind):
        actor = DeterministicActor(Zero(2), spec=Bounded(-1, 1, (3, 5, 2)))
        td = TensorDict({"observation": torch.zeros(3, 5, 4), "is_init": torch.ones(3, 1, dtype=torch.bool)}, [3])
        assert act(kind(actor), td).shape == (3, 5, 2)

    def test_state_dict_goes_on_bit_for_bit(self, kind):
        policy, other = (make(kind, sigma_start=1.0, sigma_end=0.0, decay_frames=10) for _ in range(2))
        act(policy, rows())
        policy.step(3)
        other.load_state_dict(policy.state_dict())
        actions = []
        for each in (policy, other):
            torch.manual_seed(5)
            each.step(1)
            actions.append(act(each, rows()))
        assert torch.equal(*actions)

    def test_a_changed_sigma_and_fresh_noise_in_each_call(self, kind, variant):
        policy = make(kind, n=64, device=variant.device)
        td = rows(64, variant.device)
        run = variant(lambda td: act(policy, td))
        first, second, third = (run(td).clone() for _ in range(3))
        assert (first != second).any()
        assert (second != third).any()
        policy.sigma.fill_(0.0)
        assert (run(td) == 0).all()

    def test_no_host_wait(self, kind, device):
        policy, td = make(kind, device=device), rows(device=device)
        with no_host_sync(device):
            act(policy, td)
            policy.step(4)

    def test_is_collected(self, kind):
        env = Pendulum(3)
        policy = kind(DeterministicActor(nn.Linear(3, 1), spec=env.action_spec))
        batch = DeviceCollector(env, policy, frames_per_batch=12, mode="eager").collect()
        assert env.action_spec.expand(4, 3, 1).is_in(batch["action"].transpose(0, 1))

    def test_bad_arguments(self, kind):
        actor = DeterministicActor(Zero(), spec=Bounded(-1, 1, (1,)))
        with pytest.raises(ValueError, match="spec: expected that of continuous actions, received Categorical"):
            kind(actor, spec=Categorical(3))
        with pytest.raises(ValueError, match="expected that of continuous actions, received none"):
            kind(TensorDictModule(Zero(), ["observation"], ["action"]))
        with pytest.raises(ValueError, match=r"sigma_start: expected a finite number of at least 0, received -0.1"):
            kind(actor, sigma_start=-0.1)
        with pytest.raises(ValueError, match="action_key: expected a key that the policy writes"):
            kind(actor, **({"action_key": "a"} if kind is GaussianNoise else {"keys": {"action": "a"}}))


class TestGaussian:
    def test_moments_in_units_of_the_bounds(self):
        policy = make(GaussianNoise, n=40_000, bound=50.0, sigma_start=0.02)
        action = act(policy, rows(40_000))
        assert float(action.mean()) == pytest.approx(0.0, abs=0.02)
        assert float(action.std()) == pytest.approx(1.0, rel=0.02)

    def test_unbounded_actions(self):
        policy = TensorDictModule(Zero(2), ["observation"], ["action"])
        policy = GaussianNoise(policy, spec=Unbounded((2,)), sigma_start=3.0)
        action = act(policy, rows(20_000))
        assert float(action.std()) == pytest.approx(3.0, rel=0.02)


class TestOU:
    def test_stationary_variance_and_correlation(self):
        theta, sigma = 0.4, 0.5
        policy = make(OUNoise, n=2000, bound=100.0, sigma_start=sigma / 100, theta=theta)
        td = rows(2000)
        for _ in range(30):
            before = act(policy, td)
        after = act(policy, td)
        variance = sigma**2 / (2 * theta)
        assert float(after.var()) == pytest.approx(variance, rel=0.1)
        covariance = float((before * after).mean())
        assert covariance / variance == pytest.approx(math.exp(-theta), abs=0.07)

    def test_rows_that_begin_an_episode_begin_at_zero(self):
        policy = make(OUNoise, theta=0.0, dt=1e-6)
        policy.state.fill_(3.0)
        td = rows().set("is_init", torch.tensor([[True], [False], [False], [True]]))
        act(policy, td)
        torch.testing.assert_close(policy.state.flatten(), torch.tensor([0.0, 3.0, 3.0, 0.0]), atol=0.01, rtol=0)

    def test_a_bad_number_ends_with_its_episode(self):
        policy = make(OUNoise)
        policy.state.fill_(torch.nan)
        assert act(policy, rows(init=True)).isfinite().all()

    def test_without_a_reset_key(self):
        policy = make(OUNoise, theta=0.0, dt=1e-6, keys={"is_init": None})
        assert policy.in_keys == ["observation"]
        policy.state.fill_(3.0)
        act(policy, rows(init=True))
        torch.testing.assert_close(policy.state, torch.full((4, 1), 3.0), atol=0.01, rtol=0)

    def test_another_batch_is_refused(self):
        with pytest.raises(ValueError, match=r"action: expected \[4, 1\], the shape of the spec.*received \[5, 1\]"):
            act(make(OUNoise), rows(5))

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match=r"expected theta of at least 0 and a positive dt, received -1 and 1.0"):
            make(OUNoise, theta=-1)
        with pytest.raises(ValueError, match="keys: expected names among"):
            make(OUNoise, keys={"reset": "is_init"})
