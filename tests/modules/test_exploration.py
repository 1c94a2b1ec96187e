"""EpsilonGreedy: schedule, frequencies, masks, one-hot, exploration type, state."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded, Categorical, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules import EpsilonGreedy
from torchrl_perf.runtime import no_host_sync


class Fixed(nn.Module):
    """Values that do not depend on the observation."""

    def __init__(self, values, device="cpu"):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, device=device))

    def forward(self, x):
        return self.values.expand(*x.shape[:-1], -1)


def make(values=(0.0, 3.0, 1.0), device="cpu", one_hot=False, **options):
    spec = (OneHot if one_hot else Categorical)(len(values), device=device)
    return EpsilonGreedy(Fixed(values, device), spec=spec, **options)


def rows(count, device="cpu", **entries):
    return TensorDict({"observation": torch.zeros(count, 2, device=device), **entries}, [count], device=device)


def act(policy, td, kind=ExplorationType.RANDOM):
    with set_exploration_type(kind):
        return policy(td.copy())["action"]


class TestSchedule:
    def test_falls_from_one_to_a_tenth_in_ten_frames(self, device):
        policy = make(device=device, eps_end=0.1, decay_frames=10)
        assert float(policy.epsilon) == 1.0
        policy.step(7)
        assert float(policy.epsilon) == pytest.approx(0.37)
        policy.step(93)
        assert float(policy.epsilon) == pytest.approx(0.1)

    def test_many_frames_cost_what_one_costs(self):
        policy, other = make(decay_frames=1_000_000), make(decay_frames=1_000_000)
        with torch.profiler.profile() as one:
            policy.step(1)
        with torch.profiler.profile() as many:
            other.step(131_072)
        assert len(many.events()) == len(one.events())
        assert float(other.epsilon) == pytest.approx(1 - 0.95 * 0.131072)

    def test_steps_add_up(self):
        policy, other = make(decay_frames=100), make(decay_frames=100)
        for _ in range(30):
            policy.step(2)
        other.step(torch.tensor(60))
        assert torch.equal(policy.epsilon, other.epsilon)

    def test_state_holds_the_schedule(self):
        policy = make(decay_frames=100)
        policy.step(40)
        other = make(decay_frames=10, eps_start=0.5, eps_end=0.0)
        other.load_state_dict(policy.state_dict())
        for each in (policy, other):
            each.step(10)
        assert torch.equal(policy.epsilon, other.epsilon)


class TestActions:
    def test_a_share_epsilon_is_random(self, device):
        policy = make(device=device, eps_start=0.6)
        counts = act(policy, rows(60_000, device)).bincount(minlength=3) / 60_000
        torch.testing.assert_close(counts, torch.tensor([0.2, 0.6, 0.2], device=device), atol=0.01, rtol=0)

    @pytest.mark.parametrize("kind", [ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN])
    def test_greedy_where_nothing_is_to_be_explored(self, kind):
        assert (act(make(eps_start=1.0), rows(50), kind) == 1).all()

    def test_greedy_at_epsilon_zero(self):
        assert (act(make(eps_start=0.0), rows(1000)) == 1).all()

    def test_masked_actions_are_never_taken(self):
        mask = torch.tensor([True, False, True]).expand(6000, 3)
        policy = make(eps_start=0.5, mask_key="action_mask")
        counts = act(policy, rows(6000, action_mask=mask)).bincount(minlength=3) / 6000
        torch.testing.assert_close(counts, torch.tensor([0.25, 0.0, 0.75]), atol=0.03, rtol=0)
        assert (act(policy, rows(10, action_mask=mask[:10]), ExplorationType.MODE) == 2).all()

    def test_one_hot(self):
        action = act(make(one_hot=True, eps_start=0.3), rows(100))
        assert action.shape == (100, 3)
        assert action.dtype == OneHot(3).dtype
        assert (action.sum(-1) == 1).all()
        assert OneHot(3).expand(100, 3).is_in(action)

    @pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
    def test_any_batch_shape(self, shape):
        td = TensorDict({"observation": torch.zeros(*shape, 2)}, shape)
        assert act(make(eps_start=0.5), td).shape == shape

    def test_a_changed_epsilon_and_fresh_noise_in_each_call(self, variant):
        policy = make(device=variant.device, eps_start=1.0)
        td = rows(256, variant.device)

        def step(td):
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                return policy(td.copy())["action"]

        run = variant(step)
        first, second, third = (run(td).clone() for _ in range(3))
        assert (first != second).any()
        assert (second != third).any()
        policy.epsilon.fill_(0.0)
        assert (run(td) == 1).all()

    def test_no_host_wait(self, device):
        policy = make(device=device, eps_start=0.5)
        with no_host_sync(device):
            act(policy, rows(8, device))
            policy.step(8)


@pytest.mark.parametrize("name", ["eps_start", "eps_end"])
def test_epsilon_is_a_probability(name):
    with pytest.raises(ValueError, match=rf"{name}: expected a probability in \[0, 1\], received 1.5"):
        make(**{name: 1.5})


def test_continuous_actions_are_refused():
    with pytest.raises(ValueError, match=r"expected Categorical .* received Bounded\w+. Remedy: an algorithm"):
        EpsilonGreedy(Fixed((0.0,)), spec=Bounded(-1, 1, (1,)))


@pytest.mark.parametrize("name", ["eps_init", "eps_end"])
def test_both_ends_of_the_range_are_probabilities(name):
    with pytest.raises(ValueError, match=r"expected a probability in \[0, 1\], received -0.1"):
        make(**{name: -0.1})
    for value in (0.0, 1.0):
        assert make(**{name: value})
