"""SquashedNormal: closed forms in float64, torch's and TorchRL's distributions, saturation, host waits, compilation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution
from torchrl.data import Bounded
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_perf.modules import DeviceActor, SquashedNormal, SquashedNormalHead
from torchrl_perf.modules import squashed_normal as module
from torchrl_perf.runtime import no_host_sync

LOW, HIGH = torch.tensor([-2.0, -1.0, 0.5]).double(), torch.tensor([2.0, 3.0, 0.75]).double()


def make(rows=5, dtype=torch.float64):
    loc = torch.randn(rows, 3, dtype=dtype)
    scale = torch.rand(rows, 3, dtype=dtype) + 0.2
    return SquashedNormal(loc, scale, LOW.to(dtype), HIGH.to(dtype))


def torchs(dist):
    """The same distribution by torch's transforms."""
    transforms = [TanhTransform(), AffineTransform((HIGH + LOW) / 2, (HIGH - LOW) / 2)]
    base = TransformedDistribution(Normal(dist.loc, dist.scale), transforms)
    return Independent(base, 1)


def use_noise(monkeypatch, noise):
    monkeypatch.setattr(module, "_noise", lambda shape, like: noise.expand(shape).to(like))


class TestClosedForms:
    def test_by_hand(self, monkeypatch):
        """x = 0.5: a = 1 + 2 tanh 0.5; density of x over da/dx = 2 (1 - tanh^2 0.5)."""
        use_noise(monkeypatch, torch.tensor(0.25))
        dist = SquashedNormal(torch.tensor([[0.25]]), torch.tensor([[1.0]]), -1.0, 3.0)
        action, log_prob = dist.rsample_and_log_prob()
        y = math.tanh(0.5)
        assert action.item() == pytest.approx(1 + 2 * y)
        expected = -0.5 * 0.25**2 - 0.5 * math.log(2 * math.pi) - math.log(2 * (1 - y * y))
        assert log_prob.item() == pytest.approx(expected, rel=1e-6)
        assert dist.log_prob(action).item() == pytest.approx(expected, rel=1e-5)

    def test_values_and_gradients_are_torchs(self):
        dist = make()
        for parameter in (dist.loc, dist.scale):
            parameter.requires_grad_(True)
        action = torchs(dist).sample()
        log_probs = (dist.log_prob(action), torchs(dist).log_prob(action))
        results = [(value, *torch.autograd.grad(value.sum(), [dist.loc, dist.scale])) for value in log_probs]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    def test_values_and_gradients_are_torchrls(self, monkeypatch):
        noise = torch.randn(5, 3, dtype=torch.float64)
        use_noise(monkeypatch, noise)
        monkeypatch.setattr(torch.distributions.normal, "_standard_normal", lambda *args, **kwargs: noise)
        results = []
        for cls in (SquashedNormal, TanhNormal):
            torch.manual_seed(1)
            loc = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
            scale = (torch.rand(5, 3, dtype=torch.float64) + 0.2).requires_grad_()
            dist = cls(loc, scale, low=LOW, high=HIGH)
            action, log_prob = dist.rsample_and_log_prob()
            total = log_prob.sum() + (action * torch.arange(3)).sum()
            results.append((action.detach(), log_prob.detach(), *torch.autograd.grad(total, [loc, scale])))
            torch.testing.assert_close(dist.log_prob(action), log_prob, rtol=1e-6, atol=1e-6)
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

    def test_density_integrates_to_one(self):
        dist = SquashedNormal(torch.tensor([0.4]).double(), torch.tensor([0.7]).double(), -1.0, 3.0)
        grid = torch.linspace(-1, 3, 200_001, dtype=torch.float64)[1:-1, None]
        assert torch.trapezoid(dist.log_prob(grid).exp(), grid.squeeze(-1)).item() == pytest.approx(1, abs=1e-4)

    @settings(max_examples=30, deadline=None)
    @given(st.floats(-20, 20), st.floats(-5, 2))
    def test_float32_is_close_to_float64_everywhere(self, x, log_scale):
        """The log-probability of a drawn x, whatever tanh rounds to."""
        results = []
        for dtype in (torch.float32, torch.float64):
            scale = torch.tensor([math.exp(log_scale)], dtype=dtype)
            dist = SquashedNormal(torch.tensor([x], dtype=dtype), scale, -2.0, 2.0)
            torch.manual_seed(0)
            results.append(dist._log_jacobian(dist.loc).double())
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


class TestSaturation:
    @pytest.mark.parametrize("x", [-20.0, -9.0, 9.0, 20.0])
    def test_gradients_are_finite(self, x):
        loc = torch.full((4, 2), x, requires_grad=True)
        scale = torch.full((4, 2), 0.1, requires_grad=True)
        dist = SquashedNormal(loc, scale, -2.0, 2.0)
        action, log_prob = dist.rsample_and_log_prob()
        grads = [*torch.autograd.grad(log_prob.sum() + action.sum(), [loc, scale])]
        grads += torch.autograd.grad(dist.log_prob(action.detach()).sum(), [loc, scale])
        assert all(value.isfinite().all() for value in (action, log_prob, *grads))
        # d log p / d loc of the drawn x is that of the Jacobian: 2 tanh x
        torch.testing.assert_close(grads[0], torch.full((4, 2), 2.0 * math.copysign(1, x)), rtol=1e-4, atol=1e-4)

    def test_actions_at_the_bounds_have_a_log_prob(self):
        dist = make()
        for bound in (LOW, HIGH):
            assert dist.log_prob(bound.expand(5, 3)).isfinite().all()

    @settings(max_examples=50, deadline=None)
    @given(st.floats(-10, 10, width=32), st.floats(0.015625, 10, width=32))
    def test_rounding_stays_within_the_bounds(self, low, width):
        low, high = torch.tensor([low]), torch.tensor([low]) + width
        for x in (-30.0, 30.0):
            action = SquashedNormal(torch.tensor([[x]]), torch.ones(1, 1), low, high).deterministic_sample
            assert (low <= action).all()
            assert (action <= high).all()


class TestInterface:
    @pytest.mark.parametrize("sample_shape", [(), (4,), (4, 2)])
    def test_shapes(self, sample_shape):
        dist = make(dtype=torch.float32)
        action, log_prob = dist.rsample_and_log_prob(sample_shape)
        assert action.shape == dist.sample(sample_shape).shape == (*sample_shape, 5, 3)
        assert log_prob.shape == dist.log_prob(action).shape == (*sample_shape, 5)
        assert action.dtype == log_prob.dtype == torch.float32
        assert (dist.batch_shape, dist.event_shape) == ((5,), (3,))

    def test_expand(self):
        dist = make().expand((2, 5))
        assert dist.sample().shape == (2, 5, 3)
        assert dist.log_prob(dist.sample()).shape == (2, 5)

    def test_sample_has_no_gradient_and_rsample_has(self):
        loc = torch.zeros(2, 3, requires_grad=True)
        dist = SquashedNormal(loc, torch.ones(2, 3))
        assert not dist.sample().requires_grad
        assert dist.rsample().requires_grad

    def test_deterministic_median_and_mode_are_the_squashed_mean(self):
        dist = make()
        expected = (HIGH + LOW) / 2 + (HIGH - LOW) / 2 * dist.loc.tanh()
        for value in (dist.deterministic_sample, dist.median, dist.mode):
            torch.testing.assert_close(value, expected)

    def test_half_of_the_draws_lie_below_the_median(self, device):
        loc, scale = torch.tensor([[0.7, -0.3]], device=device), torch.tensor([[2.0, 0.5]], device=device)
        dist = SquashedNormal(loc, scale, -1.0, 2.0)
        share = (dist.sample((40_000,)) < dist.median).float().mean(0)
        assert ((share - 0.5).abs() < 5 * 0.5 / 40_000**0.5).all()

    def test_no_host_read(self, device):
        head = SquashedNormalHead(LOW.float(), HIGH.float()).to(device)
        x = torch.randn(4, 6, device=device)
        with no_host_sync():
            dist = SquashedNormal(*head(x))
            action, _ = dist.rsample_and_log_prob()
            dist.log_prob(action)

    def test_compiled_equals_eager(self, variant):
        loc, scale = torch.randn(8, 3, device=variant.device), torch.rand(8, 3, device=variant.device) + 0.1
        low, high = LOW.float().to(variant.device), HIGH.float().to(variant.device)

        def fn(loc, scale):
            dist = SquashedNormal(loc, scale, low, high)
            return dist.deterministic_sample, dist.log_prob(dist.deterministic_sample)

        for got, expected in zip(variant(fn)(loc, scale), fn(loc, scale), strict=True):
            torch.testing.assert_close(got, expected)


class TestHead:
    def test_parameters_and_their_range(self):
        head = SquashedNormalHead(LOW.float(), HIGH.float(), log_scale_min=-3, log_scale_max=1)
        loc, scale, low, high = head(torch.cat([torch.ones(2, 3), torch.tensor([[-50.0, 0.0, 50.0]] * 2)], -1))
        assert torch.equal(loc, torch.ones(2, 3))
        torch.testing.assert_close(scale, torch.tensor([-3.0, -1.0, 1.0]).exp().expand(2, 3))
        assert torch.equal(low, LOW.float().expand(2, 3))
        assert torch.equal(high, HIGH.float().expand(2, 3))

    def test_bounds_are_buffers(self):
        head = SquashedNormalHead(LOW.float(), HIGH.float())
        assert {name for name, _ in head.named_buffers()} == {"low", "high"} == set(head.state_dict())
        assert head.double().high.dtype == torch.float64
        assert head.to("meta").low.device.type == "meta"

    def test_the_caller_keeps_its_bounds(self):
        low, high = torch.zeros(2), torch.ones(2)
        head = SquashedNormalHead(low, high)
        low.add_(5)
        assert torch.equal(head.low, torch.zeros(2))

    @pytest.mark.parametrize("low, high", [([0.0], [torch.inf]), ([0.0], [0.0]), ([1.0], [0.0]), ([torch.nan], [1.0])])
    def test_bounds_without_room_are_refused(self, low, high):
        with pytest.raises(ValueError, match=r"expected finite bounds with low < high, received .*Remedy"):
            SquashedNormalHead(torch.tensor(low), torch.tensor(high))

    def test_shapes_and_scales_are_checked(self):
        with pytest.raises(ValueError, match=r"expected one shape \[D\], received \[2\] and \[3\]"):
            SquashedNormalHead(torch.zeros(2), torch.ones(3))
        with pytest.raises(ValueError, match="expected less than log_scale_max"):
            SquashedNormalHead(torch.zeros(2), torch.ones(2), log_scale_min=1, log_scale_max=0)

    @pytest.mark.parametrize("kind", ["device", "torchrl"])
    def test_in_an_actor(self, kind):
        net = nn.Sequential(nn.Linear(4, 6), SquashedNormalHead(LOW.float(), HIGH.float()))
        spec = Bounded(LOW.float(), HIGH.float())
        keys = SquashedNormalHead.param_keys
        if kind == "device":
            actor = DeviceActor(net, distribution_class=SquashedNormal, param_keys=keys, spec=spec)
        else:
            actor = ProbabilisticActor(
                TensorDictModule(net, ["observation"], keys), keys, distribution_class=SquashedNormal, spec=spec
            )
        td = TensorDict({"observation": torch.randn(7, 4)}, [7])
        with set_exploration_type(ExplorationType.RANDOM), no_host_sync():
            drawn = actor(td.clone())["action"]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            mean = actor(td.clone())["action"]
        assert spec.expand(7, 3).is_in(drawn)
        assert torch.equal(mean, actor.get_dist(td.clone()).median)
        assert not torch.equal(drawn, mean)
