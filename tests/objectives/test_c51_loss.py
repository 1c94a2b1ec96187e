"""DeviceC51Loss: hand cases, TorchRL's loss where that works, masks, one atom, batches of any shape, no waits."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import DistributionalQValueActor
from torchrl.objectives import DistributionalDQNLoss, SoftUpdate

from torchrl_perf.modules import CategoricalMLP
from torchrl_perf.objectives import DeviceC51Loss
from torchrl_perf.runtime import no_host_sync

OBS, ACTIONS, ATOMS, GAMMA = 3, 4, 11, 0.9


def make_batch(*shape, device="cpu", one_hot=False, actions=ACTIONS):
    action = torch.randint(0, actions, shape)
    td = TensorDict(
        {
            "observation": torch.randn(*shape, OBS),
            "action": nn.functional.one_hot(action, actions) if one_hot else action,
            "next": {
                "observation": torch.randn(*shape, OBS),
                "reward": torch.randn(*shape, 1),
                "terminated": torch.rand(*shape, 1) < 0.3,
            },
        },
        shape,
    )
    return td.to(device)


def make_network(**options):
    return CategoricalMLP(OBS, ACTIONS, num_atoms=ATOMS, v_min=-3.0, v_max=3.0, **options)


def make_loss(network=None, **options):
    loss = DeviceC51Loss(make_network() if network is None else network, gamma=GAMMA, **options)
    with torch.no_grad():  # a target that differs
        for param in loss.target_network.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    return loss


class Logits(nn.Module):
    """Logits that are the observation: ``[*, D * M]`` seen as ``[*, D, M]``."""

    def __init__(self, actions, support):
        super().__init__()
        self.actions = actions
        self.register_buffer("support", torch.tensor(support))

    def logits(self, x):
        return x.unflatten(-1, (self.actions, -1))


@pytest.mark.parametrize(
    ("reward", "terminated", "expected"),
    [(0.25, False, 1.24591), (0.0, False, 1.34591), (100.0, True, 0.94591), (-0.5, True, 1.19591)],
)
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3)])
@pytest.mark.parametrize("double", [False, True])
def test_hand_cases(reward, terminated, expected, shape, double):
    loss = DeviceC51Loss(Logits(1, [-1.0, 0.0, 1.0]), gamma=0.99, double=double)
    td = TensorDict(
        {
            "observation": torch.tensor([0.2, -0.1, 0.3]).expand(*shape, 3),
            "action": torch.zeros(shape, dtype=torch.int64),
            "next": {
                "observation": torch.tensor([-1e4, 0.0, -1e4]).expand(*shape, 3),
                "reward": torch.full((*shape, 1), reward),
                "terminated": torch.full((*shape, 1), terminated),
            },
        },
        shape,
    )
    assert loss(td)["loss"].item() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(td["td_error"], torch.full(shape, expected), rtol=0, atol=1e-5)


class Transposed(nn.Module):
    """The log-probabilities of a network in TorchRL's layout ``[B, M, D]``."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network.log_probs(x).mT


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_values_and_gradients_are_torchrls(one_hot, weights):
    ours = make_loss()
    networks = {}
    for name in ("network", "target_network"):
        networks[name] = copy.deepcopy(getattr(ours, name)).requires_grad_(True)
    actor = DistributionalQValueActor(
        TensorDictSequential(TensorDictModule(Transposed(networks["network"]), ["observation"], ["action_value"])),
        support=ours.network.support,
        action_space="one_hot" if one_hot else "categorical",
    )
    theirs = DistributionalDQNLoss(actor, gamma=GAMMA, delay_value=True)
    SoftUpdate(theirs, eps=0.5)  # it warns without one
    for name, value in networks["target_network"].named_parameters():
        theirs.target_value_network_params[("module", "0", "module", "0", "module", "network", *name.split("."))].copy_(
            value.detach()
        )
    batch = make_batch(12, one_hot=one_hot)
    if weights:
        batch["priority_weight"] = torch.rand(12) + 0.1
    mine, reference = batch.clone(), batch.clone()
    reference["next", "done"] = reference["next", "terminated"]
    got, expected = ours(mine)["loss"], theirs(reference)["loss"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine["td_error"], reference["td_error"].squeeze(-1), rtol=1e-5, atol=1e-6)
    got.backward()
    expected.backward()
    grads = [value.grad for value in theirs.value_network_params.values(True, True) if value.grad is not None]
    for param in ours.network.parameters():
        assert any(param.grad.shape == g.shape and torch.allclose(param.grad, g, rtol=1e-4, atol=1e-6) for g in grads)


def loop_oracle(loss, td):
    """One row at a time, in float64."""
    network, target = loss.network, loss.target_network
    rows = []
    for row in range(len(td)):
        one = td[row]
        x, following = one["observation"], one["next", "observation"]
        probs = target.log_probs(following).exp()
        values = (network if loss.double_q else target)(following)
        if loss.mask_key is not None:
            mask = one["next", loss.mask_key]
            values = torch.tensor([v if m else -1e9 for v, m in zip(values.tolist(), mask.tolist(), strict=True)])
        best = int(values.argmax())
        support, target_probs = network.support.tolist(), [0.0] * ATOMS
        gap = support[1] - support[0]
        for p, z in zip(probs[best].tolist(), support, strict=True):
            bootstrap = 0.0 if one["next", "terminated"].item() else GAMMA ** one["steps_to_next_obs"].item() * z
            x_new = min(max(one["next", "reward"].item() + bootstrap, support[0]), support[-1])
            for i, atom in enumerate(support):
                target_probs[i] += p * max(0.0, 1 - abs(x_new - atom) / gap)
        log_probs = network.log_probs(x)[int(one["action"])].tolist()
        rows.append(-sum(p * q for p, q in zip(target_probs, log_probs, strict=True)))
    return torch.tensor(rows)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_a_loop(double, masked):
    loss = make_loss(make_network(dueling=True), double=double, mask_key="mask" if masked else None).double()
    td = make_batch(8).apply(lambda x: x.double() if x.is_floating_point() else x)
    td["steps_to_next_obs"] = torch.randint(1, 4, (8, 1))
    td["next", "mask"] = torch.rand(8, ACTIONS) < 0.5
    td["next", "mask"][:, 1] = True
    expected = loop_oracle(loss, td)
    rows = loss.rows(td)
    torch.testing.assert_close(rows.loss.float(), expected, rtol=1e-5, atol=1e-5)
    both = loss(td.unsqueeze(0).expand(2, 8).clone())  # [B, T]
    assert both["loss"].item() == pytest.approx(expected.mean().item(), abs=1e-5)


def test_a_masked_next_action_is_masked_in_the_target():
    # means 1, 5, 2 of distributions that are certain; only the first and the last action are allowed
    support = [0.0, 1.0, 2.0, 5.0]
    certain = torch.full((3, 4), -1e4)
    certain[0, 1] = certain[1, 3] = certain[2, 2] = 0.0
    loss = DeviceC51Loss(Logits(3, support), gamma=1.0, mask_key="mask")
    td = TensorDict(
        {
            "observation": torch.zeros(2, 12),
            "action": torch.zeros(2, dtype=torch.int64),
            "next": {
                "observation": certain.flatten().expand(2, 12),
                "reward": torch.zeros(2, 1),
                "terminated": torch.zeros(2, 1, dtype=torch.bool),
                "mask": torch.tensor([[True, False, True], [False, False, False]]),
            },
        },
        [2],
    )
    # a row that allows nothing acts as if action 0 were allowed
    assert loss.targets(td).tolist() == [[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]


def test_one_atom_has_nothing_to_learn():
    loss = DeviceC51Loss(CategoricalMLP(OBS, ACTIONS, num_atoms=1, v_min=1.0, v_max=1.0))
    out = loss(make_batch(5))
    out["loss"].backward()
    assert out["loss"].item() == 0.0 and out["pred_value"].item() == 1.0
    assert all((param.grad == 0).all() for param in loss.network.parameters())


def test_terminal_states_are_not_looked_at():
    loss, td = make_loss(), make_batch(6)
    td["next", "terminated"].fill_(True)
    expected = loss(td)["loss"]
    td["next", "observation"].fill_(torch.nan)
    torch.testing.assert_close(loss(td)["loss"], expected)


def test_gradients_reach_the_online_network_through_the_action_taken_only():
    loss, td = make_loss(), make_batch(6)
    td["action"].fill_(2)
    loss(td)["loss"].backward()
    bias = loss.network.head.layers[-1].bias.grad.view(ACTIONS, ATOMS)
    assert (bias[2] != 0).any() and (bias[[0, 1, 3]] == 0).all()
    assert all(param.grad is None for param in loss.target_network.parameters())


def test_the_targets_follow():
    loss = make_loss()
    before = [param.clone() for param in loss.target_network.parameters()]
    loss.update_targets_(0.25)
    for old, new, online in zip(before, loss.target_network.parameters(), loss.network.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25 * (online - old))
    loss.update_targets_(torch.tensor(1.0))
    assert all(map(torch.equal, loss.target_network.parameters(), loss.network.parameters()))


def test_learns_a_known_distribution():
    # one state, terminal steps, rewards -1 and 1 with probabilities 1/4 and 3/4
    loss = DeviceC51Loss(CategoricalMLP(OBS, 1, num_atoms=3, v_min=-1.0, v_max=1.0, hidden_size=8))
    td = make_batch(64, actions=1)
    td["observation"].zero_()
    td["next", "reward"] = torch.where(torch.arange(64) % 4 == 0, -1.0, 1.0).unsqueeze(-1)
    td["next", "terminated"].fill_(True)
    optimizer = torch.optim.Adam(loss.network.parameters(), 0.03)
    for _ in range(150):
        optimizer.zero_grad()
        loss(td)["loss"].backward()
        optimizer.step()
    probs = loss.network.log_probs(torch.zeros(OBS)).exp()[0]
    torch.testing.assert_close(probs, torch.tensor([0.25, 0.0, 0.75]), rtol=0, atol=0.02)


def test_compiled_and_without_waits(variant, device):
    loss = make_loss(make_network(dueling=True, device=device))
    td = make_batch(16, device=device)
    with no_host_sync():
        expected = loss.losses(td)
        expected[0].backward()
    run = variant(lambda td: loss.rows(td)[:2])
    for _ in range(4):  # the last one is a replay
        got = run(td)
    torch.testing.assert_close(got[0].mean(), expected[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-4)


def test_faults():
    with pytest.raises(ValueError, match=r"network: expected one with a support .* received Linear. Remedy"):
        DeviceC51Loss(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="gamma: expected a discount factor"):
        DeviceC51Loss(make_network(), gamma=1.1)
    with pytest.raises(ValueError, match=r"support: expected atoms from at most 1 to at least 10, .*\[-3, 3\]"):
        DeviceC51Loss(make_network(), gamma=0.9, reward_bounds=(1.0, 1.0))
    DeviceC51Loss(make_network(), gamma=0.9, reward_bounds=(1.0, 1.0), horizon=3)
    with pytest.raises(ValueError, match=r"action: expected indices \[5\] or one-hot \[5, 4\], received \[5, 3\]"):
        td = make_batch(5)
        td["action"] = torch.zeros(5, 3)
        make_loss()(td)
