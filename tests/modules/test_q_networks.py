"""DuelingMLP: hand-computed values, invariance, gradients."""

import pytest
import torch

from torchrl_perf.modules import DuelingMLP


def test_value_and_centred_advantages():
    network = DuelingMLP(2, 3, hidden_size=4)
    last = network.streams[4]
    torch.nn.init.zeros_(last.weight)
    last.bias.data = torch.tensor([10.0, 1.0, 2.0, 6.0])  # value, then advantages of mean 3
    assert network(torch.randn(5, 2)).tolist() == [[8.0, 9.0, 13.0]] * 5


def test_the_mean_over_actions_is_the_value():
    network = DuelingMLP(4, 3, hidden_size=8)
    x = torch.randn(7, 4)
    torch.testing.assert_close(network(x).mean(-1), network.streams(x)[:, 0])


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 3, 4)])
def test_shapes(shape):
    assert DuelingMLP(4, 2)(torch.zeros(shape)).shape == (*shape[:-1], 2)


def test_every_parameter_learns():
    network = DuelingMLP(4, 2, hidden_size=8)
    network(torch.randn(16, 4))[:, 0].sum().backward()
    assert all((param.grad != 0).any() for param in network.parameters())


@pytest.mark.gpu
def test_fused_on_cuda_equals_the_cpu():
    network = DuelingMLP(4, 2, precision="ieee")
    x = torch.randn(32, 4)
    expected = network(x)
    torch.testing.assert_close(network.cuda()(x.cuda()).cpu(), expected, rtol=1e-4, atol=1e-5)


def test_unknown_activation():
    with pytest.raises(ValueError, match="activation: expected one of"):
        DuelingMLP(4, 2, activation="swish")
