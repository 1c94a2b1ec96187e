"""ConvNet: sizes, batch shapes, bytes, layouts, errors, variants."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules import CategoricalMLP, ConvLayer, ConvNet, EpsilonGreedy
from torchrl_perf.runtime import no_host_sync

LAYERS = (ConvLayer(4, 3, 2), ConvLayer(6, 3, 1, 1))
SHAPE = (2, 9, 7)


def make(in_shape=SHAPE, **options):
    return ConvNet(in_shape, layers=LAYERS, **{"out_features": 5, **options})


def plain(net, image):
    """One image after the other, by torch's own modules."""
    rows = [net.linear(net.convolutions(row[None]).flatten()).relu() for row in image.reshape(-1, *image.shape[-3:])]
    return torch.stack(rows).view(*image.shape[:-3], -1)


def test_the_nature_network():
    net = ConvNet((4, 84, 84))
    assert net.linear.in_features == 3136
    assert net.out_features == 512
    assert net(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 512)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_any_batch_is_a_loop_over_images(shape):
    net, image = make(), torch.randn(*shape, *SHAPE)
    torch.testing.assert_close(net(image), plain(net, image), rtol=1e-5, atol=1e-5)


def test_bytes_are_divided_by_255():
    net, image = make(), torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    torch.testing.assert_close(net(image), net(image.float() / 255))


@pytest.mark.parametrize("channels_last", [False, True])
def test_layouts_agree(channels_last):
    net, other = make(channels_last=channels_last), make((9, 7, 2), layout="HWC")
    other.load_state_dict(net.state_dict())
    image = torch.randn(3, *SHAPE)
    torch.testing.assert_close(net(image), other(image.movedim(-3, -1)), rtol=1e-5, atol=1e-5)


def test_without_the_linear_layer():
    net = make(out_features=None)
    assert net.out_features == 6 * 4 * 3
    assert net(torch.randn(2, *SHAPE)).shape == (2, 72)


def test_sixteen_bits_give_float32_features():
    net, image = make(precision="bf16"), torch.randn(3, *SHAPE)
    features = net(image)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, plain(net, image), rtol=0.05, atol=0.05)


def test_as_a_trunk():
    trunk = make()
    policy = EpsilonGreedy(CategoricalMLP(trunk.out_features, 3, num_atoms=5, trunk=trunk), spec=Categorical(3))
    td = TensorDict({"observation": torch.zeros(2, 4, *SHAPE, dtype=torch.uint8)}, [2, 4])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM), no_host_sync():
        assert policy(td)["action"].shape == (2, 4)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"received in_shape \[1, 5, 5\], of which 2 pixels reach ConvLayer"):
        ConvNet((1, 5, 5), layers=(ConvLayer(4, 3, 2), ConvLayer(4, 3)))
    with pytest.raises(ValueError, match="layout: expected 'CHW' or 'HWC', received 'NCHW'"):
        make(layout="NCHW")
    with pytest.raises(ValueError, match="expected an image of three dims"):
        make((9, 7))
    with pytest.raises(ValueError, match="layers: expected sizes of at least 1"):
        ConvNet(SHAPE, layers=(ConvLayer(0, 3),))
    with pytest.raises(ValueError, match=r"image: expected \[\*, 2, 9, 7\] \(CHW\), received \[4, 9, 7, 2\]"):
        make()(torch.zeros(4, 9, 7, 2))


def test_compiled_equals_eager(variant):
    net = make(device=variant.device)
    image = torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8, device=variant.device)
    with torch.no_grad():
        # convolutions run in TF32 on CUDA
        torch.testing.assert_close(variant(net.forward)(image), net(image), rtol=2e-3, atol=2e-3)


def test_gradients_reach_all_parameters():
    net = make()
    net(torch.randn(4, *SHAPE)).sum().backward()
    assert all((param.grad != 0).any() for param in net.parameters())
    assert all(not isinstance(module, nn.LazyConv2d) for module in net.modules())
