"""ConvQMap: shapes, any size, symmetry, one map as many, duelling, gradients, precision, refusals."""

import copy

import pytest
import torch
from torch import nn

from torchrl_perf.modules import ConvQMap
from torchrl_perf.runtime.compile import compiled


def ready(**options):
    torch.manual_seed(0)
    return ConvQMap(**{"in_channels": 3, "hidden_size": 8, "blocks": 2, **options})


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("size", [(1, 1), (4, 7), (20, 20)])
def test_any_batch_and_any_size(batch, size):
    values = ready()(torch.randn(*batch, 3, *size))
    assert values.shape == (*batch, size[0] * size[1])
    assert values.dtype == torch.float32
    assert values.isfinite().all()


def test_cells_are_in_row_major_order():
    """With weights at the centre of each kernel alone a cell's value is a function of its own planes."""
    net = ready(in_channels=1, hidden_size=1, blocks=0)
    with torch.no_grad():
        net.stem.weight.zero_()
        net.stem.weight[..., 1, 1] = 2.0
        net.stem.bias.fill_(1.0)
        net.head.weight.fill_(3.0)
        net.head.bias.fill_(-1.0)
    net.stem_norm = nn.Identity()
    planes = torch.arange(6.0).view(1, 1, 2, 3)
    assert net(planes).tolist() == [[3 * (2 * cell + 1) - 1 for cell in range(6)]]


def test_a_map_alone_gives_what_it_gives_among_others():
    net, planes = ready().double(), torch.randn(4, 3, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([net(one.unsqueeze(0)) for one in planes]), net(planes))
    assert {type(part) for part in net.modules()} & {nn.BatchNorm2d, nn.Dropout} == set()


def test_moved_content_moves_values_where_no_edge_is_near():
    """Convolutions without mean and norm would be exact; with them a map that is as a whole the same is."""
    net = ready(blocks=1)
    planes = torch.zeros(1, 3, 24, 24)
    planes[..., 10, 10] = 1.0
    moved = planes.roll((2, 3), (-2, -1))
    here, there = (net(one).view(24, 24) for one in (planes, moved))
    torch.testing.assert_close(here[7:14, 7:14], there[9:16, 10:17])


@pytest.mark.parametrize(("blocks", "reach"), [(0, 1), (1, 3), (2, 6), (3, 11)])
def test_how_far_a_cell_sees(blocks, reach):
    """Stem 1, then 2 ** b + 1 for each block; the mean and the norm, which see everything, are taken out."""
    net = ready(in_channels=1, blocks=blocks).double()
    for block in net.blocks:
        block.first_norm, block.second_norm = nn.Identity(), nn.Identity()
        nn.init.zeros_(block.whole.weight)
    net.stem_norm = nn.Identity()
    planes = torch.randn(1, 1, 31, 31, dtype=torch.float64)
    other = planes.clone()
    other[..., 15, 15] += 1.0
    changed = (net.forward(planes) - net.forward(other)).view(31, 31).abs() > 0
    rows = changed.any(1).long()
    assert rows.argmax() == 15 - reach


def test_duelling_mean_is_the_value():
    net = ready(dueling=True)
    with torch.no_grad():
        net.value.weight.zero_()
        net.value.bias.fill_(0.25)
    torch.testing.assert_close(net(torch.randn(3, 3, 5, 5)).mean(-1), torch.full((3,), 0.25))


@pytest.mark.parametrize("dueling", [False, True])
def test_every_parameter_has_a_gradient(dueling):
    net = ready(dueling=dueling)
    net(torch.randn(4, 3, 6, 6)).square().sum().backward()
    # a shift of all channels of a group has no effect behind its norm, but no bias is a shift of them all alike
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in net.parameters())


def test_settings_change_the_values():
    planes = torch.randn(2, 3, 6, 6)
    usual = ready()(planes)
    for options in ({"activation": "tanh"}, {"blocks": 3}, {"hidden_size": 12}, {"dueling": True}):
        assert not torch.equal(ready(**options)(planes), usual), options


def test_half_precision_is_near():
    planes = torch.randn(2, 3, 8, 8)
    half = ready(precision="bf16")(planes)
    assert half.dtype == torch.float32
    assert not torch.equal(half, ready()(planes))
    torch.testing.assert_close(half, ready()(planes), rtol=0.1, atol=0.05)


def test_compiled_as_eager(fresh_dynamo):
    net, planes = ready(dueling=True), torch.randn(3, 3, 6, 6)
    torch.testing.assert_close(compiled(net.forward, backend="aot_eager")(planes), net(planes))


def test_copies_share_nothing():
    net = ready()
    twin = copy.deepcopy(net)
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in twin.parameters()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_channels": 0}, "in_channels and hidden_size of at least 1"),
        ({"hidden_size": 0}, "in_channels and hidden_size of at least 1"),
        ({"blocks": -1}, "blocks of at least 0"),
        ({"activation": "gelu"}, "activation: expected one of relu, tanh, received 'gelu'"),
        ({"precision": "fp8"}, "precision"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        ready(**options)


@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (5, 5)])
def test_maps_of_other_planes(shape):
    with pytest.raises(ValueError, match=r"planes: expected \[\*, 3, H, W\], received .* Remedy"):
        ready()(torch.zeros(shape))
