"""DeviceSACLoss against TorchRL's SACLoss on the same weights and noise, its parts, and the host-wait audit."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate, ValueEstimators

from torchrl_perf.modules import DeviceActor, EnsembleQ, SquashedNormal, SquashedNormalHead
from torchrl_perf.modules import squashed_normal as squashed_normal_module
from torchrl_perf.objectives import DeviceSACLoss
from torchrl_perf.objectives.sac import frozen, target_entropy
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.runtime.compile import compiled

ROWS, OBS, ACT, HIDDEN = 12, 3, 2, 8
GAMMA = 0.97
HIGH = torch.tensor([2.0, 0.5])


def make_actor(device="cpu", spec=None):
    net = nn.Sequential(
        nn.Linear(OBS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * ACT), SquashedNormalHead(-HIGH, HIGH)
    ).to(device)
    spec = Bounded(-HIGH.expand(5, ACT), HIGH.expand(5, ACT)) if spec is None else spec
    return DeviceActor(net, distribution_class=SquashedNormal, param_keys=SquashedNormalHead.param_keys, spec=spec)


def make_critic(members=2, device="cpu"):
    net = EnsembleQ(members, OBS + ACT, hidden_sizes=(HIDDEN,), device=device)
    return TensorDictModule(net, ["observation", "action"], ["state_action_value"])


def make_loss(device="cpu", **options):
    torch.manual_seed(3)
    return DeviceSACLoss(make_actor(device), make_critic(device=device), **{"gamma": GAMMA, **options})


def make_batch(dtype=torch.float64, device="cpu", *, weights=False, steps=False):
    torch.manual_seed(4)
    terminated = torch.rand(ROWS, 1) < 0.3
    truncated = torch.rand(ROWS, 1) < 0.3
    td = TensorDict(
        {
            "observation": torch.randn(ROWS, OBS, dtype=dtype),
            "action": (torch.rand(ROWS, ACT, dtype=dtype) * 2 - 1) * HIGH,
            "next": {
                "observation": torch.randn(ROWS, OBS, dtype=dtype),
                "reward": torch.randn(ROWS, 1, dtype=dtype),
                "terminated": terminated,
                "done": terminated | truncated,
            },
        },
        [ROWS],
    )
    if weights:
        td["priority_weight"] = torch.rand(ROWS, dtype=dtype) + 0.1
    if steps:
        td["steps_to_next_obs"] = torch.randint(1, 4, (ROWS, 1))
    return td.to(device)


def separate_critics(critic):
    """The ensemble's members as TorchRL's critics."""
    nets = []
    ensemble = critic.module.net
    for k in range(ensemble.num_members):
        layers = []
        for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[2]).double()
            with torch.no_grad():
                layer.weight.copy_(weight[k].T)
                layer.bias.copy_(bias[k, 0])
            layers += [layer, nn.ReLU()]
        nets.append(_Cat(nn.Sequential(*layers[:-1])))
    return [ValueOperator(net, in_keys=["observation", "action"]) for net in nets]


class _Cat(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *inputs):
        return self.net(torch.cat(inputs, -1))


def fix_noise(monkeypatch):
    """States get one table of noise, next states another, in one draw of both or in TorchRL's order."""
    states, following = torch.randn(2, ROWS, ACT, dtype=torch.float64)
    queue = []

    def noise(shape, like):
        if shape[0] == 2 * ROWS:
            return torch.cat([states, following])
        if not queue:
            queue.extend([following, states])
        return queue.pop(0)

    monkeypatch.setattr(squashed_normal_module, "_noise", noise)


@pytest.mark.parametrize("loss_function", ["l2", "smooth_l1"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_values_and_gradients_are_torchrls(monkeypatch, loss_function, weights, steps):
    fix_noise(monkeypatch)
    ours = make_loss(alpha=0.3, loss_function=loss_function).double()
    theirs = SACLoss(
        ours.actor,
        separate_critics(ours.critic),
        alpha_init=0.3,
        loss_function=loss_function,
        target_entropy=-ACT,
        delay_qvalue=True,
    ).double()
    theirs.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    SoftUpdate(theirs, tau=0.1)  # it warns without one
    batch = make_batch(weights=weights, steps=steps)
    mine, reference = batch.clone(), batch.clone()
    got, expected = ours(mine), theirs(reference)
    for key in got.keys():
        torch.testing.assert_close(got[key], expected[key], rtol=1e-6, atol=1e-6, msg=key)
    torch.testing.assert_close(mine["td_error"], reference["td_error"], rtol=1e-6, atol=1e-6)

    sum(got[key] for key in got.keys() if key.startswith("loss")).backward()
    ours_actor = [param.grad.clone() for param in ours.actor.parameters()]
    ours.actor.zero_grad()
    sum(expected[key] for key in expected.keys() if key.startswith("loss")).backward()
    torch.testing.assert_close(ours.log_alpha.grad, theirs.log_alpha.grad, rtol=1e-6, atol=1e-6)
    first = theirs.qvalue_network_params["module", "net", "0", "weight"].grad
    torch.testing.assert_close(ours.critic.module.net.weights[0].grad, first.transpose(-1, -2), rtol=1e-6, atol=1e-6)
    last = theirs.actor_network_params["module", "0", "module", "2", "weight"].grad
    torch.testing.assert_close(ours_actor[2], last, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2,), (5, 2), (3, 5, 2)])
def test_target_entropy_counts_the_action_dims_only(shape):
    assert target_entropy(Bounded(-1, 1, shape)) == -2.0


def test_target_entropy_is_read_from_the_actor_or_given():
    assert make_loss().target_entropy == -2.0
    assert make_loss(entropy=-7).target_entropy == -7.0
    spec = Composite(action=Bounded(-1, 1, (5, 3)), shape=(5,))
    assert DeviceSACLoss(make_actor(spec=spec), make_critic()).target_entropy == -3.0


def test_a_truncated_step_is_bootstrapped_and_a_terminated_one_not():
    loss = make_loss()
    batch = make_batch(torch.float32)
    batch["next", "reward"].zero_()
    batch["next", "terminated"].fill_(True)
    _, _, action, log_prob = loss.sample(batch)
    _, priority, _ = loss.critic_losses(batch, action, log_prob)
    value = loss.values(loss.critic, batch, batch["action"])
    torch.testing.assert_close(priority, value.abs().amax(-1))
    batch["next", "terminated"].fill_(False)
    batch["next", "done"].fill_(True)
    _, priority, _ = loss.critic_losses(batch, action, log_prob)
    following = loss.values(loss.target_critic, batch, action, following=True).amin(-1) - log_prob
    torch.testing.assert_close(priority, (value - GAMMA * following[:, None]).abs().amax(-1))


def test_gradients_go_where_they_belong():
    loss = make_loss()
    batch = make_batch(torch.float32)
    action, log_prob, next_action, next_log_prob = loss.sample(batch)
    assert action.requires_grad and log_prob.requires_grad
    assert not (next_action.requires_grad or next_log_prob.requires_grad)
    total, priority, _ = loss.critic_losses(batch, next_action, next_log_prob)
    assert not priority.requires_grad
    others = [*loss.actor.parameters(), loss.log_alpha]
    assert all(g is None for g in torch.autograd.grad(total, others, allow_unused=True))
    with frozen(loss.critic):
        actor, temperature = loss.actor_losses(batch, action, log_prob)
    assert all(param.requires_grad for param in loss.critic.parameters())
    (actor + temperature).backward()
    assert all(param.grad is None for param in [*loss.critic.parameters(), *loss.target_critic.parameters()])
    assert all(param.grad is not None for param in others)


def test_frozen_leaves_frozen_parameters_alone():
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    with frozen(net):
        assert not net.weight.requires_grad
    assert net.weight.requires_grad and not net.bias.requires_grad


def test_targets_follow_and_are_no_parameters_of_the_critic():
    loss = make_loss()
    critic, target = (list(module.parameters()) for module in (loss.critic, loss.target_critic))
    assert all(torch.equal(one, two) and one is not two for one, two in zip(critic, target, strict=True))
    with torch.no_grad():
        critic[0].fill_(1.0)
        target[0].zero_()
    loss.update_targets_(0.25)
    assert (target[0] == 0.25).all()


def test_a_fixed_temperature_is_a_buffer():
    loss = make_loss(alpha=0.2, learn_alpha=False)
    assert "log_alpha" in dict(loss.named_buffers()) and "log_alpha" not in dict(loss.named_parameters())
    assert loss(make_batch(torch.float32))["alpha"].item() == pytest.approx(0.2)
    assert not loss.learns_alpha
    assert make_loss().learns_alpha


@pytest.mark.parametrize("weights", [False, True])
def test_no_host_read_forward_and_backward(device, weights):
    loss = make_loss(device)
    batch = make_batch(torch.float32, device, weights=weights, steps=True)
    with no_host_sync():
        out = loss(batch)
        (out["loss_qvalue"] + out["loss_actor"] + out["loss_alpha"]).backward()
        loss.update_targets_(0.005)


def test_a_stock_actor_and_one_critic():
    """TorchRL's distribution, and a critic that writes [B, 1]."""
    net = nn.Sequential(nn.Linear(OBS, 2 * ACT), _Split())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=TanhNormal,
        spec=Bounded(-1, 1, (ACT,)),
    )
    critic = ValueOperator(_Cat(nn.Linear(OBS + ACT, 1)), in_keys=["observation", "action"])
    out = DeviceSACLoss(actor, critic)(make_batch(torch.float32))
    assert all(value.isfinite() for value in out.values())


class _Split(nn.Module):
    def forward(self, x):
        loc, scale = x.chunk(2, -1)
        return loc, scale.exp()


def test_one_row():
    loss = make_loss()
    out = loss(make_batch(torch.float32)[:1])
    assert all(value.isfinite() for value in out.values())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_function": "l1"}, r"loss_function: expected one of \('l2', 'smooth_l1'\), received 'l1'"),
        ({"alpha": 0.0}, "alpha: expected a positive temperature, received 0.0"),
        ({"gamma": 1.1}, r"gamma: expected a discount factor in \[0, 1\], received 1.1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_loss(**options)


def test_parts_that_do_not_fit():
    with pytest.raises(ValueError, match=r"actor: expected a module with get_dist.*received Linear"):
        DeviceSACLoss(nn.Linear(2, 2), make_critic())
    critic = TensorDictModule(nn.Linear(OBS, 1), ["observation"], ["state_action_value"])
    with pytest.raises(ValueError, match=r"critic: expected 'action', the actor's action, among its in_keys"):
        DeviceSACLoss(make_actor(), critic)
    actor = make_actor(spec=Composite(action=Unbounded((ACT,))))
    actor.spec["action"] = None
    with pytest.raises(ValueError, match="entropy: expected a number where the actor has no spec"):
        DeviceSACLoss(actor, make_critic())


def test_compiled_parts_equal_eager(fresh_dynamo):
    loss, batch = make_loss(), make_batch(torch.float32, weights=True, steps=True)
    _, _, action, log_prob = loss.sample(batch)
    expected = [*loss.critic_losses(batch, action, log_prob), *loss.actor_losses(batch, action, log_prob)]
    got = [
        *compiled(loss.critic_losses, backend="aot_eager")(batch, action, log_prob),
        *compiled(loss.actor_losses, backend="aot_eager")(batch, action, log_prob),
    ]
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two)
    torch.manual_seed(0)
    expected = loss.sample(batch)
    torch.manual_seed(0)
    for one, two in zip(compiled(loss.sample, backend="aot_eager")(batch), expected, strict=True):
        torch.testing.assert_close(one, two)


def test_the_sum_of_losses_compiles_and_the_actor_loss_does_not_reach_the_critics(fresh_dynamo):
    loss, batch = make_loss(), make_batch(torch.float32)
    gradients = []
    for fn in (loss, compiled(lambda td: dict(loss(td).items()), backend="aot_eager")):
        torch.manual_seed(0)
        out = fn(batch.clone())
        loss.zero_grad()
        (out["loss_qvalue"] + out["loss_actor"] + out["loss_alpha"]).backward()
        gradients.append([p.grad for p in loss.parameters() if p.requires_grad])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)
    torch.manual_seed(0)
    _, _, action, log_prob = loss.sample(batch)
    critic = torch.autograd.grad(loss.critic_losses(batch, action, log_prob)[0], list(loss.critic.parameters()))
    for param, grad in zip(loss.critic.parameters(), critic, strict=True):
        torch.testing.assert_close(param.grad, grad)


@pytest.mark.parametrize("bounds", [{"max_alpha": 0.0}, {"min_alpha": -0.1}, {"min_alpha": 0.2, "max_alpha": 0.1}])
def test_bounds_of_the_temperature_that_hold_none(bounds):
    with pytest.raises(ValueError, match="expected 0 <= min_alpha <= max_alpha and max_alpha > 0"):
        make_loss(**bounds)


@pytest.mark.parametrize("missing", ["actor_network", "qvalue_network"])
def test_each_network_is_required(missing):
    networks = {"actor_network": make_actor(), "qvalue_network": make_critic(), missing: None}
    with pytest.raises(TypeError, match=rf"DeviceSACLoss: expected \['{missing}'\], received None"):
        DeviceSACLoss(**networks)
