"""SetEncoder: order, padding, empty sets, scales, batch shapes, gradients, variants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.modules import ImplicitQuantileMLP, SetEncoder
from torchrl_perf.runtime import no_host_sync

POOLS = ["mean", "max", "attention"]
S, F, M = 7, 5, 6


def make(pool="mean", **options):
    sizes = {"self_size": 8, "object_sizes": (6, 8), "joint_sizes": (10, 4), "num_heads": 2}
    return SetEncoder(S, F, pool=pool, **{**sizes, **options})


def batch(*shape, generator=None, dtype=torch.float32):
    state = torch.randn(*shape, S, generator=generator, dtype=dtype)
    objects = torch.randn(*shape, M, F, generator=generator, dtype=dtype)
    return state, objects, torch.rand(*shape, M, generator=generator) < 0.5


def test_default_sizes():
    net = SetEncoder(S, F)
    assert net.own[0].weight.shape == (56, 7)
    assert net.each[0].weight.shape == (40, 5)
    assert net.each[2].weight.shape == (200, 40)
    assert [net.joint[0].in_features, net.joint[2].in_features, net.out_features] == [256, 256, 128]


@pytest.mark.parametrize("pool", POOLS)
@given(seed=st.integers(0, 99), order=st.permutations(range(M)))
@settings(max_examples=10, deadline=None)
def test_order_does_not_matter(pool, seed, order):
    net = make(pool).double()
    state, objects, mask = batch(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(net(state, objects[:, order], mask[:, order]), net(state, objects, mask))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("content", [0.0, 1e6, torch.nan, torch.inf])
def test_padding_does_not_matter(pool, content):
    net = make(pool).double()
    state, objects, mask = batch(4, dtype=torch.float64)
    padded = torch.cat([objects.masked_fill(~mask.unsqueeze(-1), content), torch.full((4, 3, F), content)], 1).double()
    more = torch.cat([mask, torch.zeros(4, 3, dtype=torch.bool)], 1)
    got = net(state, padded, more)
    torch.testing.assert_close(got, net(state, objects, mask))
    got.sum().backward()
    assert all(param.grad is None or param.grad.isfinite().all() for param in net.parameters())


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_any_batch_is_a_loop_over_sets_without_padding(pool, shape):
    net = make(pool).double()
    state, objects, mask = batch(*shape, dtype=torch.float64)
    got = net(state, objects, mask)
    assert got.shape == (*shape, 4)
    flat = zip(state.reshape(-1, S), objects.reshape(-1, M, F), mask.reshape(-1, M), strict=True)
    rows = [net(own, each[real]) if real.any() else net(own, each, real) for own, each, real in flat]
    torch.testing.assert_close(got, torch.stack(rows).view(got.shape))


@pytest.mark.parametrize("pool", POOLS)
def test_without_objects_only_the_own_state_counts(pool):
    net = make(pool)
    state, objects, _ = batch(3)
    none = torch.zeros(3, M, dtype=torch.bool)
    got = net(state, objects, none)
    assert got.isfinite().all()
    torch.testing.assert_close(got, net(state, torch.randn(3, M, F), none))
    expected = net.joint(torch.cat([net.own(state), torch.zeros(3, 8)], -1))
    torch.testing.assert_close(got, expected)


def test_scales_are_buffers():
    scale = torch.tensor([1 / 55, 1 / 55, 1.0, 1.0, 1.0, 1e-3, 1e-3])
    net, other = make(self_scale=scale, object_scale=[2.0] * F), make()
    other.load_state_dict({**net.state_dict(), "self_scale": torch.ones(S), "object_scale": torch.ones(F)})
    state, objects, mask = batch(3)
    torch.testing.assert_close(net(state, objects, mask), other(state * scale, objects * 2, mask))
    assert {"self_scale", "object_scale"} <= set(net.state_dict())


def test_as_a_trunk():
    trunk = make("attention")
    net = ImplicitQuantileMLP(trunk.out_features, 3, trunk=trunk)
    with no_host_sync():
        quantiles, _ = net.sample(*batch(5, 2), num_taus=4)
    assert quantiles.shape == (5, 2, 3, 4)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.slow_compiled
def test_compiled_equals_eager(pool, variant):
    net = make(pool, device=variant.device)
    inputs = [value.to(variant.device) for value in batch(6)]
    with torch.no_grad():
        torch.testing.assert_close(variant(net.forward)(*inputs), net(*inputs), rtol=1e-4, atol=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match="pool: expected 'mean', 'max' or 'attention', received 'sum'"):
        make("sum")
    with pytest.raises(ValueError, match="num_heads: expected a divisor of 8, received 3"):
        make("attention", num_heads=3)
    with pytest.raises(ValueError, match="sizes: expected at least one layer of each kind"):
        make(object_sizes=())
    with pytest.raises(TypeError, match=r"options: expected self_scale.*received \['scale'\]"):
        make(scale=1)
    with pytest.raises(ValueError, match=r"self_scale: expected \[7\], one factor for each number, received \[3\]"):
        make(self_scale=[1.0, 2.0, 3.0])
    state, objects, mask = batch(2)
    with pytest.raises(ValueError, match=r"mask: expected bool \[2, 6\].*received torch.float32 \[2, 6\]"):
        make()(state, objects, mask.float())
