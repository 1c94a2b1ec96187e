"""DeviceTD3Loss against TorchRL's TD3Loss and DDPGLoss, smoothing within bounds, where gradients go, faults."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate, TD3Loss, ValueEstimators

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.modules import DeterministicActor, EnsembleQ
from torchrl_perf.objectives import DeviceTD3Loss
from torchrl_perf.runtime import no_host_sync

ROWS, OBS, ACT, HIDDEN, GAMMA = 12, 3, 2, 8, 0.97


def make_actor(device="cpu", high=1.0, **options):
    net = nn.Sequential(nn.Linear(OBS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, ACT)).to(device)
    return DeterministicActor(net, spec=Bounded(-high, high, (ACT,), device=device), **options)


def make_critic(members=2, device="cpu"):
    net = EnsembleQ(members, OBS + ACT, hidden_sizes=(HIDDEN,), device=device)
    return TensorDictModule(net, ["observation", "action"], ["state_action_value"])


def make_loss(members=2, device="cpu", **options):
    loss = DeviceTD3Loss(make_actor(device), make_critic(members, device), gamma=GAMMA, **options)
    with torch.no_grad():  # targets that differ
        for param in [*loss.target_actor.parameters(), *loss.target_critic.parameters()]:
            param.add_(torch.randn_like(param) * 0.2)
    return loss


def make_batch(*shape, device="cpu"):
    td = TensorDict(
        {
            "observation": torch.randn(*shape, OBS),
            "action": torch.rand(*shape, ACT) * 2 - 1,
            "next": {
                "observation": torch.randn(*shape, OBS),
                "reward": torch.randn(*shape, 1),
                "terminated": torch.rand(*shape, 1) < 0.3,
            },
        },
        shape,
    )
    td["next", "done"] = td["next", "terminated"].clone()
    return td.to(device)


class Separate(nn.Module):
    """One member of an ensemble, on the concatenation of its inputs."""

    def __init__(self, ensemble, k):
        super().__init__()
        layers = []
        for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[2])
            layer.weight.data, layer.bias.data = weight[k].detach().T.clone(), bias[k, 0].detach().clone()
            layers += [layer, nn.ReLU()]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, *inputs):
        return self.net(torch.cat(inputs, -1))


def operators(critic):
    ensemble = critic.module.net
    return [
        ValueOperator(Separate(ensemble, k), in_keys=["observation", "action"]) for k in range(ensemble.num_members)
    ]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("loss_function", ["l2", "smooth_l1"])
def test_td3_is_torchrls(weights, loss_function):
    actor, critic = make_actor(), make_critic()
    ours = DeviceTD3Loss(actor, critic, gamma=GAMMA, loss_function=loss_function, target_noise=0.3, noise_clip=0.4)
    theirs = TD3Loss(
        actor,
        operators(critic),
        bounds=(-1.0, 1.0),
        policy_noise=0.3,
        noise_clip=0.4,
        loss_function=loss_function,
        delay_actor=True,
        delay_qvalue=True,
    )
    theirs.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    SoftUpdate(theirs, eps=0.5)  # it warns without one
    mine, reference = make_batch(ROWS), None
    if weights:
        mine["priority_weight"] = torch.rand(ROWS) + 0.1
    reference = mine.clone()
    torch.manual_seed(7)
    noise = torch.normal(torch.zeros(ROWS, ACT), torch.full((ROWS, ACT), 1.0))
    torch.manual_seed(7)
    expected = theirs(reference)
    loss_qvalue, priority, _ = ours.critic_losses(mine, noise)
    torch.testing.assert_close(loss_qvalue, expected["loss_qvalue"].sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.actor_losses(mine), expected["loss_actor"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(priority.square(), reference["td_error"].view(ROWS), rtol=1e-5, atol=1e-6)


def test_ddpg_is_torchrls():
    actor, critic = make_actor(), make_critic(1)
    ours = DeviceTD3Loss(actor, critic, num_qvalue_nets=1, gamma=GAMMA, target_noise=0.0, loss_function="l2")
    theirs = DDPGLoss(actor, operators(critic)[0], loss_function="l2", delay_actor=True, delay_value=True)
    theirs.make_value_estimator(ValueEstimators.TD0, gamma=GAMMA)
    SoftUpdate(theirs, eps=0.5)
    mine = make_batch(ROWS)
    reference = mine.clone()
    got, expected = ours(mine), theirs(reference)
    torch.testing.assert_close(got["loss_qvalue"], expected["loss_value"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["loss_actor"], expected["loss_actor"], rtol=1e-5, atol=1e-6)


def test_the_target_noise_is_clipped_scaled_and_within_the_bounds():
    loss = DeviceTD3Loss(make_actor(high=4.0), make_critic(), target_noise=0.2, noise_clip=0.5)
    td = make_batch(3)
    with torch.no_grad():
        plain = loss.act(loss.target_actor, td, following=True)
    for number, share in ((1.0, 0.2), (100.0, 0.5), (-100.0, -0.5), (0.0, 0.0)):
        got = loss.next_action(td, torch.full((3, ACT), number))
        torch.testing.assert_close(got, (plain + share * 4).clamp(-4, 4))


def test_batches_of_any_shape_and_n_steps():
    loss = make_loss(target_noise=0.0)
    td = make_batch(2, 3)
    td["steps_to_next_obs"] = torch.randint(1, 4, (2, 3, 1))
    both, flat = loss(td), loss(td.reshape(6))
    for key in ("loss_qvalue", "loss_actor", "pred_value"):
        torch.testing.assert_close(both[key], flat[key])
    assert td["td_error"].shape == (2, 3)
    td["steps_to_next_obs"].fill_(1)
    one = loss(td)["loss_qvalue"]
    torch.testing.assert_close(loss(td.exclude("steps_to_next_obs"))["loss_qvalue"], one)


def test_gradients_go_where_they_belong():
    loss, td = make_loss(), make_batch(ROWS)
    out = loss(td)
    critic, actor = list(loss.critic.parameters()), list(loss.actor.parameters())
    assert all(g is None for g in torch.autograd.grad(out["loss_actor"], critic, retain_graph=True, allow_unused=True))
    assert all(g is None for g in torch.autograd.grad(out["loss_qvalue"], actor, retain_graph=True, allow_unused=True))
    (out["loss_actor"] + out["loss_qvalue"]).backward()
    assert all((param.grad != 0).any() for param in [*critic, *actor])
    assert all(p.grad is None for p in [*loss.target_critic.parameters(), *loss.target_actor.parameters()])


def test_terminal_states_are_not_looked_at():
    loss, td = make_loss(), make_batch(ROWS)
    td["next", "terminated"].fill_(True)
    expected = loss(td)["loss_qvalue"]
    td["next", "observation"].fill_(torch.nan)
    torch.testing.assert_close(loss(td)["loss_qvalue"], expected)


def test_the_targets_follow():
    loss = make_loss()
    loss.update_targets_(torch.tensor(1.0))
    for module, target in ((loss.actor, loss.target_actor), (loss.critic, loss.target_critic)):
        assert all(map(torch.equal, module.parameters(), target.parameters()))


@pytest.mark.slow_compiled
def test_parts_compiled_as_one_update(variant, device):
    loss, td = make_loss(device=device), make_batch(ROWS, device=device)
    noise = torch.randn(ROWS, ACT, device=device)
    critic = Differentiable(
        loss, lambda context: ((loss.critic_losses(*context)[0],), ()), list(loss.critic.parameters())
    )
    actor = Differentiable(loss, lambda td: ((loss.actor_losses(td),), ()), list(loss.actor.parameters()))

    def update(td, noise):
        with torch.no_grad():
            (value,), _, back = critic.pullback((td, noise))
            to_critic, _ = back([torch.ones_like(value)])
            (policy,), _, back = actor.pullback(td)
            to_actor, _ = back([torch.ones_like(policy)])
            return value, policy, *to_critic, *to_actor

    with no_host_sync():
        expected = update(td, noise)
    run = variant(update)
    for _ in range(4):  # the last one is a replay
        got = run(td, noise)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_function": "l1"}, "loss_function: expected one of"),
        ({"target_noise": -0.1}, "noise: expected at least 0"),
        ({"gamma": 2.0}, "gamma: expected"),
        ({"critic": TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_action_value"])}, "critic: expected"),
        ({"actor": TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])}, "actor: expected bounds low"),
    ],
)
def test_faults(options, message):
    with pytest.raises(ValueError, match=message):
        DeviceTD3Loss(**{"actor": make_actor(), "critic": make_critic(), **options})


class HalfBounded(nn.Module):
    """An actor that names its lower bound alone."""

    in_keys = out_keys = ("observation",)

    def __init__(self):
        super().__init__()
        self.net = make_actor()
        self.low, self.in_keys, self.out_keys = self.net.low, self.net.in_keys, self.net.out_keys

    def forward(self, *inputs):
        return self.net(*inputs)


def test_one_bound_of_an_actor_is_not_enough():
    with pytest.raises(ValueError, match=r"actor: expected bounds low \[D\] and high \[D\]"):
        DeviceTD3Loss(actor=HalfBounded(), critic=make_critic())
