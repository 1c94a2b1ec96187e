"""DeterministicActor: bounds, both squashing functions, rows, agents that do not exist, faults."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_perf.modules import DeterministicActor
from torchrl_perf.runtime import no_host_sync

LOW, HIGH = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 10.0])


def make_spec(*batch, device="cpu"):
    return Bounded(LOW.expand(*batch, 2), HIGH.expand(*batch, 2), device=device)


def make_actor(network=None, device="cpu", **options):
    network = nn.Identity() if network is None else network
    return DeterministicActor(network, spec=make_spec(5, device=device), **options)


@pytest.mark.parametrize(("squash", "half"), [("tanh", math.tanh(1.0)), ("atan", 0.5)], ids=["tanh", "atan"])
def test_hand_values(squash, half):
    actor = make_actor(squash=squash)
    td = actor(TensorDict({"observation": torch.tensor([[0.0, 0.0], [1.0, -1.0], [1e9, -1e9]])}, [3]))
    expected = torch.tensor([[0.0, 5.0], [2 * half, 5 - 5 * half], [2.0, 0.0]])
    torch.testing.assert_close(td["action"], expected)


@pytest.mark.parametrize("squash", ["tanh", "atan"])
def test_within_the_bounds_in_any_batch(squash):
    actor = make_actor(nn.Linear(3, 2), squash=squash)
    for shape in ((), (4,), (2, 3)):
        x = torch.randn(*shape, 3) * 100
        action = actor(TensorDict({"observation": x}, shape))["action"]
        assert action.shape == (*shape, 2)
        assert (action >= LOW).all() and (action <= HIGH).all()
        loop = [actor(TensorDict({"observation": row}, []))["action"] for row in x.reshape(-1, 3)]
        torch.testing.assert_close(action, torch.stack(loop).reshape(action.shape), rtol=1e-5, atol=1e-5)


def test_agents_that_do_not_exist_get_the_middle():
    actor = make_actor(valid_key="valid")
    x = torch.full((2, 3, 2), 1.0)
    x[0, 1] = math.nan
    valid = torch.ones(2, 3, dtype=torch.bool)
    valid[0, 1] = valid[1, 2] = False
    for flag in (valid, valid.unsqueeze(-1)):
        action = actor(TensorDict({"observation": x, "valid": flag}, [2, 3]))["action"]
        assert action[0, 1].tolist() == action[1, 2].tolist() == [0.0, 5.0]
        assert action[0, 0, 0] == pytest.approx(2 * math.tanh(1.0))


@pytest.mark.parametrize("trailing", [(), (1,)])
def test_a_flag_of_an_env_holds_for_all_its_agents(trailing):
    actor = make_actor(valid_key="valid")
    td = TensorDict({"observation": torch.ones(3, 3, 2), "valid": torch.tensor([True, False, True])}, [3])
    td["valid"] = td["valid"].view(3, *trailing)
    action = actor(td)["action"]
    assert (action[1] == torch.tensor([0.0, 5.0])).all()
    assert (action[::2, :, 0] - 2 * math.tanh(1.0)).abs().max() < 1e-6


def test_bounds_are_buffers():
    actor = make_actor(nn.Linear(3, 2))
    assert torch.equal(actor.state_dict()["low"], LOW) and torch.equal(actor.state_dict()["high"], HIGH)
    actor.step(100)


def test_compiled_and_without_waits(variant, device):
    actor = make_actor(nn.Linear(3, 2, device=device), device=device, squash="atan")
    x = torch.randn(6, 3, device=device)
    td = TensorDict({"observation": x}, [6], device=device)
    with no_host_sync(), torch.no_grad():
        expected = actor(td)["action"]
    with torch.no_grad():
        torch.testing.assert_close(variant(actor.action)(x), expected, rtol=1e-3, atol=1e-4)


def test_saturated_atan_still_learns():
    grads = []
    for squash in ("tanh", "atan"):
        x = torch.tensor([20.0, 20.0], requires_grad=True)
        (grad,) = torch.autograd.grad(make_actor(squash=squash).action(x)[0], x)
        grads.append(grad[0].item())
    assert grads[0] == 0.0
    assert grads[1] == pytest.approx(2 * 2 / math.pi / 401, rel=1e-4)


@pytest.mark.parametrize("spec", [Categorical(3), Unbounded((2,)), Bounded(0, 5, (2,), dtype=torch.int64)])
def test_a_spec_that_it_cannot_serve(spec):
    with pytest.raises(ValueError, match="spec: expected continuous actions with bounds"):
        DeterministicActor(nn.Identity(), spec=spec)


def test_other_faults():
    with pytest.raises(ValueError, match="expected finite bounds with low < high"):
        DeterministicActor(nn.Identity(), spec=Bounded(-math.inf, 1.0, (2,)))
    with pytest.raises(ValueError, match="squash: expected 'tanh' or 'atan', received 'sigmoid'"):
        make_actor(squash="sigmoid")
