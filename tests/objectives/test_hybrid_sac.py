"""HybridSACLoss: one part is the plain loss, a loop as oracle, target entropies, masks, host waits, a bandit."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.objectives import DiscreteSACLoss, SoftUpdate

from torchrl_perf.modules import (
    DeviceActor,
    EnsembleHybridQ,
    EnsembleQ,
    GumbelCategorical,
    HybridActor,
    SquashedNormal,
    SquashedNormalHead,
    hybrid_features,
)
from torchrl_perf.objectives import DeviceSACLoss, HybridSACLoss
from torchrl_perf.objectives.sac import target_entropy
from torchrl_perf.runtime import no_host_sync

ROWS, OBS, CHOICES = 12, 3, 4
GAMMA = 0.9
F64 = torch.float64
KIND, PUSH, SHIFT = ("action", "kind"), ("action", "push"), ("action", "deep", "shift")
LEAVES = {KIND: Categorical(CHOICES), PUSH: Bounded(-torch.ones(2), torch.ones(2)), SHIFT: Unbounded(1)}


def make_spec(*keys):
    spec = Composite()
    for key in keys:
        spec[key] = LEAVES[key].clone()
    return spec


def make_loss(*keys, mask=False, device="cpu", **options):
    torch.manual_seed(5)
    spec = make_spec(*keys)
    actor = HybridActor(
        nn.Linear(OBS, hybrid_features(spec)), spec=spec, mask_key="mask" if mask else None, log_scale_range=(-2.0, 1.0)
    )
    inputs = ["observation", *(key for key in keys if key != KIND)]
    size = OBS + sum(LEAVES[key].shape[-1] for key in keys if key != KIND)
    if KIND in keys:
        critic = TensorDictModule(EnsembleHybridQ(2, size, CHOICES, hidden_sizes=(8,)), inputs, ["action_value"])
    else:
        critic = TensorDictModule(EnsembleQ(2, size, hidden_sizes=(8,)), inputs, ["state_action_value"])
    return HybridSACLoss(actor.double(), critic.double(), gamma=GAMMA, **options).to(device)


def make_batch(*, weights=False, steps=False, device="cpu"):
    torch.manual_seed(6)
    td = TensorDict({"observation": torch.randn(ROWS, OBS, dtype=F64), "mask": torch.rand(ROWS, CHOICES) < 0.6}, [ROWS])
    td[KIND] = torch.randint(CHOICES, (ROWS,))
    td[PUSH] = torch.rand(ROWS, 2, dtype=F64) * 2 - 1
    td[SHIFT] = torch.randn(ROWS, 1, dtype=F64)
    td["next", "observation"] = torch.randn(ROWS, OBS, dtype=F64)
    td["next", "mask"] = torch.rand(ROWS, CHOICES) < 0.6
    td["next", "mask"][0] = False  # a state without any choice
    td["next", "reward"] = torch.randn(ROWS, 1, dtype=F64)
    td["next", "terminated"] = torch.rand(ROWS, 1) < 0.3
    if weights:
        td["priority_weight"] = torch.rand(ROWS, dtype=F64) + 0.1
    if steps:
        td["steps_to_next_obs"] = torch.randint(1, 4, (ROWS, 1))
    return td.to(device)


def total(out):
    return out["loss_qvalue"] + out["loss_actor"] + out["loss_alpha"]


def plain_loss(hybrid):
    """DeviceSACLoss on the same weights."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = hybrid.actor.head

        def forward(self, x):
            params = self.head.parameters_of(TensorDict({"observation": x}, x.shape[:-1]))[0][PUSH]
            return tuple(params[name] for name in SquashedNormalHead.param_keys)

    actor = DeviceActor(
        Named(),
        distribution_class=SquashedNormal,
        param_keys=SquashedNormalHead.param_keys,
        spec=Bounded(-torch.ones(7, 2), torch.ones(7, 2)),
    )
    critic = TensorDictModule(hybrid.critic.module, ["observation", "action"], ["state_action_value"])
    return DeviceSACLoss(actor, critic, gamma=GAMMA, loss_function="l2")


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_one_continuous_part_is_plain_sac(weights, steps):
    hybrid, batch = make_loss(PUSH), make_batch(weights=weights, steps=steps)
    plain, plain_batch = plain_loss(hybrid), batch.clone()
    push = plain_batch.pop("action")["push"]
    plain_batch["action"] = push
    assert hybrid.target_entropies == [plain.target_entropy] == [-2.0]
    results = []
    for loss, td in ((hybrid, batch), (plain, plain_batch)):
        torch.manual_seed(8)
        out = loss(td)
        loss.zero_grad()
        total(out).backward()
        grads = [p.grad.clone() for p in (*hybrid.actor.parameters(), *hybrid.critic.parameters())]
        results.append((out.detach(), td["td_error"], loss.log_alpha.grad.sum(), grads))
    (ours, error, alpha, grads), (theirs, their_error, their_alpha, their_grads) = results
    for key in ("loss_qvalue", "loss_actor", "loss_alpha", "alpha", "entropy"):
        torch.testing.assert_close(ours[key].sum(), theirs[key], msg=key)
    torch.testing.assert_close(error, their_error)
    torch.testing.assert_close(alpha, their_alpha)
    for one, other in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_one_discrete_part_is_torchrls_discrete_sac():
    loss, td = make_loss(KIND, alpha=0.6), make_batch()
    critic = nn.Sequential(nn.Linear(OBS, 8), nn.ReLU(), nn.Linear(8, CHOICES)).double()
    theirs = DiscreteSACLoss(
        DeviceActor(loss.actor.head.network, distribution_class=GumbelCategorical, param_keys=["logits"]),
        TensorDictModule(critic, ["observation"], ["action_value"]),
        action_space="categorical",
        num_actions=CHOICES,
        loss_function="l2",
        alpha_init=0.6,
        delay_qvalue=True,
    )
    theirs.make_value_estimator(gamma=GAMMA)
    SoftUpdate(theirs, tau=0.1)
    members = loss.critic.module.net
    with torch.no_grad():
        for layer, weight, bias in zip(("0", "2"), members.weights, members.biases, strict=True):
            for params in (theirs.qvalue_network_params, theirs.target_qvalue_network_params):
                params["module", layer, "weight"].copy_(weight.transpose(1, 2))
                params["module", layer, "bias"].copy_(bias[:, 0])
    their_td = td.clone()
    their_td["action"] = td[KIND]
    their_td["next", "done"] = td["next", "terminated"]
    ours, expected = loss(td), theirs(their_td)
    for key in ("loss_qvalue", "loss_actor", "loss_alpha", "entropy"):
        torch.testing.assert_close(ours[key].sum(), expected[key], msg=key)


def loop(loss, td, here, following):
    """Losses row by row and choice by choice."""
    alpha = loss.log_alpha.exp().tolist()
    q, actor_loss, errors = 0.0, 0.0, []
    names = [key for key in loss.critic.in_keys if key != "observation"]

    def values(critic, row, prefix, actions):
        inputs = dict(zip(names, actions, strict=True))
        x = torch.cat([td[(*prefix, "observation")][row], *inputs.values()]).unsqueeze(0)
        return critic.module(x)[0]  # [K, D]

    def soft(critic, row, prefix, draw):
        value = values(critic, row, prefix, [action[row] for action in draw.actions])
        out = 0.0
        for choice in range(CHOICES):
            log_pi = draw.log_policy[row, choice].item()
            if log_pi > -math.inf:
                out += math.exp(log_pi) * (value[:, choice].min().item() - alpha[0] * log_pi)
        return out - sum(a * log_prob[row].item() for a, log_prob in zip(alpha[1:], draw.log_probs, strict=True))

    for row in range(ROWS):
        target = td["next", "reward"][row].item()
        if not td["next", "terminated"][row]:
            target += GAMMA * soft(loss.target_critic, row, ("next",), following)
        value = values(loss.critic, row, (), [td[name][row] for name in names])[:, td[KIND][row]]
        q += (value - target).square().sum().item() / ROWS
        errors.append((value - target).abs().max().item())
        actor_loss -= soft(loss.critic, row, (), here) / ROWS
    return q, actor_loss, errors


@pytest.mark.parametrize("keys", [(KIND,), (KIND, PUSH), (KIND, PUSH, SHIFT)], ids=["discrete", "two", "three"])
@pytest.mark.parametrize("mask", [False, True])
def test_equals_a_loop(keys, mask):
    alpha = {KIND: 0.5, PUSH: 2.0, SHIFT: 0.1}
    loss = make_loss(*keys, mask=mask, alpha={key: alpha[key] for key in keys})
    td = make_batch()
    torch.manual_seed(9)
    with torch.no_grad():
        here, following = loss.sample(td)
        q, actor_loss, errors = loop(loss, td, here, following)
    torch.manual_seed(9)
    out = loss(td)
    assert out["loss_qvalue"].item() == pytest.approx(q)
    assert out["loss_actor"].item() == pytest.approx(actor_loss)
    assert td["td_error"].tolist() == pytest.approx(errors)


def test_a_masked_next_choice_is_masked_in_the_target():
    """Q = [1, 5, 2], mask [1, 0, 1], a policy that takes the last, no entropy: 2."""
    spec = Composite(action=Composite(kind=Categorical(3)))
    actor = HybridActor(Fixed(torch.tensor([-50.0, 80.0, 50.0])), spec=spec, mask_key="mask")
    critic = TensorDictModule(Fixed(torch.tensor([[1.0, 5.0, 2.0]] * 2)), ["observation"], ["action_value"])
    loss = HybridSACLoss(actor, critic, gamma=1.0, alpha=1e-6, learn_alpha=False)
    td = TensorDict({"observation": torch.zeros(1, 1), "mask": torch.tensor([[1, 1, 1]]).bool()}, [1])
    td[KIND] = torch.tensor([0])
    td["next"] = td.select("observation").set("mask", torch.tensor([[1, 0, 1]]).bool())
    td["next", "reward"], td["next", "terminated"] = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)
    loss(td)
    assert td["td_error"].item() == pytest.approx(abs(1.0 - 2.0), abs=1e-4)
    td["next", "mask"] = torch.tensor([[False, False, False]])  # action 0
    loss(td)
    assert td["td_error"].item() == pytest.approx(abs(1.0 - 1.0), abs=1e-4)


class Fixed(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, x):
        return self.value.expand(x.shape[0], *self.value.shape)


def test_target_entropies_of_each_part():
    loss = make_loss(KIND, PUSH, SHIFT)
    assert loss.part_keys == [KIND, PUSH, SHIFT]
    assert loss.target_entropies == [None, -2.0, -1.0]
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    masked = make_loss(KIND, mask=True)
    td = TensorDict({"observation": torch.zeros(4, OBS, dtype=F64), "mask": mask}, [4])
    td["next"] = td.clone()
    here, _ = masked.sample(td)
    expected = [0.98 * math.log(count) for count in (4, 2, 1, 1)]
    assert masked._targets(here)[0].tolist() == pytest.approx(expected)
    given = make_loss(KIND, PUSH, entropy={KIND: 0.3, PUSH: -1.5})
    assert given.target_entropies == [0.3, -1.5]
    for batch in ((), (5,), (2, 3)):
        assert target_entropy(Bounded(-torch.ones(*batch, 2), torch.ones(*batch, 2))) == -2.0


def test_temperatures_move_towards_their_own_target():
    loss, td = make_loss(KIND, PUSH, entropy={KIND: 1e3, PUSH: -1e3}), make_batch()
    loss(td)["loss_alpha"].backward()
    assert loss.log_alpha.grad[0] < 0 < loss.log_alpha.grad[1]  # too little of the first, too much of the second
    fixed = make_loss(KIND, PUSH, learn_alpha=False, alpha=0.2)
    assert not fixed.learns_alpha and "log_alpha" in fixed.state_dict()
    assert "log_alpha" not in dict(fixed.named_parameters())


def test_gradients_reach_their_own_network_only():
    loss, td = make_loss(KIND, PUSH, mask=True), make_batch()
    out = loss(td)
    out["loss_actor"].backward(retain_graph=True)
    assert all(p.grad is None for p in loss.critic.parameters())
    assert all(p.grad.abs().sum() > 0 for p in loss.actor.parameters())
    loss.zero_grad()
    out["loss_qvalue"].backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in loss.actor.parameters())
    assert all(p.grad is None for p in loss.target_critic.parameters())


def test_actor_gradient_is_the_finite_difference():
    loss, td = make_loss(KIND, PUSH, SHIFT, mask=True), make_batch()

    def fn(bias):
        torch.manual_seed(11)
        with torch.no_grad():
            loss.actor.head.network.bias.copy_(bias)
        here, _ = loss.sample(td)
        return loss.actor_losses(td, here, detached=True)[0]

    bias = loss.actor.head.network.bias.detach().clone()
    loss.zero_grad()
    fn(bias).backward()
    grad, step = loss.actor.head.network.bias.grad.clone(), 1e-6
    for i in range(len(bias)):
        unit = torch.zeros_like(bias)
        unit[i] = step
        with torch.no_grad():
            slope = (fn(bias + unit) - fn(bias - unit)) / (2 * step)
        assert grad[i].item() == pytest.approx(slope.item(), abs=1e-6)


def test_no_host_read(device):
    loss, td = make_loss(KIND, PUSH, SHIFT, mask=True, device=device), make_batch(device=device)
    with no_host_sync(device):
        total(loss(td)).backward()
        loss.update_targets_(0.1)


@pytest.mark.slow_compiled
def test_variants_agree(variant):
    loss, td = make_loss(KIND, PUSH, mask=True, device=variant.device), make_batch(device=variant.device)
    with torch.no_grad():
        torch.manual_seed(12)
        expected = loss(td.clone())
        fn = variant(lambda td: dict(loss(td.copy()).items()))
        torch.manual_seed(12)
        got = fn(td)
    assert all(value.isfinite().all() for value in got.values())
    if variant.name != "graph":
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-8, msg=key)


def test_targets_follow():
    loss = make_loss(KIND, PUSH)
    before = [p.clone() for p in loss.target_critic.parameters()]
    with torch.no_grad():
        for p in loss.critic.parameters():
            p.add_(1.0)
    loss.update_targets_(0.25)
    for old, new in zip(before, loss.target_critic.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_function": "l1"}, "loss_function: expected one of"),
        ({"actor": nn.Linear(1, 1)}, "expected a HybridActor, received Linear.*Remedy"),
        ({"alpha": 0.0}, "expected positive temperatures"),
        ({"gamma": -0.1}, "gamma: expected a discount factor"),
        ({"choice_entropy": 1.5}, r"choice_entropy: expected a share in \[0, 1\]"),
        ({"entropy": {"nothing": 1.0}}, r"entropy: expected parts among .*\['nothing'\]"),
        ({"critic": TensorDictModule(nn.Linear(1, 1), ["observation"], ["q"])}, r"critic: expected .*push.*Remedy"),
        (
            {"critic": TensorDictModule(nn.Linear(1, 1), [KIND, PUSH], ["q"])},
            "none of .*kind.*whose values are its outputs",
        ),
    ],
)
def test_bad_construction(change, message):
    loss = make_loss(KIND, PUSH)
    arguments = {"actor": loss.actor, "critic": loss.critic} | change
    with pytest.raises(ValueError, match=message):
        HybridSACLoss(arguments.pop("actor"), arguments.pop("critic"), **arguments)


def test_actions_that_it_cannot_serve():
    two = HybridActor(nn.Linear(OBS, 5), spec=Composite(a=Categorical(2), b=Categorical(3)))
    critic = TensorDictModule(nn.Linear(OBS, 2), ["observation"], ["q"])
    with pytest.raises(ValueError, match=r"at most one discrete part, received \['a', 'b'\].*Remedy"):
        HybridSACLoss(two, critic)
    nodes = HybridActor(nn.Linear(OBS, 3), spec=Composite(a=Categorical(3, shape=[5])))
    td = TensorDict({"observation": torch.randn(2, 5, OBS)}, [2])
    td["next"] = td.clone()
    with pytest.raises(ValueError, match=r"one action for each row, received nodes in \['a'\].*Remedy"):
        HybridSACLoss(nodes, critic).sample(td)
    loss, td = make_loss(KIND), make_batch()
    loss.critic.module, loss.target_critic.module = nn.Linear(OBS, 4).double(), nn.Linear(OBS, 4).double()
    with pytest.raises(ValueError, match=r"expected \[B, K, D\].*received \[12, 4\]"):
        loss(td)


def test_solves_a_bandit():
    """Reward -(push - best[kind])^2 - cost[kind]: the choice with the least cost, and its own best push."""
    torch.manual_seed(0)
    best, cost = torch.tensor([0.5, -0.4]), torch.tensor([1.0, 0.0])
    spec = Composite(action=Composite(kind=Categorical(2), push=Bounded(-torch.ones(1), torch.ones(1))))
    actor = HybridActor(nn.Linear(1, hybrid_features(spec)), spec=spec)
    critic = TensorDictModule(
        EnsembleHybridQ(2, 2, 2, hidden_sizes=(32,)), ["observation", ("action", "push")], ["action_value"]
    )
    loss = HybridSACLoss(actor, critic, alpha=0.01, learn_alpha=False)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    for _ in range(400):
        td = TensorDict({"observation": torch.ones(64, 1)}, [64])
        td["action", "kind"] = torch.randint(2, (64,))
        td["action", "push"] = torch.rand(64, 1) * 2 - 1
        kind = td["action", "kind"]
        reward = -(td["action", "push"] - best[kind].unsqueeze(-1)).square() - cost[kind].unsqueeze(-1)
        td["next"] = TensorDict({"observation": torch.ones(64, 1), "reward": reward}, [64])
        td["next", "terminated"] = torch.ones(64, 1, dtype=torch.bool)
        out = loss(td)
        optimizer.zero_grad()
        total(out).backward()
        optimizer.step()
    action = actor(TensorDict({"observation": torch.ones(1, 1)}, [1]))["action"]
    assert action["kind"].item() == 1
    assert action["push"].item() == pytest.approx(-0.4, abs=0.15)
