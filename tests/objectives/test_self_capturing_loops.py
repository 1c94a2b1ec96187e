"""Losses that record themselves, in the loops that people write: every gradient is that of the eager loss.

On a CPU the graphs are emulated, and the loops are short; on CUDA they have 500 updates.
"""

import gc
import threading

import pytest
import torch
from recording_device import recording_device
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from test_self_capturing_losses import CASES, OBS, batch_of, ppo, ppo_batch, total, twins
from torch import nn
from torchrl.modules import MLP

from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.modules import DeviceActor
from torchrl_perf.objectives import DeviceDQNLoss, DeviceSoftUpdate
from torchrl_perf.runtime.self_capture import is_recorded, self_capturing
from torchrl_perf.trainers import GuardedAdam

UPDATES = {"cpu": 10, "cuda": 500}
CLOSE = {"cpu": {"rtol": 0, "atol": 0}, "cuda": {"rtol": 1e-4, "atol": 1e-6}}
"""On CUDA some sums of a backward pass have no fixed order, eagerly either."""


device = recording_device


def gradients(loss, batches, seed, *, capture):
    """Gradients that add up over some batches, and what the loss wrote: its buffers stay as they were."""
    loss.capture = capture
    loss.zero_grad()
    before = [buffer.clone() for buffer in nn.Module.buffers(loss)]
    torch.manual_seed(seed)
    for td in batches:
        total(loss(td.copy())).backward()
    found = [None if param.grad is None else param.grad.clone() for param in loss.parameters()]
    after = [buffer.clone() for buffer in nn.Module.buffers(loss)]
    if not capture:
        for buffer, value in zip(nn.Module.buffers(loss), before, strict=True):
            buffer.copy_(value)
    return [*found, *after]


def assert_equal(one, other, device):
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        assert (left is None) is (right is None)
        if left is not None:
            torch.testing.assert_close(right, left, equal_nan=True, **CLOSE[device])


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_each_update(name, device):
    """Accumulation, a ragged last minibatch, a scheduler, changed rates, targets, a reloaded state; one network."""
    loss, _ = twins(name, device)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-3)
    updates = UPDATES[device]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=updates + 1)
    updater = None
    if any(key.startswith("target_") and "_params." in key for key in loss.state_dict()):
        updater = DeviceSoftUpdate(loss, tau=0.05)
    stored = {key: value.clone() for key, value in loss.state_dict().items()}
    for update in range(updates):
        batches = [
            batch_of(name, rows, 3 * update + rows).to(device) for rows in ((12, 12, 7) if update % 2 else (12,))
        ]
        eager = gradients(loss, batches, update, capture=False)
        assert_equal(eager, gradients(loss, batches, update, capture=True), device)
        nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if updater is not None:
            updater.step()
        if update % 40 == 8:
            loss.load_state_dict(stored)
        if update % 50 == 7:
            optimizer.param_groups[0]["lr"] *= 0.5
    assert is_recorded(loss)


def test_two_losses_on_one_network(device):
    """Both go back before the step, in turns with each other; the network's gradients are the sum of both."""
    torch.manual_seed(0)
    network = MLP(3, 4, num_cells=[8])
    losses = [DeviceDQNLoss(network, gamma=gamma).to(device) for gamma in (0.9, 0.5)]
    optimizer = GuardedAdam(network.parameters(), lr=1e-3)
    for update in range(UPDATES[device]):
        batches = [batch_of("dqn-tensors", 12, 2 * update + number).to(device) for number in range(2)]
        found = []
        for capture in (False, True):
            optimizer.zero_grad()
            for loss in losses:
                loss.capture = capture
            outs = [total(loss(td.copy())) for loss, td in zip(losses, batches, strict=True)]
            (outs[0] + outs[1]).backward() if update % 2 else [out.backward() for out in outs]
            found.append([param.grad.clone() for param in network.parameters()])
        assert_equal(*found, device)
        optimizer.step()
    assert all(is_recorded(loss) for loss in losses)


def test_two_threads_with_losses_of_their_own(device):
    """Each learns by itself, at the same time; neither disturbs the other's numbers."""
    pairs = [twins("clip-ppo", device) for _ in range(2)]
    found = {}

    def learn(number, kind):
        loss = pairs[number][kind]
        optimizer = GuardedAdam(loss.parameters(), lr=1e-2, capture=bool(kind))
        for update in range(UPDATES[device] // 5 + 5):
            total(loss(ppo_batch(12, 100 * number + update).to(device))).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[number, kind] = [param.detach().clone() for param in loss.parameters()]

    for number in range(2):
        learn(number, 0)
    threads = [threading.Thread(target=learn, args=(number, 1)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for left, right in zip(found[number, 0], found[number, 1], strict=True):
            torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dropout", "batch norm"])
def test_networks_in_training_mode(kind, device):
    """Masks are those of the eager call of the same seed; running statistics move once a call."""
    torch.manual_seed(0)
    layer = nn.Dropout(0.5) if kind == "dropout" else nn.BatchNorm1d(16)
    loss = DeviceDQNLoss(nn.Sequential(nn.Linear(3, 16), layer, nn.ReLU(), nn.Linear(16, 4))).to(device)
    losses = set()
    for update in range(12):
        td = batch_of("dqn-tensors", 12, 0).to(device)
        if kind == "batch norm":
            before = layer.num_batches_tracked.item()
            eager = gradients(loss, [td], update, capture=False)
            ours = gradients(loss, [td], update, capture=True)
            assert layer.num_batches_tracked.item() == before + 1
        else:
            eager, ours = (gradients(loss, [td], update, capture=capture) for capture in (False, True))
        assert_equal(eager, ours, device)
        losses.add(float(eager[0].sum()))
    assert is_recorded(loss)
    assert len(losses) == (12 if kind == "dropout" else 1)


def test_hooks_on_parameters_are_called(device):
    """Those that change a gradient as well, and those that follow its sum."""
    loss, _ = twins("dqn-tensors", device)
    first, *_, last = loss.parameters()
    calls = []

    def tripled(param):
        calls.append("last")
        param.grad.mul_(3)

    first.register_hook(lambda grad: calls.append("first") or grad * 2)
    last.register_post_accumulate_grad_hook(tripled)
    for update in range(8):
        td = batch_of("dqn-tensors", 12, update).to(device)
        found = []
        for capture in (False, True):
            found.append(gradients(loss, [td], update, capture=capture))
            assert sorted(calls) == ["first", "last"]
            calls.clear()
        assert_equal(*found, device)
    assert is_recorded(loss)


def test_a_recorded_step_counts_as_a_write(device):
    """A loss from before the optimiser's step has no gradient after it, as in eager PyTorch."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = GuardedAdam(network.parameters(), lr=1e-2)
    for update in range(5):
        out = network(torch.ones(2, 3, device=device)).sum()
        if update == 4:
            assert optimizer._replays.recorded
            optimizer.step()
            with pytest.raises(RuntimeError, match="inplace operation"):
                out.backward()
        else:
            out.backward()
            optimizer.step()


@pytest.mark.gpu
def test_parameters_on_another_device_are_refused_as_in_pytorch():
    loss = ppo()
    td = ppo_batch(12, 0).cuda()
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"same device|on cuda|cpu"):
            loss(td.copy())
    assert not is_recorded(loss)


class Dice(nn.Module):
    """Draws numbers of the kinds that losses and policies draw."""

    @self_capturing
    def forward(self, td):
        x = td["x"]
        drawn = {"uniform": torch.rand_like(x), "normal": torch.randn_like(x), "kept": nn.functional.dropout(x, 0.3)}
        drawn["choice"] = torch.multinomial(torch.ones_like(x[:, :8]), 1).squeeze(-1)
        return TensorDict(drawn, td.batch_size)


def chi_square(counts, expected):
    """The statistic, and its bound at six deviations."""
    freedom = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum()), freedom + 6 * (2 * freedom) ** 0.5


def test_random_numbers_have_their_distribution_and_are_independent(device):
    calls, rows = (200, 32) if device == "cpu" else (4000, 256)
    torch.manual_seed(0)
    dice, td = Dice(), TensorDict({"x": torch.ones(rows, 8, device=device)}, [rows])
    drawn = [dice(td) for _ in range(calls)]
    assert is_recorded(dice)
    uniform = torch.stack([each["uniform"] for each in drawn])
    normal = torch.stack([each["normal"] for each in drawn])
    for numbers in (uniform, 0.5 * (1 + torch.erf(normal / 2**0.5))):
        bins = (numbers * 16).long().clamp(0, 15)
        pairs = bins[:-1] * 16 + bins[1:]  # of one place in two calls, one after the other
        for found, number in ((bins, 16), (pairs, 256)):
            counts = torch.bincount(found.flatten(), minlength=number).double()
            statistic, bound = chi_square(counts, counts.sum() / number)
            assert statistic < bound
    choices = torch.bincount(torch.stack([each["choice"] for each in drawn]).flatten(), minlength=8).double()
    statistic, bound = chi_square(choices, choices.sum() / 8)
    assert statistic < bound
    kept = torch.stack([each["kept"] for each in drawn]).bool()
    share, deviation = float(kept.double().mean()), (0.21 / kept.numel()) ** 0.5
    assert abs(share - 0.7) < 6 * deviation


def test_actions_have_the_actors_distribution(device):
    calls, rows = (200, 32) if device == "cpu" else (4000, 256)
    torch.manual_seed(0)
    net = nn.Linear(OBS, 4)
    nn.init.zeros_(net.weight)
    actor = DeviceActor(net, distribution_class=torch.distributions.Categorical, param_keys=["logits"]).to(device)
    td = TensorDict({"observation": torch.zeros(rows, OBS, device=device)}, [rows])
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        actions = torch.stack([actor(td.copy())["action"] for _ in range(calls)])
    assert is_recorded(actor)
    counts = torch.bincount(actions.flatten(), minlength=4).double()
    statistic, bound = chi_square(counts, net.bias.detach().softmax(0).double() * counts.sum())
    assert statistic < bound


def test_memory_is_flat(device):
    """A loop of recorded parts, after its shapes are known."""
    loss, _ = twins("sac", device)
    optimizer, updater = GuardedAdam(loss.parameters(), lr=1e-3), DeviceSoftUpdate(loss, tau=0.01)
    metrics, episodes = DeviceMetrics(device), EpisodeStatistics(12, device)
    batches = [batch_of("sac", rows, rows).to(device) for rows in (12, 7)]
    reward, done = torch.zeros(12, 1, device=device), torch.ones(12, 1, dtype=torch.bool, device=device)

    def update(number):
        out = loss(batches[number % 2].copy())
        total(out).backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.step()
        metrics.add_all({key: value for key, value in out.items() if value.numel() == 1})
        episodes.update(reward, done)

    def used():
        gc.collect()
        if device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    for number in range(12):
        update(number)
    before = used()
    for number in range(40 if device == "cpu" else 10_000):
        update(number)
    assert used() <= before
