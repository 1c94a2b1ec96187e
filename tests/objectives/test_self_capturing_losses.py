"""Losses that record themselves give the numbers and gradients of eager ones, in any loop around them.

On a CPU the graphs are emulated: the operations of a call, done again on the same tensors.
"""

import copy
import threading
import warnings

import pytest
import torch
from loss_parts import LOSSES, make, make_batch, make_critic
from recording_device import recording_device
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import distributions, nn
from torchrl.data import Bounded, Categorical
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import SoftUpdate

from torchrl_perf.modules import ICM, EnsembleQ, SquashedNormal
from torchrl_perf.objectives import DeviceClipPPOLoss, DeviceDQNLoss, DeviceKLPENPPOLoss, DeviceSACLoss, ICMLoss
from torchrl_perf.runtime.self_capture import SelfCaptureWarning, is_recorded

OBS, CHOICES = 4, 3


device = recording_device


def ppo(kind=DeviceClipPPOLoss, **options):
    torch.manual_seed(0)
    sizes = {"num_cells": [16], "activation_class": nn.Tanh}
    actor = ProbabilisticActor(
        TensorDictModule(MLP(OBS, CHOICES, **sizes), ["observation"], ["logits"]),
        ["logits"],
        distribution_class=distributions.Categorical,
        return_log_prob=True,
    )
    return kind(actor, ValueOperator(MLP(OBS, 1, **sizes), ["observation"]), **options)


def ppo_batch(rows, seed):
    draw = {"generator": torch.Generator().manual_seed(seed)}
    logits = torch.randn(rows, CHOICES, **draw)
    return TensorDict(
        {
            "observation": torch.randn(rows, OBS, **draw),
            "action": torch.randint(CHOICES, (rows,), **draw),
            "logits": logits,
            "action_log_prob": -torch.rand(rows, **draw),
            "advantage": torch.randn(rows, 1, **draw),
            "value_target": torch.randn(rows, 1, **draw),
            "state_value": torch.randn(rows, 1, **draw),
        },
        [rows],
    )


def icm_loss(**options):
    torch.manual_seed(0)
    return ICMLoss(ICM(3, spec=Categorical(4), hidden_size=8), **options)


def icm_batch(rows, seed):
    torch.manual_seed(seed)
    return make_batch(rows, actions="index")


CASES = {
    "clip-ppo": (lambda **o: ppo(normalize_advantage=True, **o), ppo_batch),
    "clip-ppo, own networks": (lambda **o: ppo(functional=False, clip_value=0.2, **o), ppo_batch),
    "kl-ppo": (lambda **o: ppo(DeviceKLPENPPOLoss, dtarg=1e-4, **o), ppo_batch),
    "icm": (icm_loss, icm_batch),
} | {name: (lambda name=name, **o: make(name, **o)[0], None) for name in LOSSES}


def squashed_sac(critic, **options):
    """With a squashed normal whose bounds may be numbers; TorchRL's TanhNormal copies them to CUDA at each call."""
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(MLP(3, 4, num_cells=[8]), NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        ["loc", "scale"],
        distribution_class=SquashedNormal,
        spec=Bounded(-1, 1, (2,)),
        return_log_prob=True,
    )
    return DeviceSACLoss(actor, critic(), **options)


CASES["sac"] = (lambda **o: squashed_sac(make_critic, **o), None)
CASES["sac-ensemble"] = (lambda **o: squashed_sac(lambda: EnsembleQ(3, 5), **o), None)


def batch_of(name, rows, seed):
    batch = CASES[name][1]
    if batch is not None:
        return batch(rows, seed)
    torch.manual_seed(seed)
    return copy_of_batch(name, rows, seed)


def copy_of_batch(name, rows, seed):
    actions = LOSSES[name][1]
    torch.manual_seed(seed)
    td = make_batch(rows, actions="continuous" if actions == "hybrid" else actions)
    if actions == "hybrid":
        push = td.pop("action")
        td["action"] = TensorDict({"kind": torch.randint(4, (rows,)), "push": push}, (rows,))
    return td


def twins(name, device, **options):
    """A loss that runs eagerly and one that records itself, of equal parameters."""
    build = CASES[name][0]
    eager, ours = build(capture=False, **options).to(device), build(**options).to(device)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def total(out):
    return sum(value.sum() for key, value in out.items() if key.startswith("loss"))


def step(loss, optimizer, td, seed, *, clip=0.5):
    torch.manual_seed(seed)
    out = loss(td)
    total(out).backward()
    torch.nn.utils.clip_grad_norm_(loss.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return out


def same(one, other, **options):
    tolerance = {"rtol": 0, "atol": 0} | options
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(right, left, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_a_loop_with_ragged_batches_targets_and_schedules(name, device):
    """Learning rates, targets, a reloaded state: all that acts in place is honoured, over sixty updates."""
    eager, ours = twins(name, device)
    found = []
    for loss in (eager, ours):
        optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
        start = copy.deepcopy(loss.state_dict())
        outs = []
        for update in range(60):
            td = batch_of(name, 7 if update % 5 == 4 else 12, update).to(device)
            outs.append((step(loss, optimizer, td, update), td))
            optimizer.param_groups[0]["lr"] *= 0.99
            if hasattr(loss, "update_targets_"):
                loss.update_targets_(0.1)
            if update == 40:
                loss.load_state_dict(start)
        found.append(outs)
    assert is_recorded(ours)
    assert not is_recorded(eager)
    for (left, one), (right, other) in zip(*found, strict=True):
        assert list(left.keys()) == list(right.keys())
        for key in left.keys():
            torch.testing.assert_close(right[key], left[key], rtol=0, atol=0, msg=key)
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        if "td_error" in one.keys():
            torch.testing.assert_close(other["td_error"], one["td_error"], rtol=0, atol=0)
    same(eager, ours)


@pytest.mark.parametrize("name", ["clip-ppo", "sac"])
def test_accumulated_gradients(name, device):
    """Two backward passes before a step, gradients left in place by zero_grad(set_to_none=False)."""
    eager, ours = twins(name, device)
    for loss in (eager, ours):
        optimizer = torch.optim.SGD(loss.parameters(), 0.1)
        for update in range(12):
            for part in range(2):
                torch.manual_seed(part)
                total(loss(batch_of(name, 12, 2 * update + part).to(device))).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=update % 2 == 0)
    same(eager, ours)


@pytest.mark.parametrize("waiting", [2, 3, 4])
def test_calls_that_wait_for_one_backward_pass(waiting, device):
    eager, ours = twins("clip-ppo", device)
    for loss in (eager, ours):
        optimizer = torch.optim.SGD(loss.parameters(), 0.1)
        for update in range(8):
            losses = [total(loss(ppo_batch(12, update * 9 + part).to(device))) for part in range(waiting)]
            sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    same(eager, ours)


def test_more_calls_than_are_recorded_run_eagerly_and_it_is_said(device):
    eager, ours = twins("clip-ppo", device)
    for loss in (eager, ours):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for update in range(4):
                sum(total(loss(ppo_batch(12, update * 9 + part).to(device))) for part in range(6)).backward()
        loss.said = [str(each.message) for each in said if each.category is SelfCaptureWarning]
    assert eager.said == []
    assert len(ours.said) == 1
    assert "more than 4 calls wait for their backward pass" in ours.said[0]
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sac", "td3", "ac-iqn"])
def test_each_loss_goes_back_by_itself(name, device):
    """One optimiser for each network, as TorchRL's scripts have them; what a loss does not reach keeps None."""
    eager, ours = twins(name, device)
    for loss in (eager, ours):
        actor = torch.optim.SGD(loss.actor_network_params.flatten_keys().values(), 0.1)
        critic = torch.optim.SGD(loss.qvalue_network_params.flatten_keys().values(), 0.1)
        for update in range(8):
            torch.manual_seed(update)
            out = loss(batch_of(name, 12, update).to(device))
            out["loss_qvalue" if "loss_qvalue" in out.keys() else "loss_critic"].backward()
            loss.none = [param.grad is None for param in loss.actor_network_params.flatten_keys().values()]
            critic.step()
            critic.zero_grad()
            actor.zero_grad()
        del actor
    assert ours.none == eager.none == [True] * len(eager.none)
    same(eager, ours)


def test_a_write_between_the_passes_is_refused_as_in_eager_pytorch(device):
    for loss in twins("clip-ppo", device):
        for update in range(6):
            out = loss(ppo_batch(12, update).to(device))
            with torch.no_grad():
                if update == 5:
                    next(iter(reversed(list(loss.parameters())[:-1]))).mul_(1.0)
                    for param in loss.parameters():
                        param.mul_(1.0)
            if update == 5:
                with pytest.raises(RuntimeError, match=r"in.?place"):
                    total(out).backward()
            else:
                total(out).backward()


def test_a_gradient_of_a_gradient_is_refused(device):
    _, ours = twins("clip-ppo", device)
    for update in range(4):
        out = total(ours(ppo_batch(12, update).to(device)))
        if update < 3:
            out.backward()
    with pytest.raises(RuntimeError, match=r"create_graph=False.*Remedy: capture=False"):
        out.backward(create_graph=True)


def test_a_replaced_parameter_is_found(device):
    eager, ours = twins("dqn-tensors", device)
    for update in range(6):
        td = batch_of("dqn-tensors", 12, update).to(device)
        if update == 4:
            for loss in (eager, ours):
                layer = loss.network[0]
                layer.weight = nn.Parameter(layer.weight.detach() * 2)
        found = []
        for loss in (eager, ours):
            torch.manual_seed(0)
            loss.zero_grad()
            out = loss(td.copy())
            total(out).backward()
            found.append((out["loss"].detach(), loss.network[0].weight.grad))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_hooks_run_it_eagerly(device):
    _, ours = twins("dqn-tensors", device)
    calls = []
    ours.network[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(SelfCaptureWarning, match="Linear has hooks"):
        for update in range(5):
            ours(batch_of("dqn-tensors", 12, update).to(device))
    assert len(calls) == 5
    assert not is_recorded(ours)


class Waiting(nn.Module):
    """A network that asks the host."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return self.layer(x) * (2.0 if x.sum().item() > 0 else 1.0)


def test_a_network_that_waits_runs_eagerly_and_the_line_is_said(device):
    torch.manual_seed(0)
    ours = DeviceDQNLoss(Waiting()).to(device)
    line = r"test_self_capturing_losses.py:\d+" if device == "cuda" else "emulated_graph.py"
    with pytest.warns(SelfCaptureWarning, match=f"runs eagerly.*{line}"):
        for update in range(5):
            total(ours(batch_of("dqn-tensors", 12, update).to(device))).backward()
    assert not is_recorded(ours)


def test_dropout_draws_anew_and_modes_count_as_shapes(device):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.Linear(64, 4))
    ours = DeviceDQNLoss(network).to(device)
    td = batch_of("dqn-tensors", 12, 0).to(device)
    drawn = [float(ours(td)["loss"].detach()) for _ in range(8)]
    assert len(set(drawn)) == 8
    before = network[2].running_mean.clone()
    ours(td)
    assert not torch.equal(before, network[2].running_mean)
    ours.eval()
    settled = [float(ours(td)["loss"].detach()) for _ in range(6)]
    assert len(set(settled)) == 1
    assert is_recorded(ours)


def test_two_losses_on_one_network_and_two_threads(device):
    torch.manual_seed(0)
    eager, ours = twins("dqn-tensors", device)
    others = [copy.deepcopy(ours), copy.deepcopy(ours)]
    found = {}

    def work(number):
        grads = []
        for update in range(10):
            loss = others[0]
            out = loss(batch[number][update].copy())
            grads.append(torch.autograd.grad(total(out), list(loss.parameters())))
        found[number] = grads

    batch = [[batch_of("dqn-tensors", 12, 10 * n + k).to(device) for k in range(10)] for n in range(2)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for update in range(10):
            expected = torch.autograd.grad(total(eager(batch[number][update].copy())), list(eager.parameters()))
            torch.testing.assert_close(found[number][update], expected, rtol=1e-5, atol=1e-6)


def test_without_gradient_and_fresh_results(device):
    """What was returned once does not change; under no_grad nothing waits."""
    _, ours = twins("clip-ppo", device)
    kept = []
    for update in range(8):
        with torch.no_grad():
            out = ours(ppo_batch(12, update).to(device))
        kept.append((out, {key: value.clone() for key, value in out.items()}))
    for out, values in kept:
        assert not any(value.requires_grad for value in out.values())
        for key, value in values.items():
            assert torch.equal(out[key], value)


def test_soft_update_of_torchrl_moves_targets(device):
    eager, ours = twins("sac", device)
    for loss in (eager, ours):
        updater, optimizer = SoftUpdate(loss, tau=0.1), torch.optim.Adam(loss.parameters(), 1e-2)
        for update in range(12):
            step(loss, optimizer, batch_of("sac", 12, update).to(device), update)
            updater.step()
    same(eager, ours)


def test_a_copy_and_a_pickle_record_by_themselves(device):
    _, ours = twins("dqn-tensors", device)
    for update in range(4):
        total(ours(batch_of("dqn-tensors", 12, update).to(device))).backward()
    other = copy.deepcopy(ours)
    assert is_recorded(ours)
    assert not is_recorded(other)
    td = batch_of("dqn-tensors", 12, 5).to(device)
    for _ in range(4):
        torch.testing.assert_close(other(td.copy())["loss"], ours(td.copy())["loss"], rtol=0, atol=0)
