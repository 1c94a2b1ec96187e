"""ACIQNLoss: a loop, where gradients go, a continuous bandit with a known optimum, no waits, faults."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded

from torchrl_perf.functional import quantile_huber_loss
from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.modules import DeterministicActor, ImplicitQuantileCritic
from torchrl_perf.objectives import ACIQNLoss
from torchrl_perf.runtime import no_host_sync

ROWS, OBS, ACT, GAMMA = 10, 3, 2, 0.9


def make_loss(device="cpu", taus="midpoints", **options):
    net = nn.Sequential(nn.Linear(OBS, 8), nn.ReLU(), nn.Linear(8, ACT)).to(device)
    actor = DeterministicActor(net, spec=Bounded(-2.0, 2.0, (ACT,), device=device), squash="atan")
    critic = ImplicitQuantileCritic(OBS, ACT, hidden_size=16, taus=taus, device=device)
    loss = ACIQNLoss(actor, critic, gamma=GAMMA, **options)
    with torch.no_grad():  # targets that differ
        for param in [*loss.target_actor.parameters(), *loss.target_critic.parameters()]:
            param.add_(torch.randn_like(param) * 0.2)
    return loss


def make_batch(*shape, device="cpu"):
    td = TensorDict(
        {
            "observation": torch.randn(*shape, OBS),
            "action": torch.rand(*shape, ACT) * 4 - 2,
            "next": {
                "observation": torch.randn(*shape, OBS),
                "reward": torch.randn(*shape, 1),
                "terminated": torch.rand(*shape, 1) < 0.3,
            },
        },
        shape,
    )
    return td.to(device)


def test_rows_are_a_loop_with_the_target_actor():
    loss = make_loss(num_taus=(4, 6), kappa=0.7)
    td = make_batch(ROWS)
    rows = []
    for row in range(ROWS):
        one = td[row]
        quantiles, taus = loss.critic.sample(one["observation"], one["action"], num_taus=4)
        action = loss.target_actor.action(one["next", "observation"])
        following, _ = loss.target_critic.sample(one["next", "observation"], action, num_taus=6)
        target = one["next", "reward"] + GAMMA * (1 - one["next", "terminated"].float()) * following
        rows.append(quantile_huber_loss(quantiles[None], target[None], taus, 0.7)[0])
    expected = torch.stack(rows)
    torch.testing.assert_close(loss(td)["loss_qvalue"], expected.mean())
    td["priority_weight"] = torch.rand(ROWS)
    weighted = (expected * td["priority_weight"]).sum() / td["priority_weight"].sum()
    torch.testing.assert_close(loss(td.reshape(2, 5))["loss_qvalue"], weighted)


def test_the_actor_raises_the_mean_of_quantiles():
    loss, td = make_loss(num_actor_taus=16), make_batch(ROWS)
    action = loss.actor.action(td["observation"])
    quantiles, _ = loss.critic.sample(td["observation"], action, num_taus=16)
    torch.testing.assert_close(loss.actor_losses(td), -quantiles.mean())
    torch.testing.assert_close(loss.actor_losses(td, detached=True), -quantiles.mean())


def test_gradients_go_where_they_belong():
    loss, td = make_loss(), make_batch(ROWS)
    out = loss(td)
    critic, actor = list(loss.critic.parameters()), list(loss.actor.parameters())
    assert all(g is None for g in torch.autograd.grad(out["loss_actor"], critic, retain_graph=True, allow_unused=True))
    assert all(g is None for g in torch.autograd.grad(out["loss_qvalue"], actor, retain_graph=True, allow_unused=True))
    (out["loss_actor"] + out["loss_qvalue"]).backward()
    assert all((param.grad != 0).any() for param in [*critic, *actor])
    assert all(p.grad is None for p in [*loss.target_critic.parameters(), *loss.target_actor.parameters()])


@pytest.mark.parametrize("dropped", [1, 3])
def test_the_largest_quantiles_are_left_out_of_targets(dropped):
    loss, td = make_loss(num_taus=(4, 6), dropped_target_taus=dropped), make_batch(ROWS)
    action = loss.target_actor.action(td["next", "observation"])
    following, _ = loss.target_critic.sample(td["next", "observation"], action, num_taus=6 + dropped)
    assert (following.amax(-1) > following.amin(-1)).any()
    least = torch.stack([torch.tensor(sorted(row.tolist())[:6]) for row in following])
    expected = td["next", "reward"] + GAMMA * (1 - td["next", "terminated"].float()) * least
    torch.testing.assert_close(loss.targets(td), expected)


@pytest.mark.parametrize("dropped", [0, 2])
def test_terminal_states_are_not_looked_at(dropped):
    loss, td = make_loss(dropped_target_taus=dropped), make_batch(ROWS)
    td["next", "terminated"].fill_(True)
    expected = loss(td)["loss_qvalue"]
    td["next", "observation"].fill_(torch.nan)
    torch.testing.assert_close(loss(td)["loss_qvalue"], expected)


def test_solves_a_continuous_bandit():
    # reward -4 (a - .3)^2 plus noise, one step: the best action is .3
    torch.manual_seed(0)
    actor = DeterministicActor(nn.Linear(1, 1), spec=Bounded(-1.0, 1.0, (1,)), squash="atan")
    critic = ImplicitQuantileCritic(1, 1, hidden_size=32, num_cosines=16, activation="tanh")
    loss = ACIQNLoss(actor, critic)
    optimizers = [torch.optim.Adam(module.parameters(), rate) for module, rate in ((critic, 5e-3), (actor, 5e-3))]
    ones, stop = torch.ones(64, 1), torch.ones(64, 1, dtype=torch.bool)
    for _ in range(400):
        action = torch.rand(64, 1) * 2 - 1
        reward = -4 * (action - 0.3) ** 2 + 0.1 * torch.randn(64, 1)
        following = {"observation": ones, "reward": reward, "terminated": stop}
        out = loss(TensorDict({"observation": ones, "action": action, "next": following}, [64]))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (out["loss_qvalue"] + out["loss_actor"]).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert actor.action(torch.ones(1)).item() == pytest.approx(0.3, abs=0.1)


@pytest.mark.slow_compiled
def test_parts_compiled_as_one_update(variant, device):
    loss, td = make_loss(device=device), make_batch(ROWS, device=device)
    critic = Differentiable(loss, lambda td: ((loss.critic_losses(td)[0],), ()), list(loss.critic.parameters()))
    actor = Differentiable(loss, lambda td: ((loss.actor_losses(td),), ()), list(loss.actor.parameters()))

    def update(td):
        with torch.no_grad():
            (value,), _, back = critic.pullback(td)
            to_critic, _ = back([torch.ones_like(value)])
            (policy,), _, back = actor.pullback(td)
            to_actor, _ = back([torch.ones_like(policy)])
            return value, policy, *to_critic, *to_actor

    with no_host_sync():
        expected = update(td)
    run = variant(update)
    for _ in range(4):  # the last one is a replay
        got = run(td)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_random_levels_without_waits():
    loss, td = make_loss(taus="random"), make_batch(ROWS)
    with no_host_sync():
        first, second = loss(td), loss(td)
    assert first["loss_qvalue"].item() != second["loss_qvalue"].item()
    assert td["td_error"].shape == (ROWS,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kappa": -1.0}, "kappa: expected"),
        ({"num_taus": (8, 0)}, "num_taus: expected"),
        ({"num_actor_taus": 0}, "num_taus: expected"),
        ({"dropped_target_taus": -1}, "dropped_target_taus: expected"),
        ({"dropped_target_taus": 0.5}, "dropped_target_taus: expected"),
        ({"gamma": 1.5}, "gamma: expected"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        ACIQNLoss(**{"actor": make_loss().actor, "critic": make_loss().critic, **options})


def test_a_critic_without_quantiles():
    with pytest.raises(ValueError, match="critic: expected a network with sample"):
        ACIQNLoss(make_loss().actor, nn.Linear(5, 1))
