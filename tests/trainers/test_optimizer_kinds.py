"""GuardedAdam and GroupAdam: all kinds take the same steps, and a loss scale changes nothing but what it is for."""

import pytest
import torch
from torch import nn

from torchrl_perf.runtime import Acceleration, LossScale, no_host_sync
from torchrl_perf.trainers import GuardedAdam
from torchrl_perf.trainers.optim.group_adam import GroupAdam

INF = float("inf")


def make_net(device):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)


def guarded(net, **switches):
    return GuardedAdam(net.parameters(), learning_rate=1e-2, max_grad_norm=0.5, acceleration=Acceleration(**switches))


def learn(net, optimizer, steps=6, bad=()):
    """Steps on a fixed loss; at those in ``bad`` the gradient is infinite."""
    x = torch.linspace(-1, 1, 12, device=next(net.parameters()).device).view(4, 3)
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.scaled(net(x).square().mean()).backward()
        if step in bad:
            net[0].weight.grad[0, 0] = INF
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in net.parameters()])


@pytest.mark.parametrize("bad", [(), (0,), (2, 3)], ids=["none bad", "first bad", "some bad"])
@pytest.mark.parametrize("kind", ["for-loop", pytest.param("foreach", marks=pytest.mark.gpu)])
def test_kinds_agree_where_steps_are_clipped_and_skipped(kind, bad, device):
    if kind == "foreach" and device.type == "cpu":
        with pytest.raises(ValueError, match="optimizer='foreach': expected parameters on CUDA, received cpu"):
            guarded(make_net(device), optimizer=kind)
        return
    fused, other = make_net(device), make_net(device)
    expected = learn(fused, guarded(fused), bad=bad)
    torch.testing.assert_close(learn(other, guarded(other, optimizer=kind), bad=bad), expected, rtol=1e-4, atol=1e-6)


def test_foreach_on_a_cpu_names_the_remedy():
    with pytest.raises(ValueError, match=r"expected parameters on CUDA, received cpu.*Remedy: 'fused' or 'for-loop'"):
        guarded(make_net("cpu"), optimizer="foreach")


class TestLossScale:
    def test_a_scaled_loss_takes_the_same_steps(self, device):
        plain, scaled = make_net(device), make_net(device)
        torch.testing.assert_close(
            learn(scaled, guarded(scaled, precision="fp16")), learn(plain, guarded(plain)), rtol=1e-5, atol=1e-7
        )

    def test_an_overflow_is_skipped_and_halves_the_scale(self, device):
        plain, scaled = make_net(device), make_net(device)
        optimizer = guarded(scaled, precision="fp16")
        one = learn(scaled, optimizer, steps=4, bad=(1,))
        torch.testing.assert_close(one, learn(plain, guarded(plain), steps=4, bad=(1,)), rtol=1e-5, atol=1e-7)
        assert float(optimizer.loss_scale.scale) == 2.0**11

    def test_an_overflow_is_no_fault_until_the_scale_is_one(self):
        net = make_net("cpu")
        optimizer = guarded(net, precision="fp16")
        loss = torch.zeros(())
        faults = []
        for _ in range(14):
            for param in net.parameters():
                param.grad = torch.full_like(param, INF)
            norm = optimizer.grad_norm()
            faults.append(bool(optimizer.is_fault(loss, norm)))
            optimizer.step(norm, torch.ones(()))
        assert faults == [False] * 12 + [True] * 2
        assert bool(optimizer.is_fault(torch.tensor(INF), torch.ones(())))

    def test_the_scale_is_in_the_state(self):
        net = make_net("cpu")
        optimizer = guarded(net, precision="fp16")
        learn(net, optimizer, steps=3, bad=(1,))
        other = guarded(make_net("cpu"), precision="fp16")
        other.load_state_dict(optimizer.state_dict())
        assert float(other.loss_scale.scale) == 2.0**11
        plain = guarded(make_net("cpu"))
        plain.load_state_dict(optimizer.state_dict())  # of another precision
        other.load_state_dict(plain.state_dict())
        assert float(other.loss_scale.scale) == 2.0**11

    def test_no_host_waits(self, device):
        net = make_net(device)
        optimizer = guarded(net, precision="fp16")
        learn(net, optimizer, steps=1)
        with no_host_sync():
            learn(net, optimizer, steps=1)


class TestGroupAdam:
    def learn(self, device, bad=(), **options):
        net = make_net(device)
        optimizer = GroupAdam([(list(net.parameters()), 1e-2)], max_grad_norm=0.5, **options)
        x = torch.linspace(-1, 1, 12).view(4, 3).to(device)
        for step in range(5):
            loss = net(x).square().mean()
            grads = list(torch.autograd.grad(loss, optimizer.params, optimizer.cotangent(loss)))
            if step in bad:
                grads[0][0, 0] = INF
            optimizer.step(grads, loss)
        return torch.cat([param.detach().flatten() for param in net.parameters()]), optimizer

    @pytest.mark.parametrize("bad", [(), (0, 3)])
    def test_unfused_equals_fused(self, device, bad):
        one, other = (self.learn(device, bad, fused=fused)[0] for fused in (True, False))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_scaled_loss_takes_the_same_steps(self, device, fused):
        scale = LossScale(device)
        one, optimizer = self.learn(device, (2,), fused=fused, loss_scale=scale)
        torch.testing.assert_close(one, self.learn(device, (2,), fused=fused)[0], rtol=1e-4, atol=1e-6)
        assert float(scale.scale) == 2.0**11
        state = {name: value for name, value in optimizer.state_dict().items() if name != "loss_scale"}
        optimizer.load_state_dict(state)  # of another precision
        assert float(scale.scale) == 2.0**11
