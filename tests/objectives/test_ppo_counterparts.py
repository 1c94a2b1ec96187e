"""The PPO losses against TorchRL's own: distributions, reductions, arguments, keys, value estimators, shapes."""

import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, NormalParamExtractor, TensorDictModule, set_composite_lp_aggregate
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, ValueEstimators
from torchrl.objectives.value import GAE

from torchrl_perf.modules import GumbelCategorical, SquashedNormal, SquashedNormalHead
from torchrl_perf.objectives import DeviceClipPPOLoss, DeviceKLPENPPOLoss
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import GAETransform

F64 = torch.float64
OBS, N, T = 3, 4, 6
PAIRS = [(DeviceClipPPOLoss, ClipPPOLoss), (DeviceKLPENPPOLoss, KLPENPPOLoss)]
STEADY = {DeviceClipPPOLoss: {}, DeviceKLPENPPOLoss: {"dtarg": 1e9, "decrement": 1.0}}


def wide():
    return nn.Sequential(nn.Linear(OBS, 4), NormalParamExtractor())


def make_actor(kind):
    torch.manual_seed(3)
    keys, kwargs = ["logits"], {}
    if kind == "categorical":
        net, distribution = nn.Linear(OBS, 4), GumbelCategorical
    elif kind == "onehot":
        net, distribution = nn.Linear(OBS, 4), OneHotCategorical
    elif kind == "masked":
        net, distribution, keys = nn.Linear(OBS, 4), MaskedCategorical, {"logits": "logits", "mask": "mask"}
    elif kind == "squashed":
        net = nn.Sequential(nn.Linear(OBS, 4), SquashedNormalHead(-torch.ones(2), 2 * torch.ones(2)))
        distribution, keys = SquashedNormal, SquashedNormalHead.param_keys
    else:
        net, keys = wide(), ["loc", "scale"]
        distribution, kwargs = (IndependentNormal, {}) if kind == "normal" else (TanhNormal, {"low": -2.0, "high": 1.0})
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"] if "logits" in keys else keys),
        keys,
        distribution_class=distribution,
        distribution_kwargs=kwargs,
        return_log_prob=True,
    ).double()


def transitions(actor):
    done = torch.rand(N, T, 1) < 0.2
    td = TensorDict(
        {
            "observation": torch.randn(N, T, OBS, dtype=F64),
            "mask": torch.tensor([True, True, False, True]).expand(N, T, 4),
            "next": {
                "observation": torch.randn(N, T, OBS, dtype=F64),
                "reward": torch.randn(N, T, 1, dtype=F64),
                "done": done,
                "terminated": done & (torch.rand(N, T, 1) < 0.5),
            },
        },
        [N, T],
        names=[None, "time"],
    )
    with torch.no_grad():
        actor(td)
    td["action_log_prob"] = td["action_log_prob"] + 0.3 * torch.randn(N, T, dtype=F64)
    return td


def make(kind):
    actor, critic = make_actor(kind), ValueOperator(nn.Linear(OBS, 1), in_keys=["observation"]).double()
    td = transitions(actor)
    td["state_value"], td["value_target"] = torch.randn(2, N, T, 1, dtype=F64).unbind(0)
    td["advantage"] = torch.randn(N, T, 1, dtype=F64)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return actor, critic, td.reshape(-1)


def outcome(loss, batch):
    torch.manual_seed(7)  # entropies and divergences that are sampled
    out = loss(batch.clone())
    loss.zero_grad()
    sum(value.sum() for key, value in out.items() if key.startswith("loss_")).backward()
    return out.detach(), [p.grad.clone() for p in loss.parameters() if p.grad is not None]


def assert_counterpart(ours, theirs, batch):
    one, other = outcome(ours, batch), outcome(theirs, batch)
    for key in one[0].keys():
        if key in ("beta", "kl") and key not in other[0].keys():
            continue
        if key == "beta":
            continue
        want = other[0][key]
        want = want if key.startswith("loss_") else want.mean()
        torch.testing.assert_close(one[0][key], want, rtol=1e-9, atol=1e-11, msg=key)
    assert len(one[1]) == len(other[1]) > 0
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["categorical", "onehot", "masked", "normal", "tanh", "squashed"])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_every_distribution_and_reduction(kind, ours, theirs, reduction):
    actor, critic, batch = make(kind)
    options = {"reduction": reduction, "clip_value": 0.3, "samples_mc_entropy": 3, "log_explained_variance": True}
    options |= {"normalize_advantage": True, "entropy_coeff": 0.05, "loss_critic_type": "l1", **STEADY[ours]}
    assert_counterpart(ours(actor, critic, **options), theirs(actor, critic, **options), batch)


@pytest.mark.parametrize("kind", ["tanh", "squashed"])
def test_sampled_entropy_and_divergence(kind):
    actor, critic, batch = make(kind)
    for ours, theirs in PAIRS:
        options = {"samples_mc_entropy": 4, **STEADY[ours]}
        assert_counterpart(ours(actor, critic, **options), theirs(actor, critic, **options), batch)
    loss = DeviceClipPPOLoss(actor, critic, samples_mc_entropy=4000, functional=False)
    dist = actor.get_dist(batch)
    exact = -dist.log_prob(dist.sample((4000,))).mean()
    assert loss(batch)["entropy"].item() == pytest.approx(exact.item(), abs=0.02)


def test_squashed_normal_waits_for_nobody():
    actor, critic, batch = make("squashed")
    loss = DeviceClipPPOLoss(actor, critic, functional=False, closed_form_kl=True)
    with no_host_sync():
        sum(loss(batch)[key] for key in ("loss_objective", "loss_entropy", "loss_critic")).backward()


@pytest.mark.parametrize("coeff", [0.1, {"push_entropy": 0.2, "turn_entropy": 0.05}])
def test_composite_with_a_part_that_is_sampled(coeff):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.push, self.turn = wide(), wide()

        def forward(self, x):
            return (*self.push(x), *self.turn(x))

    keys = [("params", part, name) for part in ("push", "turn") for name in ("loc", "scale")]
    with set_composite_lp_aggregate(False):
        actor = ProbabilisticActor(
            TensorDictModule(Net(), ["observation"], keys),
            ["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"push": TanhNormal, "turn": IndependentNormal}},
            return_log_prob=True,
        ).double()
        critic = ValueOperator(nn.Linear(OBS, 1), in_keys=["observation"]).double()
        batch = TensorDict({"observation": torch.randn(9, OBS, dtype=F64)}, [9])
        with torch.no_grad():
            actor(batch)
        batch["advantage"], batch["value_target"] = torch.randn(2, 9, 1, dtype=F64).unbind(0)
        for key in ("push_log_prob", "turn_log_prob"):
            batch[key] = batch[key] + 0.1
        options = {"entropy_coeff": coeff, "samples_mc_entropy": 2}
        one, other = (outcome(cls(actor, critic, **options), batch) for cls in PAIRS[0])
        penalised, _ = outcome(DeviceKLPENPPOLoss(actor, critic, **options), batch)
    assert penalised["kl"] == 0 and penalised["entropy"].isfinite()  # TorchRL would sample it; here it is exact
    for key in ("loss_objective", "loss_entropy", "loss_critic", "entropy", "kl_approx"):
        torch.testing.assert_close(one[0][key], other[0][key].mean(), rtol=1e-9, atol=1e-11, msg=key)
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


class TestArguments:
    @pytest.mark.parametrize(("ours", "theirs"), PAIRS)
    @pytest.mark.parametrize(
        "options",
        [
            {"entropy_bonus": False},
            {"critic_coeff": 0, "functional": False},
            {"critic_coeff": 0.3, "entropy_coeff": 0.2, "device": "cpu"},
            {"separate_losses": True},
            {"normalize_advantage": True, "normalize_advantage_exclude_dims": (-1,), "functional": False},
            {"clip_value": 0.1, "loss_critic_type": "smooth_l1"},
        ],
    )
    def test_used_as_torchrl_uses_them(self, ours, theirs, options):
        actor, critic, batch = make("categorical")
        options = {**options, **STEADY[ours]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_counterpart(ours(actor, critic, **options), theirs(actor, critic, **options), batch)

    def test_old_names_and_a_policy_alone(self):
        actor, critic, batch = make("categorical")
        named = DeviceClipPPOLoss(actor=actor, critic=critic)(batch)
        for key, value in DeviceClipPPOLoss(actor, critic)(batch).items():
            assert torch.equal(value, named[key])
        alone = DeviceClipPPOLoss(actor, critic_coeff=0.0)
        assert "loss_critic" not in alone(batch).keys() and "loss_critic" not in alone.out_keys

    @pytest.mark.parametrize("ours", [DeviceClipPPOLoss, DeviceKLPENPPOLoss])
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"clip_epsilonn": 0.1}, TypeError),
            ({"gamma": 0.9}, TypeError),
            ({"entropy_coef": 0.1}, TypeError),
            ({"critic_coef": 0.1}, TypeError),
            ({"advantage_key": "a"}, RuntimeError),
            ({"value_key": "a"}, RuntimeError),
            ({"value_target_key": "a"}, RuntimeError),
            ({"reduction": "median"}, ValueError),
            ({"loss_critic_type": "l3"}, ValueError),
            ({"delay_actor": True}, ValueError),
            ({"max_importance_ratio": 2.0}, ValueError),
        ],
    )
    def test_the_rest_is_refused_by_name(self, ours, options, error):
        actor, critic, _ = make("categorical")
        with pytest.raises(error, match=next(iter(options)).removesuffix("_key")):
            ours(actor, critic, **options)

    def test_weights_of_parts_for_an_action_of_one(self):
        actor, critic, batch = make("categorical")
        with pytest.raises(KeyError, match=r"entropy_coeff: expected.*action_entropy"):
            DeviceClipPPOLoss(actor, critic, entropy_coeff={"action_entropy": 0.1})(batch)

    def test_ratio_statistics(self):
        actor, critic, batch = make("categorical")
        theirs = ClipPPOLoss(actor, critic)(batch)
        ours = DeviceClipPPOLoss(actor, critic, ratio_statistics=True, log_explained_variance=True)(batch)
        for key in ("ESS", "max_ratio", "mean_ratio", "explained_variance"):
            torch.testing.assert_close(ours[key], theirs[key].squeeze())

    def test_tensors_by_keyword(self):
        actor, critic, _ = make("categorical")
        td = transitions(actor)
        loss = DeviceClipPPOLoss(actor, critic)
        loss.select_out_keys("loss_objective", "kl_approx")
        values = {"_".join(key): td[key] for key in (("next", "reward"), ("next", "done"), ("next", "terminated"))}
        values |= {key: td[key] for key in ("observation", "action", "action_log_prob")}
        values["next_observation"] = td["next", "observation"]
        objective, kl = loss(**values)
        want = loss(td)
        torch.testing.assert_close(objective, want["loss_objective"])
        torch.testing.assert_close(kl, want["kl_approx"])


class TestShapes:
    @pytest.mark.parametrize("cls", [DeviceClipPPOLoss, DeviceKLPENPPOLoss])
    @pytest.mark.parametrize(
        ("key", "change"),
        [
            ("advantage", lambda x: x.expand(-1, 2)),
            ("advantage", lambda x: x.squeeze(-1)),
            ("value_target", lambda x: x.squeeze(-1)),
            ("value_target", lambda x: x.expand(-1, 3)),
            ("state_value", lambda x: x.squeeze(-1)),
            ("action_log_prob", lambda x: x.unsqueeze(-1).expand(-1, 2)),
        ],
    )
    def test_what_would_broadcast_is_refused(self, cls, key, change):
        actor, critic, batch = make("categorical")
        batch[key] = change(batch[key])
        with pytest.raises(ValueError, match=rf"(value_target|{key}).*expected \[24.*received.*Remedy"):
            cls(actor, critic, clip_value=0.2)(batch)

    def test_a_log_probability_with_a_last_dim_is_the_same(self):
        actor, critic, batch = make("categorical")
        loss = DeviceClipPPOLoss(actor, critic)
        want = loss(batch)["loss_objective"]
        batch["action_log_prob"] = batch["action_log_prob"].unsqueeze(-1)
        assert torch.equal(loss(batch)["loss_objective"], want)


class TestValueEstimators:
    @pytest.mark.parametrize("kind", list(ValueEstimators), ids=lambda kind: kind.name)
    @pytest.mark.parametrize(("ours", "theirs"), PAIRS)
    def test_of_torchrl(self, kind, ours, theirs):
        actor, critic, _ = make("categorical")
        batch = transitions(actor)
        losses = [cls(actor, critic, **STEADY[ours]) for cls in (ours, theirs)]
        if kind not in theirs.SUPPORTED_VALUE_ESTIMATORS:
            for loss in losses:
                with pytest.raises(NotImplementedError):
                    loss.make_value_estimator(kind)
            return
        for loss in losses:
            loss.make_value_estimator(kind, gamma=0.9)
        if kind is ValueEstimators.MAGAE:
            return
        assert_counterpart(*losses, batch)

    def test_the_default_is_torchrls(self):
        actor, critic, _ = make("categorical")
        batch = transitions(actor)
        assert_counterpart(DeviceClipPPOLoss(actor, critic), ClipPPOLoss(actor, critic), batch)

    @pytest.mark.parametrize("cls", [DeviceClipPPOLoss, ClipPPOLoss, DeviceKLPENPPOLoss, A2CLoss])
    @pytest.mark.parametrize("by", ["instance", "class"])
    def test_gae_transform_is_one(self, cls, by):
        actor, critic, _ = make("categorical")
        batch = transitions(actor)
        options = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic}
        losses = []
        for kind in (GAETransform, GAE):
            loss = cls(actor, critic)
            if by == "instance":
                assert loss.make_value_estimator(kind(**options)) is loss
            else:
                loss.make_value_estimator(kind, **options)
            assert isinstance(loss.value_estimator, kind)
            losses.append(loss)
        one, other = (outcome(loss, batch) for loss in losses)
        for key in one[0].keys():
            torch.testing.assert_close(one[0][key], other[0][key])
        for a, b in zip(one[1], other[1], strict=True):
            torch.testing.assert_close(a, b)

    def test_keys_of_the_loss_are_those_of_the_estimator(self):
        actor, critic, _ = make("categorical")
        batch = transitions(actor)
        loss = DeviceClipPPOLoss(actor, critic)
        loss.make_value_estimator(GAETransform(gamma=0.9, lmbda=0.8, value_network=critic))
        want = loss(batch)
        loss.set_keys(advantage="a", value_target="t", reward="r", done="d", terminated="x")
        for old, new in (("reward", "r"), ("done", "d"), ("terminated", "x")):
            batch["next", new] = batch["next"].pop(old)
        for key, value in loss(batch).items():
            assert torch.equal(value, want[key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_within_rounding(dtype):
    actor, critic, batch = make("categorical")
    loss = DeviceClipPPOLoss(actor, critic, normalize_advantage=True, clip_value=0.2, functional=False)
    halves = batch.apply(lambda x: x.to(dtype).double() if x.is_floating_point() else x)
    want = loss(halves)
    half = batch.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    half["observation"] = halves["observation"]
    got = loss(half)
    for key in want.keys():
        assert got[key].dtype in (torch.float32, F64)
        torch.testing.assert_close(got[key].double(), want[key].double(), rtol=1e-4, atol=1e-5)


def test_an_actor_of_torchrl_with_bounds():
    spec = Bounded(-torch.ones(2), torch.ones(2))
    actor = ProbabilisticActor(
        TensorDictModule(wide(), ["observation"], ["loc", "scale"]), ["loc", "scale"], spec=spec,
        distribution_class=TanhNormal, distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
    ).double()  # fmt: skip
    critic = ValueOperator(nn.Linear(OBS, 1), in_keys=["observation"]).double()
    batch = transitions(actor)
    assert_counterpart(DeviceClipPPOLoss(actor, critic), ClipPPOLoss(actor, critic), batch)
