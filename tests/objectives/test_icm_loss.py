"""ICM: loss by hand, kinds of actions, a guess that gets better, a reward that fades on repeats, variants."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded, Categorical, OneHot

from torchrl_perf.modules import ICM, ConvLayer, ConvNet
from torchrl_perf.objectives import ICMLoss
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import RewardComponents

OBS, D = 4, 3
SPECS = {"index": Categorical(D), "one-hot": OneHot(D), "continuous": Bounded(-1, 1, (D,))}


def make(kind="index", device="cpu", **options):
    return ICM(OBS, spec=SPECS[kind].to(device), hidden_size=16, num_features=8, **options)


def batch(*shape, kind="index", device="cpu"):
    spec = SPECS[kind].expand(*shape, *SPECS[kind].shape)
    following = {"observation": torch.randn(*shape, OBS)}
    td = TensorDict({"observation": torch.randn(*shape, OBS), "action": spec.rand(), "next": following}, shape)
    return td.to(device)


def by_hand(icm, td, beta):
    """Losses and rewards of one transition after the other."""
    inverse, error = [], []
    rows = zip(
        td.reshape(-1)["observation"], td.reshape(-1)["next", "observation"], td.reshape(-1)["action"], strict=True
    )
    for before, after, action in rows:
        phi, phi_next = icm.phi(before), icm.phi(after)
        taken = nn.functional.one_hot(action, D).float() if action.ndim == 0 else action.float()
        guess = icm.inverse_model(torch.cat([phi, phi_next]))
        if icm.discrete:
            inverse.append(-(guess.log_softmax(0) * taken).sum())
        else:
            inverse.append((guess - taken).square().sum() / 2)
        error.append((icm.forward_model(torch.cat([phi, taken])) - phi_next).square().sum() / 2)
    inverse, error = torch.stack(inverse), torch.stack(error)
    return (1 - beta) * inverse.mean(), beta * error.mean(), (icm.eta * error).view(*td.shape, 1).detach()


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
def test_losses_and_rewards_are_those_of_a_loop(kind, shape):
    icm, td = make(kind, eta=0.1), batch(*shape, kind=kind)
    inverse, forward, reward = by_hand(icm, td, 0.3)
    out = ICMLoss(icm, beta=0.3)(td)
    torch.testing.assert_close(out["loss_inverse"], inverse)
    torch.testing.assert_close(out["loss_forward"], forward)
    torch.testing.assert_close(out["intrinsic_reward"], reward.mean())
    assert ("inverse_accuracy" in out.keys()) == icm.discrete
    got = icm(td)["next", "intrinsic_reward"]
    assert not got.requires_grad
    torch.testing.assert_close(got, reward)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_beta_chooses_between_the_two_models(beta):
    icm = make()
    out = ICMLoss(icm, beta=beta)(batch(6))
    (out["loss_inverse"] + out["loss_forward"]).backward()
    learns = {
        name: any((p.grad != 0).any() for p in getattr(icm, name).parameters() if p.grad is not None)
        for name in ("phi", "inverse_model", "forward_model")
    }
    assert learns == {"phi": True, "inverse_model": beta == 0.0, "forward_model": beta == 1.0}


def transitions(n):
    """An action moves the first three numbers by one of three vectors; the fourth is noise that nobody controls."""
    moves = torch.eye(3)
    action, x = torch.randint(0, 3, (n,)), torch.randn(n, 3)
    before = torch.cat([x, torch.randn(n, 1)], -1)
    after = torch.cat([x + moves[action], torch.randn(n, 1)], -1)
    return TensorDict({"observation": before, "action": action, "next": {"observation": after}}, [n])


def test_the_guess_gets_better_and_repeats_bore():
    icm = ICM(OBS, spec=Categorical(3), hidden_size=32, num_features=8, eta=1.0)
    loss = ICMLoss(icm)
    adam = torch.optim.Adam(loss.parameters(), 3e-3)
    familiar, held_out = transitions(128), transitions(512)
    start = loss(held_out)
    for _ in range(300):
        out = loss(transitions(128))
        adam.zero_grad()
        (out["loss_inverse"] + out["loss_forward"]).backward()
        adam.step()
    end = loss(held_out)
    assert float(start["inverse_accuracy"]) < 0.6
    assert float(end["inverse_accuracy"]) > 0.95
    first = float(icm(familiar)["next", "intrinsic_reward"].mean())
    for _ in range(100):
        out = loss(familiar)
        adam.zero_grad()
        (out["loss_inverse"] + out["loss_forward"]).backward()
        adam.step()
    assert float(icm(familiar)["next", "intrinsic_reward"].mean()) < 0.6 * first
    # what was never seen surprises more than what was seen again and again
    far = transitions(128)
    far["observation"] += 6.0
    far["next", "observation"] -= 6.0
    assert float(icm(far)["next", "intrinsic_reward"].mean()) > 5 * float(
        icm(familiar)["next", "intrinsic_reward"].mean()
    )


def test_as_a_column_of_the_reward():
    td = batch(3, 5)
    td["next", "reward_components"] = torch.ones(3, 5, 1)
    icm = make()
    components = RewardComponents(
        ("task", "curiosity"),
        {"task": 1.0, "curiosity": 2.0},
        in_keys=("reward_components", "intrinsic_reward"),
        components_key="columns",
    )
    out = components(icm(td))
    torch.testing.assert_close(out["next", "reward"], 1 + 2 * out["next", "intrinsic_reward"])


def test_images_by_a_trunk():
    trunk = ConvNet((1, 5, 5), layers=(ConvLayer(2, 3),), out_features=6)
    icm = ICM(6, spec=Categorical(D), trunk=trunk, in_keys=("pixels",), num_features=4)
    pixels = {"pixels": torch.zeros(2, 1, 5, 5, dtype=torch.uint8)}
    td = TensorDict({**pixels, "action": torch.tensor([0, 2]), "next": dict(pixels)}, [2])
    assert icm(td)["next", "intrinsic_reward"].shape == (2, 1)


def test_eta_is_a_buffer():
    icm, td = make(eta=0.5), batch(4)
    first = icm(td.copy())["next", "intrinsic_reward"]
    icm.eta.mul_(2)
    torch.testing.assert_close(icm(td)["next", "intrinsic_reward"], 2 * first)
    assert float(icm.state_dict()["eta"]) == 1.0


@pytest.mark.parametrize("kind", SPECS)
def test_no_host_wait(kind, device):
    icm, td = make(kind, device), batch(4, kind=kind, device=device)
    with no_host_sync(device):
        out = ICMLoss(icm)(td)
        (out["loss_inverse"] + out["loss_forward"]).backward()
        icm(td)


def test_compiled_equals_eager(variant):
    icm = make(device=variant.device)
    loss, td = ICMLoss(icm), batch(8, device=variant.device)

    def step(td):
        with torch.no_grad():
            return torch.stack(loss.losses(td))

    run = variant(step)
    for _ in range(4):  # the last one is a replay
        got = run(td)
    torch.testing.assert_close(got, step(td), rtol=1e-4, atol=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"beta: expected a weight in \[0, 1\], received 2"):
        ICMLoss(make(), beta=2)
    with pytest.raises(ValueError, match="expected sizes of at least 1 and eta of at least 0"):
        make(eta=-1)
    with pytest.raises(TypeError, match="options: expected reward_key, trunk or device"):
        make(beta=1)
    with pytest.raises(KeyError, match="expected 'observation' at the root and under 'next'"):
        make()(TensorDict({"observation": torch.zeros(2, OBS), "action": torch.zeros(2).long(), "next": {}}, [2]))


@pytest.mark.parametrize("kind", SPECS)
def test_a_step_without_its_final_observation_is_no_transition(kind):
    """Loss, gradient and reward are those of the other rows alone; a NaN elsewhere is a fault, and stays."""
    icm, td = make(kind, eta=0.1), batch(6, kind=kind)
    loss = ICMLoss(icm, beta=0.3)
    td["next", "done"] = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
    kept = td[1:].clone()
    td["next", "observation"][0] = torch.nan
    grads = []
    for rows in (kept, td):
        icm.zero_grad()
        out = loss(rows)
        (out["loss_inverse"] + out["loss_forward"]).backward()
        grads.append([out[key].detach() for key in out.keys()] + [param.grad.clone() for param in icm.parameters()])
    torch.testing.assert_close(*grads)
    reward = icm(td.clone())["next", "intrinsic_reward"]
    assert reward[0] == 0
    torch.testing.assert_close(reward[1:], icm(kept)["next", "intrinsic_reward"])
    td["next", "observation"][1] = torch.nan
    assert loss(td)["loss_forward"].isnan()


def test_keyword_calls():
    icm, td = make(), batch(5)
    loss = ICMLoss(icm)
    got = loss(td["observation"], td["action"], td["next", "observation"])
    torch.testing.assert_close(
        dict(zip(loss.out_keys, got, strict=True)), {key: loss(td)[key] for key in loss.out_keys}
    )
