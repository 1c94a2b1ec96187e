"""OptionActor and OptionNormal: ranges, densities, the soft actor-critic with options, variants."""

import math

import pytest
import torch
from option_parts import OBS, make_controller, rows
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules import (
    BoundedNormal,
    EnsembleQ,
    OptionActor,
    OptionConditioned,
    OptionNormal,
    OptionPolicy,
    OptionSet,
    SquashedNormal,
)
from torchrl_perf.objectives import DeviceSACLoss
from torchrl_perf.objectives.sac import target_entropy
from torchrl_perf.runtime import no_host_sync

ACT = 2
LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])
RANGES = (1.0, 0.05, (-1.0, 0.0))
NAMES = ("full", "fine", "lower")


def make_actor(device="cpu", **options):
    spec = Bounded(LOW.expand(5, ACT), HIGH.expand(5, ACT)).to(device)
    network = nn.Sequential(nn.Linear(OBS + 3, 16), nn.Tanh(), nn.Linear(16, 2 * ACT)).to(device)
    return OptionActor(network, OptionSet(NAMES, action_range=RANGES), spec=spec, **options).to(device)


def states(count, device="cpu"):
    td = rows(count, device=device)
    td["observation"].normal_()
    td["active_option"] = torch.arange(count, device=device) % 3
    return td


def act(actor, td, kind=ExplorationType.RANDOM):
    with set_exploration_type(kind), torch.no_grad():
        return actor(td.copy())


class TestRanges:
    @pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    def test_each_option_keeps_to_its_part_of_the_bounds(self, kind, device):
        actor = make_actor(device, log_scale_range=(0.0, 3.0))
        td = act(actor, states(3_000, device), kind)
        middle, half = (HIGH + LOW) / 2, (HIGH - LOW) / 2
        for option, (low, high) in enumerate([(-1.0, 1.0), (-0.05, 0.05), (-1.0, 0.0)]):
            action = td["action"][td["active_option"] == option].cpu()
            assert (action >= middle + half * low - 1e-6).all()
            assert (action <= middle + half * high + 1e-6).all()
            if kind is ExplorationType.RANDOM:  # and uses all of it
                assert (action.amax(0) - action.amin(0) > 0.9 * half * (high - low)).all()

    def test_bounds_are_state(self):
        actor = make_actor()
        held = {name.rpartition(".")[2] for name, _ in actor.named_buffers()}
        assert {"low", "high", "unit"} <= held
        assert actor.spec["action"].shape == (5, ACT)

    def test_the_network_is_told_the_option(self):
        seen = []

        class Spy(nn.Module):
            def forward(self, x):
                seen.append(x)
                return x

        conditioned = OptionConditioned(Spy(), 3)
        conditioned(torch.full((2, 1), 7.0), torch.full((2, 2), 8.0), torch.tensor([2, 0]))
        assert seen[0].tolist() == [[7, 8, 8, 0, 0, 1], [7, 8, 8, 1, 0, 0]]


class TestDensity:
    def test_full_range_is_the_plain_distribution(self):
        loc, scale = torch.randn(4, ACT), torch.rand(4, ACT) + 0.1
        low, high, unit = LOW.expand(4, ACT), HIGH.expand(4, ACT), ((HIGH - LOW) / 2).expand(4, ACT)
        ours, plain = OptionNormal(loc, scale, low, high, unit), SquashedNormal(loc, scale, low, high)
        noise = torch.randn(4, ACT)
        for one, other in zip(
            ours.rsample_and_log_prob(noise=noise), plain.rsample_and_log_prob(noise=noise), strict=True
        ):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(ours.expand([2, 4]).log_prob(low + 0.3), plain.expand([2, 4]).log_prob(low + 0.3))

    def test_it_is_the_density_of_the_stretched_action_and_integrates_to_one(self):
        wide = torch.full((1, 1), 2.0, dtype=torch.float64)
        dist = OptionNormal(0.3 * wide, 0.5 * wide, 0 * wide, 0.1 * wide, wide)  # in [0, .2] of [-2, 2]
        grid = torch.linspace(0, 0.2, 20_001, dtype=torch.float64)[1:-1].unsqueeze(-1)
        density = dist.expand([len(grid)]).log_prob(grid).exp()
        # one unit of the action is 20 of the stretched one
        assert float(density.sum()) * 0.2 / 20_000 * 20 == pytest.approx(1.0, abs=1e-4)
        action, log_prob = dist.rsample_and_log_prob()
        torch.testing.assert_close(dist.log_prob(action), log_prob)
        plain = SquashedNormal(0.3 * wide, 0.5 * wide, 0 * wide, 0.1 * wide)
        torch.testing.assert_close(dist.log_prob(action) + math.log(20.0), plain.log_prob(action))

    def test_the_entropy_of_an_option_does_not_depend_on_its_range(self):
        actor = make_actor()
        with torch.no_grad():
            for layer in (actor.module[0].module.network.network[0], actor.module[0].module.network.network[2]):
                layer.weight.zero_()
        td = states(3)
        _, log_prob = actor.get_dist(td).rsample_and_log_prob(noise=torch.ones(3, ACT))
        torch.testing.assert_close(log_prob, log_prob[:1].expand(3))

    def test_entropy_is_minus_the_mean_log_density(self):
        wide = torch.full((1, 2), 2.0)
        dist = OptionNormal(0.1 * wide, 0.3 * wide, -0.2 * wide, 0.1 * wide, wide)
        _, log_prob = dist.rsample_and_log_prob((50_000,))
        assert -float(log_prob.mean()) == pytest.approx(dist.entropy().item(), abs=0.03)
        # that of the action itself is smaller by the logarithm of the stretch, 4 / .6 for each of the two
        plain = BoundedNormal(0.1 * wide, 0.3 * wide, -0.2 * wide, 0.1 * wide)
        assert dist.entropy().item() - plain.entropy().item() == pytest.approx(2 * math.log(4 / 0.6), abs=1e-5)


class TestAgents:
    @pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    @pytest.mark.parametrize("trailing", [(), (1,)])
    def test_one_that_does_not_exist_acts_in_the_middle_of_its_options_range(self, kind, trailing, device):
        actor = make_actor(device, valid_key="valid")
        td = states(6, device)
        valid = torch.tensor([True, True, True, False, False, False], device=device)
        td["valid"] = valid.view(6, *trailing)
        td["observation"][3:] = torch.nan
        with no_host_sync(device):
            out = act(actor, td, kind)
        torch.testing.assert_close(out["action"][3:], ((out["low"] + out["high"]) / 2)[3:])
        assert (out["action_log_prob"][3:] == 0).all()
        assert (out["action_log_prob"][:3] != 0).all()
        dist = actor.get_dist(td)
        assert (dist.entropy()[3:] == 0).all() and (dist.expand([6]).entropy()[3:] == 0).all()
        torch.testing.assert_close(dist.log_prob(out["action"]), out["action_log_prob"])

    def test_the_policy_learns_nothing_from_it(self):
        actor = make_actor(valid_key="valid")
        q = OptionConditioned(EnsembleQ(2, OBS + ACT + 3, hidden_sizes=(8,)), 3)
        critic = TensorDictModule(q, ["observation", "action", "active_option"], ["state_action_value"])
        loss, grads = DeviceSACLoss(actor, critic), []
        td = states(6)
        td["valid"] = torch.arange(6) < 3
        for observed in (1.0, -5.0):  # of those that do not exist
            td["observation"][3:] = observed
            torch.manual_seed(0)
            batch = act(actor, td)
            batch["next"] = td.clone()
            action, log_prob, _, following = loss.sample(batch)
            assert (log_prob[3:] == 0).all() and (following[3:] == 0).all()
            value, temperature = loss.actor_losses(batch, action, log_prob)
            grads.append(torch.autograd.grad(value + temperature, list(actor.parameters())))
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)
            assert one.abs().sum() > 0

    def test_in_one_policy_with_the_controller(self, device):
        td = rows(6, device=device, valid=torch.arange(6, device=device) % 2 == 0)
        controller = make_controller((0.0, 0.0, 0.0), device, example=td, controller={"valid_key": "valid"})
        policy = OptionPolicy(controller, make_actor(device, valid_key="valid"))
        assert policy.in_keys == ["observation", "option", "option_age", "valid"]
        out = act(policy, td)
        assert torch.equal(out["option_start"], td["valid"])
        assert torch.equal(out["action_log_prob"] != 0, td["valid"])


class TestPolicy:
    def test_controller_and_actor_in_one_without_a_host_read(self, device):
        controller = make_controller((0.0, 0.0, 0.0), device)
        policy = OptionPolicy(controller, make_actor(device))
        assert policy.in_keys == ["observation", "option", "option_age"]
        assert {"action", "active_option", ("next", "option_age")} <= set(policy.out_keys)
        td = rows(6, device=device)
        with no_host_sync(device):
            td = act(policy, td)
        assert td["action"].shape == (6, ACT)
        torch.testing.assert_close(td["low"][:, 0], policy.actor.module[0].module.low[td["active_option"], 0])
        policy.step(10)
        assert controller.steps.item() == 10

    def test_variants_agree(self, variant):
        """Log-probabilities are the eager ones of what was drawn; a compiler may draw in another order."""
        count = 6_000
        policy = OptionPolicy(make_controller((0.0, 0.0, 0.0), variant.device), make_actor(variant.device))
        td = rows(count, device=variant.device)

        def step():
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                out = policy(td.copy())
            return out["active_option"], out["action"], out["action_log_prob"]

        fn = variant(step)
        for _ in range(4):  # the last one is a replay
            option, action, log_prob = (part.clone() for part in fn())
        assert not torch.equal(fn()[1], action)
        shares = torch.nn.functional.one_hot(option, 3).float().mean(0)
        assert ((shares - 1 / 3).abs() < 5 * (2 / 9 / count) ** 0.5).all()
        dist = policy.actor.get_dist(td.copy().set("active_option", option))
        torch.testing.assert_close(log_prob, dist.log_prob(action).detach(), rtol=1e-4, atol=1e-4)
        surprise = (log_prob + dist.entropy().detach()).double()
        assert abs(float(surprise.mean())) < 5 * float(surprise.std()) / count**0.5


class TestSoftActorCritic:
    def make(self, device):
        actor = make_actor(device)
        q = OptionConditioned(EnsembleQ(2, OBS + ACT + 3, hidden_sizes=(8,), device=device), 3)
        critic = TensorDictModule(q, ["observation", "action", "active_option"], ["state_action_value"])
        td = act(actor, states(12, device))
        td["next"] = rows(12, device=device, age=1)
        td["next", "observation"].normal_()
        td["next", "reward"] = torch.randn(12, 1, device=device)
        td["next", "terminated"] = torch.zeros(12, 1, dtype=torch.bool, device=device)
        return DeviceSACLoss(actor, critic), td

    def test_losses_and_gradients_without_a_host_read(self, device):
        loss, td = self.make(device)
        controller = make_controller((0.0, 0.0, 0.0), device)
        with no_host_sync(device):
            out = loss(controller.write_following(td))
            sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        assert all(param.grad is not None and param.grad.isfinite().all() for param in loss.actor.parameters())
        assert all(param.grad.abs().sum() > 0 for param in loss.critic.parameters())

    def test_target_entropy(self):
        assert target_entropy(make_actor().spec["action"]) == -2.0

    def test_the_option_of_the_next_state_is_in_the_target(self, device):
        loss, td = self.make(device)
        values = []
        for option in range(3):
            td["next", "active_option"] = torch.full((12,), option, device=device)
            torch.manual_seed(0)
            loss(td)
            values.append(td["td_error"].clone())
        assert not torch.allclose(values[0], values[1])


class TestBadSpec:
    @pytest.mark.parametrize(
        "spec",
        [Categorical(3), Unbounded((5, ACT)), Bounded(0, 3, shape=(5, ACT), dtype=torch.int64), Bounded(0.0, 1.0, ())],
    )
    def test_kind(self, spec):
        with pytest.raises(ValueError, match=r"spec: expected continuous actions .*received .*Remedy"):
            OptionActor(nn.Linear(6, 4), OptionSet(NAMES), spec=spec)

    def test_infinite_bounds(self):
        spec = Bounded(torch.tensor([-torch.inf, 0.0]), torch.tensor([1.0, 1.0]))
        with pytest.raises(ValueError, match=r"spec: expected finite bounds.*Remedy"):
            OptionActor(nn.Linear(6, 4), OptionSet(NAMES), spec=spec)
