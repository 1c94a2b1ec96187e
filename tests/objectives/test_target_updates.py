"""Updaters of targets equal TorchRL's to the last bit, for their losses and ours, eagerly and as one graph."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from loss_parts import LOSSES, make, make_actor, make_critic, make_policy
from recording_device import recording_device
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torchrl.objectives import HardUpdate, LossModule, SACLoss, SoftUpdate, TD3Loss

from torchrl_perf.objectives import DeviceHardUpdate, DeviceSoftUpdate
from torchrl_perf.objectives.target_updates import _pairs_of
from torchrl_perf.runtime import capture

DELAYED = ["sac", "sac-ensemble", "td3", "ac-iqn", "dqn", "c51", "quantile", "hybrid"]


device = recording_device


def build(name):
    torch.manual_seed(0)
    if name == "torchrl-sac":
        return SACLoss(make_actor(), make_critic())
    if name == "torchrl-td3":
        return TD3Loss(make_policy(), make_critic(), bounds=(-1.0, 1.0))
    return make(name)[0]


def targets_of(loss):
    return [value for key, value in sorted(loss.state_dict().items()) if "target_" in key and "_params." in key]


def moved(updater, loss, steps):
    """The targets after some steps, while the sources change."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        with torch.no_grad():
            for param in loss.parameters():
                param.add_(torch.randn(param.shape, device="cpu").to(param))
        updater.step()
        found += [target.clone() for target in targets_of(loss)]
    return found


def assert_equal(one, other):
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["torchrl-sac", "torchrl-td3", *DELAYED])
def test_soft_steps_equal_torchrls(name, dtype, device):
    assert set(DELAYED) <= set(LOSSES)
    theirs, ours = build(name).to(device, dtype), build(name).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    updater = DeviceSoftUpdate(ours, tau=0.3)
    one, other = moved(SoftUpdate(theirs, tau=0.3), theirs, 8), moved(updater, ours, 8)
    assert_equal(one, other)
    assert updater._replays.recorded


def test_eps_is_one_minus_tau_and_may_change(device):
    losses = [build("sac").to(device) for _ in range(2)]
    losses[1].load_state_dict(losses[0].state_dict())
    updaters = SoftUpdate(losses[0], eps=0.9), DeviceSoftUpdate(losses[1], eps=0.9)
    found = [[], []]
    for eps in (0.9, 0.6):
        for number in range(2):
            updaters[number].eps = eps
            found[number] += moved(updaters[number], losses[number], 5)
    assert_equal(*found)


def test_without_capture_nothing_is_recorded(device):
    loss = build("sac").to(device)
    updater = DeviceSoftUpdate(loss, tau=0.3, capture=False)
    moved(updater, loss, 5)
    assert not updater._replays.recorded


@pytest.mark.parametrize("interval", [0, 1, 3])
@pytest.mark.parametrize("name", ["torchrl-sac", "sac", "dqn"])
def test_hard_steps_equal_torchrls(name, interval):
    theirs, ours = build(name), build(name)
    ours.load_state_dict(theirs.state_dict())
    options = {"value_network_update_interval": interval}
    one, other = HardUpdate(theirs, **options), DeviceHardUpdate(ours, **options)
    assert_equal(moved(one, theirs, 9), moved(other, ours, 9))
    assert other.state_dict() == one.state_dict()


def test_a_hard_step_inside_a_captured_function_is_refused():
    step = capture(DeviceHardUpdate(build("sac")).step, device="cpu")
    with pytest.raises(RuntimeError, match=r"outside of captured functions.*Remedy"):
        step()


def test_a_soft_step_inside_a_captured_function():
    losses = [build("sac") for _ in range(2)]
    losses[1].load_state_dict(losses[0].state_dict())
    one, other = (DeviceSoftUpdate(loss, tau=0.3) for loss in losses)
    other.step, plain = capture(other.step, device="cpu"), one
    assert_equal(moved(plain, losses[0], 4), moved(other, losses[1], 4))


@pytest.mark.parametrize("kind", [SoftUpdate, DeviceSoftUpdate])
def test_what_torchrl_refuses(kind):
    loss = build("sac")
    for options in ({"eps": 0.9, "tau": 0.1}, {"eps": 1.5}, {"tau": 1.5}):
        with pytest.raises(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind(loss, **options)
    with pytest.raises(RuntimeError, match="Neither eps nor tau"):
        kind(loss)
    with pytest.raises(ValueError, match="LossModule"):
        kind(nn.Linear(1, 1), tau=0.1)
    with pytest.raises(RuntimeError, match="Did not find any target"):
        kind(SACLoss(make_actor(), make_critic(), delay_qvalue=False), tau=0.1)


def test_a_target_with_a_gradient_is_refused():
    loss = build("sac")
    updater = DeviceSoftUpdate(loss, tau=0.1)
    _pairs_of([updater])[1][0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="received one that requires it"):
        updater.step()


class Pair(LossModule):
    """A loss with targets of its own, around another one."""

    value_network: nn.Module
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams

    def __init__(self):
        super().__init__()
        network = TensorDictModule(nn.Linear(2, 2), ["observation"], ["state_value"])
        self.convert_to_functional(network, "value_network", create_target_params=True)
        self.inner = SACLoss(make_actor(), make_critic())


@pytest.mark.filterwarnings("ignore:No target network updater")
def test_losses_inside_follow_as_well(device):
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(Pair().to(device))
    theirs, ours = losses

    class Both:
        def __init__(self, *updaters):
            self.updaters = updaters

        def step(self):
            for updater in self.updaters:
                updater.step()

    both = Both(SoftUpdate(theirs, tau=0.2), SoftUpdate(theirs.inner, tau=0.2))
    one, other = moved(both, theirs, 6), moved(DeviceSoftUpdate(ours, tau=0.2), ours, 6)
    assert_equal(one, other)
    updater = DeviceHardUpdate(ours, value_network_update_interval=0)
    with torch.no_grad():
        for param in ours.parameters():
            param.fill_(math.pi)
    updater.step()
    assert all(torch.all(target == torch.full_like(target, math.pi)) for target in targets_of(ours))


def test_init_copies_again(device):
    loss = build("sac").to(device)
    updater = DeviceSoftUpdate(loss, tau=0.3)
    moved(updater, loss, 4)
    with pytest.warns(UserWarning, match="already initialized"):
        updater.init_()
    sources, targets = _pairs_of([updater])
    assert_equal(sources, targets)


def test_a_step_between_a_loss_and_its_backward_pass_is_found(device):
    """TorchRL's step leaves it to the caller; where gradients need the targets, ours is refused by autograd."""
    loss = build("sac").to(device)
    updater = DeviceSoftUpdate(loss, tau=0.3)
    for _ in range(4):
        updater.step()
    assert updater._replays.recorded
    target = _pairs_of([updater])[1][0]
    x = torch.ones_like(target, requires_grad=True)
    out = (x * target).sum()
    updater.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.backward()


def test_copies_begin_anew(device):
    loss = build("sac").to(device)
    updater = DeviceSoftUpdate(loss, tau=0.3)
    moved(updater, loss, 4)
    for other in (copy.deepcopy(updater), pickle.loads(pickle.dumps(updater))):
        assert not other._replays.recorded
        other.step()
