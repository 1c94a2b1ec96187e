"""QuantileDQNLoss: a loop, IQN at fixed levels is QR-DQN, masks, both greedy rules, learning, no waits."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_perf.functional import Risk
from torchrl_perf.functional.losses.distributional import midpoints
from torchrl_perf.modules import ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.objectives import QuantileDQNLoss
from torchrl_perf.runtime import no_host_sync

OBS, ACTIONS, GAMMA = 3, 4, 0.9


def make_batch(*shape, device="cpu"):
    td = TensorDict(
        {
            "observation": torch.randn(*shape, OBS),
            "action": torch.randint(0, ACTIONS, shape),
            "next": {
                "observation": torch.randn(*shape, OBS),
                "reward": torch.randn(*shape, 1),
                "terminated": torch.rand(*shape, 1) < 0.3,
            },
        },
        shape,
    )
    return td.to(device)


def make_loss(network, **options):
    loss = QuantileDQNLoss(network, gamma=GAMMA, **options)
    with torch.no_grad():  # a target that differs
        for param in loss.target_network.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    return loss


class Table(nn.Module):
    """Quantiles that are the observation: ``[*, D * K]`` seen as ``[*, D, K]``."""

    def __init__(self, actions, count):
        super().__init__()
        self.actions, self.taus = actions, midpoints(count)

    def sample(self, x, num_taus):
        return x.unflatten(-1, (self.actions, -1)), self.taus

    def means(self, x):
        return self.sample(x, None)[0].mean(-1)


def table_batch(following, mask=None, reward=1.0):
    rows = len(following)
    td = TensorDict(
        {
            "observation": torch.zeros(rows, following[0].numel()),
            "action": torch.zeros(rows, dtype=torch.int64),
            "next": {
                "observation": following.flatten(1),
                "reward": torch.full((rows, 1), reward),
                "terminated": torch.zeros(rows, 1, dtype=torch.bool),
            },
        },
        [rows],
    )
    if mask is not None:
        td["next", "mask"] = mask
    return td


FOLLOWING = torch.tensor([[[0.0, 9.0], [4.0, 6.0], [5.0, 4.0]]])  # means 4.5, 5, 4.5


@pytest.mark.parametrize(("greedy", "expected"), [("mean", [4.0, 6.0]), ("per_quantile", [5.0, 9.0])])
def test_both_greedy_rules(greedy, expected):
    loss = QuantileDQNLoss(Table(3, 2), gamma=0.5, greedy=greedy)
    assert loss.targets(table_batch(FOLLOWING))[0].tolist() == [1 + 0.5 * x for x in expected]


@pytest.mark.parametrize(("greedy", "expected"), [("mean", [0.0, 9.0]), ("per_quantile", [5.0, 9.0])])
def test_masked_next_actions(greedy, expected):
    loss = QuantileDQNLoss(Table(3, 2), gamma=0.5, greedy=greedy, mask_key="mask")
    mask = torch.tensor([[True, False, True], [False, False, False]])
    targets = loss.targets(table_batch(FOLLOWING.expand(2, 3, 2), mask))
    assert targets[0].tolist() == [1 + 0.5 * x for x in expected]
    # a row that allows nothing acts as if action 0 were allowed
    assert targets[1].tolist() == [1.0, 5.5]


def loop_oracle(loss, td, kappa):
    """One row and one pair of quantiles at a time, at fixed levels."""
    rows = []
    for row in range(len(td)):
        one = td[row]
        quantiles, taus = loss.network.sample(one["observation"], num_taus=loss.num_taus[0])
        following, _ = loss.target_network.sample(one["next", "observation"], num_taus=loss.num_taus[1])
        means = following.mean(-1)
        if loss.double_q:
            means = loss.network.sample(one["next", "observation"], num_taus=32)[0].mean(-1)
        total = 0.0
        discount = 0.0 if one["next", "terminated"].item() else GAMMA ** one["steps_to_next_obs"].item()
        for q, tau in zip(quantiles[int(one["action"])].tolist(), taus.tolist(), strict=True):
            for z in following[int(means.argmax())].tolist():
                d = one["next", "reward"].item() + discount * z - q
                huber = d * d / 2 if abs(d) <= kappa else kappa * (abs(d) - kappa / 2)
                total += abs(tau - (d < 0)) * huber / kappa / following.shape[-1]
        rows.append(total)
    return torch.tensor(rows)


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kappa", [0.5, 1.0])
def test_rows_are_a_loop(implicit, double, kappa):
    network = ImplicitQuantileMLP(OBS, ACTIONS, taus="midpoints") if implicit else QuantileMLP(OBS, ACTIONS)
    loss = make_loss(network, double=double, kappa=kappa, num_taus=(4, 6))
    td = make_batch(8)
    td["steps_to_next_obs"] = torch.randint(1, 4, (8, 1))
    td["priority_weight"] = torch.rand(8)
    expected = loop_oracle(loss, td, kappa)
    torch.testing.assert_close(loss.rows(td).loss, expected, rtol=1e-4, atol=1e-5)
    weighted = (expected * td["priority_weight"]).sum() / td["priority_weight"].sum()
    torch.testing.assert_close(loss(td)["loss"], weighted, rtol=1e-4, atol=1e-5)
    rows = loss(td.reshape(2, 4).contiguous())  # [B, T]
    torch.testing.assert_close(rows["loss"], weighted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss(td[:1])["loss"], expected[0], rtol=1e-4, atol=1e-5)


class FromTable(nn.Module):
    """A network of fixed levels that asks an implicit one for them."""

    def __init__(self, network, count):
        super().__init__()
        self.network, self.taus = network, midpoints(count)

    def sample(self, x, num_taus):
        return self.network.quantiles(x, taus=self.taus), self.taus

    def means(self, x):
        return self.sample(x, None)[0].mean(-1)


def test_iqn_at_fixed_levels_is_qr_dqn():
    network = ImplicitQuantileMLP(OBS, ACTIONS, taus="midpoints", num_action_taus=8)
    iqn, qr = QuantileDQNLoss(network, num_taus=(8, 8)), QuantileDQNLoss(FromTable(network, 8))
    td = make_batch(10)
    one, two = iqn(td), qr(td)
    torch.testing.assert_close(one["loss"], two["loss"], rtol=1e-6, atol=1e-6)
    params = list(network.parameters())
    grads = (torch.autograd.grad(out["loss"], params, retain_graph=True) for out in (one, two))
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_the_target_is_risk_neutral():
    network = QuantileMLP(OBS, ACTIONS, risk=Risk("cvar", 0.1))
    loss, td = make_loss(network, double=True), make_batch(6)
    expected = loss.targets(td)
    network.risk = None
    torch.testing.assert_close(loss.targets(td), expected)


def test_priority_is_the_difference_of_means():
    loss, td = make_loss(QuantileMLP(OBS, ACTIONS)), make_batch(6)
    loss(td)
    taken = loss.network.means(td["observation"]).gather(-1, td["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(td["td_error"], (loss.targets(td).mean(-1) - taken).abs())


def test_terminal_states_are_not_looked_at():
    for greedy in ("mean", "per_quantile"):
        loss, td = make_loss(QuantileMLP(OBS, ACTIONS), greedy=greedy), make_batch(6)
        td["next", "terminated"].fill_(True)
        expected = loss(td)["loss"]
        td["next", "observation"].fill_(torch.nan)
        torch.testing.assert_close(loss(td)["loss"], expected)


@pytest.mark.parametrize("implicit", [False, True])
def test_learns_the_quantiles_of_a_known_distribution(implicit):
    # one state, terminal steps, rewards uniform in [0, 1]: the quantile of level tau is tau at kappa 0
    torch.manual_seed(1)
    network = ImplicitQuantileMLP(OBS, 1, hidden_size=16) if implicit else QuantileMLP(OBS, 1, num_quantiles=8)
    loss = QuantileDQNLoss(network, kappa=0.0, num_taus=(8, 1))
    td = make_batch(128)
    td["action"].zero_()
    td["observation"].fill_(1.0)
    td["next", "reward"] = midpoints(128).unsqueeze(-1)
    td["next", "terminated"].fill_(True)
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 300)
    for _ in range(300):
        optimizer.zero_grad()
        loss(td)["loss"].backward()
        optimizer.step()
        rate.step()
    x, taus = torch.ones(OBS), torch.tensor([0.125, 0.375, 0.625, 0.875])
    got = network.quantiles(x, taus=taus)[0] if implicit else network.quantiles(x)[0].view(4, 2).mean(-1)
    torch.testing.assert_close(got, taus, rtol=0, atol=0.06)


@pytest.mark.parametrize("network_class", [QuantileMLP, ImplicitQuantileMLP])
@pytest.mark.slow_compiled
def test_compiled_and_without_waits(network_class, variant, device):
    options = {"taus": "midpoints"} if network_class is ImplicitQuantileMLP else {}
    loss = make_loss(network_class(OBS, ACTIONS, dueling=True, device=device, **options), double=True)
    td = make_batch(16, device=device)
    with no_host_sync():
        expected = loss.losses(td)
        expected[0].backward()
    run = variant(lambda td: loss.rows(td)[:2])
    for _ in range(4):  # the last one is a replay
        got = run(td)
    torch.testing.assert_close(got[0].mean(), expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-3)


def test_random_levels_without_waits():
    loss, td = QuantileDQNLoss(ImplicitQuantileMLP(OBS, ACTIONS), double=True), make_batch(6)
    with no_host_sync():
        first, second = loss(td)["loss"], loss(td)["loss"]
        first.backward()
    assert first.item() != second.item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kappa": -0.1}, "kappa: expected a finite number"),
        ({"num_taus": (0, 8)}, "num_taus: expected at least one quantile"),
        ({"greedy": "max"}, "greedy: expected 'mean' or 'per_quantile'"),
        ({"greedy": "per_quantile", "double": True}, "double: expected False"),
        ({"gamma": -0.1}, "gamma: expected"),
        ({"network": nn.Linear(2, 2)}, "network: expected one with sample"),
    ],
)
def test_faults(options, message):
    with pytest.raises(ValueError, match=message):
        QuantileDQNLoss(**{"network": QuantileMLP(OBS, ACTIONS), **options})
