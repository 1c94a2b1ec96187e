"""Rows that do not count reach no loss, statistic, normalisation or gradient of the PPO losses."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ValueOperator

from torchrl_perf.functional.losses.ppo import normalized_advantage
from torchrl_perf.modules import (
    BoundedNormal,
    DeviceActor,
    GumbelCategorical,
    HybridActor,
    SquashedNormalHead,
    hybrid_features,
)
from torchrl_perf.objectives import DeviceClipPPOLoss, DeviceKLPENPPOLoss
from torchrl_perf.runtime import no_host_sync

F64 = torch.float64
OBS, ROWS, AGENTS = 3, 20, 4


def make_actor(kind, valid_key="valid"):
    torch.manual_seed(1)
    if kind == "bounded":
        net = nn.Sequential(nn.Linear(OBS, 4), SquashedNormalHead(-torch.ones(2), torch.ones(2)))
        return DeviceActor(
            net, distribution_class=BoundedNormal, param_keys=SquashedNormalHead.param_keys, valid_key=valid_key
        )
    if kind == "categorical":
        return DeviceActor(nn.Linear(OBS, 3), distribution_class=GumbelCategorical, param_keys=["logits"])
    spec = Composite(action=Composite(kind=Categorical(3), push=Bounded(-torch.ones(2), torch.ones(2))))
    return HybridActor(nn.Linear(OBS, hybrid_features(spec)), spec=spec, valid_key=valid_key, joint=False)


def make(kind, shape=(ROWS, AGENTS), **options):
    actor = make_actor(kind, **options).double()
    critic = ValueOperator(nn.Linear(OBS, 1), in_keys=["observation"]).double()
    td = TensorDict({"observation": torch.randn(*shape, OBS, dtype=F64), "valid": torch.rand(*shape) < 0.65}, shape)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        critic(actor(td))
    for key in actor.log_prob_keys:
        td[key] = td[key] + 0.3 * torch.randn_like(td[key])
    td["state_value"] = td["state_value"] + 0.4 * torch.randn(*shape, 1, dtype=F64)
    td["advantage"] = torch.randn(*shape, 1, dtype=F64) * 2 + 1
    td["value_target"] = torch.randn(*shape, 1, dtype=F64)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return actor, critic, td


def outcome(loss, batch):
    out = loss(batch.clone())
    loss.zero_grad()
    sum(value.sum() for key, value in out.items() if key.startswith("loss_")).backward()
    return out.detach(), [p.grad.clone() for p in loss.parameters() if p.grad is not None]


def spoiled(td, rows):
    """NaN and infinities in all that the rows hold."""
    td = td.clone()
    for key in td.keys(True, True):
        if td[key].is_floating_point():
            td[key][rows] = torch.nan
    return td


@pytest.mark.parametrize("kind", ["bounded", "categorical", "hybrid"])
@pytest.mark.parametrize("cls", [DeviceClipPPOLoss, DeviceKLPENPPOLoss])
@pytest.mark.parametrize(("reduction", "normalize"), [("mean", True), ("sum", False)])
def test_all_is_that_of_the_valid_rows_alone(kind, cls, reduction, normalize):
    actor, critic, td = make(kind)
    options = {"reduction": reduction, "normalize_advantage": normalize, "clip_value": 0.2, "loss_critic_type": "l2"}
    options |= {"log_explained_variance": True}
    options |= {"closed_form_kl": True, "ratio_statistics": True} if cls is DeviceClipPPOLoss else {"dtarg": 1e-9}
    key = {} if kind != "categorical" else {"valid_key": "valid"}  # the others' actors say it
    valid = td["valid"]
    # KLPEN writes its weight, so each call has a loss of its own
    expected = outcome(cls(actor, critic, functional=False, **options), td[valid])
    for batch in (td, spoiled(td, ~valid)):
        loss = cls(actor, critic, functional=False, **options, **key)
        with no_host_sync():
            got = outcome(loss, batch.set("valid", valid if batch is td else valid.unsqueeze(-1)))
        assert set(got[0].keys()) == set(expected[0].keys()) == set(loss.out_keys)
        for name in expected[0].keys():
            torch.testing.assert_close(got[0][name], expected[0][name], rtol=1e-10, atol=1e-12, msg=name)
        for one, other in zip(got[1], expected[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cls", [DeviceClipPPOLoss, DeviceKLPENPPOLoss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_any_valid_row_all_is_zero(cls, reduction):
    actor, critic, td = make("bounded")
    td = spoiled(td, torch.ones_like(td["valid"])).set("valid", torch.zeros(ROWS, AGENTS, dtype=torch.bool))
    loss = cls(actor, critic, normalize_advantage=True, clip_value=True and 0.2, reduction=reduction)
    out, grads = outcome(loss, td)
    assert all(not value.any() for key, value in out.items() if key != "beta")
    assert not any(grad.any() for grad in grads)
    if cls is DeviceKLPENPPOLoss:
        assert loss.beta == 1.0


def test_rows_of_reduction_none_are_zero_where_absent():
    actor, critic, td = make("bounded")
    loss = DeviceClipPPOLoss(actor, critic, reduction="none")
    (out, _), (alone, _) = outcome(loss, spoiled(td, ~td["valid"])), outcome(loss, td[td["valid"]])
    for key in ("loss_objective", "loss_critic", "loss_entropy"):
        assert out[key].shape == (ROWS, AGENTS)
        assert not out[key][~td["valid"]].any()
        torch.testing.assert_close(out[key][td["valid"]], alone[key])


@pytest.mark.parametrize("key", [("collector", "mask"), "shifted_valid"])
def test_masks_of_torchrl_count_too(key):
    actor, critic, td = make("categorical", (ROWS,))
    expected = outcome(DeviceClipPPOLoss(actor, critic), td[td["valid"]])
    got = outcome(DeviceClipPPOLoss(actor, critic), td.set(key, td["valid"].unsqueeze(-1)))
    torch.testing.assert_close(got[0]["loss_objective"], expected[0]["loss_objective"])
    both = td.clone().set("present", torch.rand(ROWS) < 0.8)
    expected = outcome(DeviceClipPPOLoss(actor, critic), both[both["valid"] & both["present"]])
    got = outcome(DeviceClipPPOLoss(actor, critic, valid_key="present"), both)
    for one, other in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(one, other)


def test_one_value_for_all_agents_counts_where_an_agent_does():
    actor, _, td = make("bounded")
    td["valid"][:5] = False
    wide = TensorDictModule(lambda x: x.mean((-1, -2)).unsqueeze(-1), ["observation"], ["state_value"])
    td = TensorDict(dict(td.items()), [ROWS]).set("value_target", torch.randn(ROWS, 1, dtype=F64))
    loss = DeviceClipPPOLoss(actor, wide, functional=False, loss_critic_type="l2")
    error = (td["observation"].mean((-1, -2)).unsqueeze(-1) - td["value_target"]).square()
    torch.testing.assert_close(loss(td)["loss_critic"], error[td["valid"].any(-1)].mean())


def test_flags_that_do_not_fit_are_refused():
    actor, critic, td = make("categorical", (ROWS,))
    loss = DeviceClipPPOLoss(actor, critic, valid_key="present")
    with pytest.raises(KeyError, match=r"valid_key: expected 'present'.*Remedy"):
        loss(td)
    for flag in (torch.ones(ROWS), torch.ones(ROWS + 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"present: expected bool \[20\].*received"):
            loss(TensorDict({**dict(td.items()), "present": flag}))


class TestNormalisation:
    @pytest.mark.parametrize(("number", "count"), [(12345.678, 4096), (5.1, 7), (1e-8, 3), (3.0, 1)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
    def test_equal_numbers_give_exactly_zero(self, number, count, dtype):
        numbers = torch.full((count, 1), number, dtype=dtype)
        assert not normalized_advantage(numbers).any()
        valid = torch.rand(count) < 0.6
        other = torch.where(valid.unsqueeze(-1), numbers, torch.nan)
        assert not normalized_advantage(other, valid).any()
        both = torch.cat([numbers, 2 * numbers], -1)
        assert not normalized_advantage(both, exclude_dims=(-1,)).any()

    def test_excluded_dims_have_their_own_statistics(self):
        numbers = torch.randn(9, 4, 1) * torch.tensor([1.0, 10.0, 100.0, 0.1]).view(4, 1) + 3
        valid = torch.rand(9, 4) < 0.7
        whole, part = normalized_advantage(numbers, exclude_dims=(-2,)), normalized_advantage(numbers, valid, (1,))
        for agent in range(4):
            torch.testing.assert_close(whole[:, agent], normalized_advantage(numbers[:, agent]))
            chosen = valid[:, agent]
            torch.testing.assert_close(part[chosen, agent], normalized_advantage(numbers[chosen, agent]))
            assert not part[~chosen, agent].any()

    def test_a_fault_in_a_row_that_counts_is_seen(self):
        numbers = torch.randn(5, 1)
        numbers[2] = torch.nan
        assert normalized_advantage(numbers).isnan().all()
        assert normalized_advantage(numbers, torch.tensor([True, True, True, False, False]))[:3].isnan().all()
