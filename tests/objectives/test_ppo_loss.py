"""DeviceClipPPOLoss against TorchRL's ClipPPOLoss, a hand-computed case, and the host-wait audit."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from torchrl_perf.modules import GumbelCategorical
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime import no_host_sync

ROWS = 24
LOSSES = (DeviceClipPPOLoss, ClipPPOLoss)


def make_modules(kind):
    torch.manual_seed(2)
    if kind == "discrete":
        net, keys, distribution = nn.Linear(3, 4), ["logits"], GumbelCategorical
    else:
        net, keys, distribution = (
            nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()),
            ["loc", "scale"],
            IndependentNormal,
        )
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys), keys, distribution_class=distribution, return_log_prob=True
    )
    return actor.double(), ValueOperator(nn.Linear(3, 1), in_keys=["observation"]).double()


def make_batch(actor, critic, rows=ROWS):
    td = TensorDict({"observation": torch.randn(rows, 3, dtype=torch.float64)}, [rows])
    with torch.no_grad():
        critic(actor(td))
    td["action_log_prob"] = td["action_log_prob"] + 0.4 * torch.randn(rows, dtype=torch.float64)
    td["state_value"] = td["state_value"] + 0.4 * torch.randn(rows, 1, dtype=torch.float64)
    td["advantage"] = torch.randn(rows, 1, dtype=torch.float64) * 2 + 1
    td["value_target"] = torch.randn(rows, 1, dtype=torch.float64)
    return td.exclude("logits", "loc", "scale")


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("clip_value", [False, True, 0.3])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("critic_loss", ["l2", "smooth_l1"])
@pytest.mark.parametrize("functional", [False, True])
def test_values_and_gradients_are_torchrls(kind, clip_value, normalize, critic_loss, functional):
    actor, critic = make_modules(kind)
    batch = make_batch(actor, critic)
    options = {
        "clip_value": clip_value,
        "normalize_advantage": normalize,
        "loss_critic_type": critic_loss,
        "entropy_coeff": 0.03,
        "critic_coeff": 0.7,
        "functional": functional,
    }
    results = []
    for cls in LOSSES:
        loss = cls(actor, critic, **options)
        out = loss(batch.clone())
        loss.zero_grad()
        sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        results.append((out.detach(), [p.grad.clone() for p in loss.parameters() if p.grad is not None]))
    (ours, our_grads), (theirs, their_grads) = results
    assert set(ours.keys()) == set(theirs.keys()) - {"ESS", "max_ratio", "mean_ratio", "explained_variance"}
    for key in ours.keys():
        assert ours[key].shape == (), key
        torch.testing.assert_close(ours[key], theirs[key].squeeze(), rtol=1e-10, atol=1e-12, msg=key)
    assert theirs["clip_fraction"] > 0.1
    assert len(our_grads) == len(their_grads) == 4
    for one, other in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_hand_computed():
    """Two rows, uniform policy over two actions, ratios 2 and 1/2, values 0."""
    actor, critic = make_modules("discrete")
    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(1, 2), ["observation"], ["logits"]), ["logits"], distribution_class=GumbelCategorical
    )
    critic = ValueOperator(nn.Linear(1, 1), in_keys=["observation"])
    for parameter in [*actor.parameters(), *critic.parameters()]:
        nn.init.zeros_(parameter)
    batch = TensorDict(
        {
            "observation": torch.ones(2, 1),
            "action": torch.tensor([0, 1]),
            "action_log_prob": torch.tensor([0.25, 1.0]).log(),  # ratios .5 / .25 = 2 and .5 / 1
            "advantage": torch.tensor([[1.0], [-3.0]]),
            "value_target": torch.tensor([[2.0], [0.5]]),
            "state_value": torch.tensor([[-1.0], [0.1]]),
        },
        [2],
    )
    loss = DeviceClipPPOLoss(
        actor, critic, clip_epsilon=0.2, clip_value=0.2, entropy_coeff=0.1, critic_coeff=0.5, loss_critic_type="l2"
    )
    out = loss(batch)
    # min(2, 1.2) * 1 and min(.5 * -3, .8 * -3)
    assert out["loss_objective"].item() == pytest.approx(-(1.2 - 2.4) / 2)
    # the first value may move from -1 to -.8 only: max((2 - 0)^2, (2 + .8)^2); the second is not clipped: .5^2
    assert out["loss_critic"].item() == pytest.approx(0.5 * (7.84 + 0.25) / 2)
    assert out["loss_entropy"].item() == pytest.approx(-0.1 * math.log(2))
    assert out["entropy"].item() == pytest.approx(math.log(2))
    assert out["kl_approx"].item() == pytest.approx(-(math.log(2) + math.log(0.5)) / 2)
    assert out["clip_fraction"].item() == 1.0
    assert out["value_clip_fraction"].item() == 0.5


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("clip_value", [False, True])
def test_no_host_read_forward_and_backward(kind, clip_value):
    actor, critic = make_modules(kind)
    loss = DeviceClipPPOLoss(actor, critic, clip_value=clip_value, normalize_advantage=True, functional=False)
    batch = make_batch(actor, critic)
    with no_host_sync():
        out = loss(batch)
        (out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]).backward()


def test_the_batch_is_left_alone():
    actor, critic = make_modules("discrete")
    batch = make_batch(actor, critic)
    before = batch.clone()
    DeviceClipPPOLoss(actor, critic, clip_value=True, functional=False)(batch)
    assert set(batch.keys()) == set(before.keys())
    assert (batch == before).all()


def test_constant_advantages_give_no_policy_gradient_and_no_nan():
    actor, critic = make_modules("discrete")
    batch = make_batch(actor, critic).set("advantage", torch.full((ROWS, 1), 5.0, dtype=torch.float64))
    out = DeviceClipPPOLoss(actor, critic, normalize_advantage=True, functional=False)(batch)
    assert out["loss_objective"].item() == 0


def test_one_row():
    actor, critic = make_modules("continuous")
    batch = make_batch(actor, critic, rows=1)
    out = DeviceClipPPOLoss(actor, critic, normalize_advantage=True, clip_value=True, functional=False)(batch)
    assert all(value.isfinite() for value in out.values())


def test_missing_advantage_names_the_remedy():
    actor, critic = make_modules("discrete")
    with pytest.raises(KeyError, match=r"Expected 'advantage'.*'observation'.*Remedy: run GAETransform"):
        DeviceClipPPOLoss(actor, critic)(make_batch(actor, critic).exclude("advantage"))


@pytest.mark.parametrize("key", ["value_target", "state_value"])
def test_missing_critic_entries_are_named(key):
    actor, critic = make_modules("discrete")
    with pytest.raises(KeyError, match=rf"Expected \[.*'{key}'\] in the batch|Expected .*'{key}'.*Remedy: run GAET"):
        DeviceClipPPOLoss(actor, critic, clip_value=True)(make_batch(actor, critic).exclude(key))


@pytest.mark.parametrize(
    "options", [{"advantage_norm": nn.Identity()}, {"delay_actor": True}, {"max_importance_ratio": 2.0}]
)
def test_options_it_does_not_have_are_refused(options):
    with pytest.raises(ValueError, match=r"received .*Remedy: torchrl's ClipPPOLoss"):
        DeviceClipPPOLoss(*make_modules("discrete"), **options)


def test_asymmetric_clipping():
    actor, critic = make_modules("discrete")
    batch = make_batch(actor, critic)
    ours, theirs = (cls(actor, critic, clip_epsilon=(0.1, 0.4), functional=False)(batch.clone()) for cls in LOSSES)
    torch.testing.assert_close(ours["loss_objective"], theirs["loss_objective"].squeeze())
    torch.testing.assert_close(ours["clip_fraction"], theirs["clip_fraction"])


def test_keys_can_be_renamed():
    actor, critic = make_modules("discrete")
    batch = make_batch(actor, critic)
    loss = DeviceClipPPOLoss(actor, critic, functional=False)
    expected = loss(batch)
    loss.set_keys(advantage="adv", value_target="target")
    got = loss(batch.rename_key_("advantage", "adv").rename_key_("value_target", "target"))
    for key in expected.keys():
        assert torch.equal(got[key], expected[key]), key


def test_compiled_equals_eager(fresh_dynamo):
    from torchrl_perf.runtime.compile import compiled

    actor, critic = make_modules("discrete")
    loss = DeviceClipPPOLoss(actor, critic, clip_value=True, normalize_advantage=True, functional=False)
    batch = make_batch(actor, critic)
    expected = loss(batch)
    got = compiled(lambda td: dict(loss(td).items()), backend="aot_eager")(batch)
    for key, value in got.items():
        torch.testing.assert_close(value, expected[key])
