"""NodeEncoder: order of the nodes, padding, empty graphs, the simplices, batch shapes, precision, a loop oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.modules import NodeEncoder
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.runtime.compile import compiled

F, G, M = 5, 3, 6


def make(**options):
    return NodeEncoder(F, G, **{"width": 16, "num_layers": 2, "num_heads": 2, "groups": 4, **options})


def batch(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randn(*shape, M, F, generator=generator, dtype=dtype)
    graph = torch.randn(*shape, G, generator=generator, dtype=dtype)
    return nodes, torch.rand(*shape, M, generator=generator) < 0.6, graph


def loop_oracle(net, nodes, mask, graph):
    """One graph, float64, token by token: attention spelt out, over the nodes that exist only."""

    def norm(layer, x):
        return (x - x.mean()) / (x.var(correction=0) + layer.eps).sqrt() * layer.weight + layer.bias

    token = net.graph_in.weight @ (graph * net.graph_scale) + net.graph_in.bias + net.token
    tokens = [token]
    tokens += [
        net.node_in.weight @ (node * net.node_scale) + net.node_in.bias
        for node, exists in zip(nodes, mask, strict=True)
        if exists
    ]
    for layer in net.layers:
        normed = [norm(layer.attention_norm, x) for x in tokens]
        size = token.shape[0] // layer.num_heads
        queries = [layer.query.weight @ x + layer.query.bias for x in normed]
        keys, values = ([part.weight @ x + part.bias for x in normed] for part in (layer.key, layer.value))
        mixed = []
        for query in queries:
            heads = []
            for head in range(layer.num_heads):
                part = slice(head * size, (head + 1) * size)
                scores = torch.stack([query[part] @ key[part] for key in keys]) / size**0.5
                heads.append(scores.softmax(0) @ torch.stack([value[part] for value in values]))
            mixed.append(torch.cat(heads))
        tokens = [x + layer.joined.weight @ m + layer.joined.bias for x, m in zip(tokens, mixed, strict=True)]
        first, second = layer.perceptron[1], layer.perceptron[3]
        hidden = [torch.nn.functional.gelu(first.weight @ norm(layer.perceptron[0], x) + first.bias) for x in tokens]
        tokens = [x + second.weight @ h + second.bias for x, h in zip(tokens, hidden, strict=True)]
    out = [net.embed.weight @ norm(net.norm, x) + net.embed.bias for x in tokens]
    return [torch.cat([part.softmax(0) for part in (x / net.temperature).chunk(net.groups)]) for x in out]


@pytest.mark.parametrize("seed", range(3))
def test_a_loop_over_tokens(seed):
    net = make(node_scale=torch.full((F,), 0.5), graph_scale=torch.full((G,), 2.0), temperature=0.5).double()
    nodes, mask, graph = batch(seed=seed)
    with torch.no_grad():
        each, whole = net(nodes, mask, graph)
        expected = loop_oracle(net, nodes, mask, graph)
    torch.testing.assert_close(whole, expected[0])
    torch.testing.assert_close(each[mask], torch.stack(expected[1:]))
    assert not each[~mask].any()


@given(seed=st.integers(0, 99), order=st.permutations(range(M)))
@settings(max_examples=10, deadline=None)
def test_nodes_move_with_their_order_and_the_graph_does_not(seed, order):
    net = make().double()
    nodes, mask, graph = batch(3, seed=seed)
    each, whole = net(nodes, mask, graph)
    each_moved, whole_moved = net(nodes[:, order], mask[:, order], graph)
    torch.testing.assert_close(each_moved, each[:, order])
    torch.testing.assert_close(whole_moved, whole)


@given(seed=st.integers(0, 99), extra=st.integers(0, 9), junk=st.sampled_from([0.0, 1e30, float("inf"), float("nan")]))
@settings(max_examples=15, deadline=None)
def test_padding_counts_nothing(seed, extra, junk):
    net = make().double()
    nodes, mask, graph = batch(2, seed=seed)
    each, whole = net(nodes, mask, graph)
    padded = torch.cat([nodes.masked_fill(~mask.unsqueeze(-1), junk), torch.full((2, extra, F), junk).double()], 1)
    wide = torch.cat([mask, torch.zeros(2, extra, dtype=torch.bool)], 1)
    each_padded, whole_padded = net(padded, wide, graph)
    torch.testing.assert_close(each_padded[:, :M], each)
    torch.testing.assert_close(whole_padded, whole)
    (whole_padded.square().sum() + each_padded.square().sum()).backward()
    assert all(param.grad.isfinite().all() for param in net.parameters())


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_graph_alone_is_the_same(num_layers):
    net = make(num_layers=num_layers).double()
    inputs = batch(4, 2)
    whole = net(*inputs)[1]
    alone = net.graph_embedding(*inputs)
    torch.testing.assert_close(alone, whole)
    params = [param for name, param in net.named_parameters()]
    grads = [torch.autograd.grad(out.square().sum(), params, allow_unused=True) for out in (whole, alone)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one)
    assert all(grad is not None for grad in grads[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_graph_without_nodes(device):
    net = make(device=device)
    nodes, mask, graph = (part.to(device) for part in batch(3, dtype=torch.float32))
    mask = torch.zeros_like(mask)
    each, whole = net(nodes, mask, graph)
    assert not each.any()
    assert whole.isfinite().all()
    whole.square().sum().backward()
    assert all(param.grad.isfinite().all() for param in net.parameters())
    # what is left is a function of the graph's own features
    torch.testing.assert_close(net(nodes * 7, mask, graph)[1], whole)
    assert (net(nodes, mask, graph + 1)[1] - whole).abs().max() > 1e-4
    # no node slots at all
    torch.testing.assert_close(net(nodes[:, :0], mask[:, :0], graph)[1], whole)


def test_groups_are_points_of_simplices():
    each, whole = make(groups=4)(*batch(5, dtype=torch.float32))
    torch.testing.assert_close(whole.unflatten(-1, (4, 4)).sum(-1), torch.ones(5, 4))
    assert (whole > 0).all()
    cold = make(groups=4, temperature=1e-3)(*batch(5, dtype=torch.float32))[1]
    assert cold.unflatten(-1, (4, 4)).amax(-1).median() > 0.99
    assert (make(groups=0)(*batch(5, dtype=torch.float32))[1] < 0).any()
    assert each.shape == (5, M, 16)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,)])
def test_any_batch_shape(shape):
    net = make().double()
    nodes, mask, graph = batch(*shape)
    each, whole = net(nodes, mask, graph)
    assert each.shape == (*shape, M, 16)
    assert whole.shape == (*shape, 16)
    assert net.graph_embedding(nodes, mask, graph).shape == (*shape, 16)
    if len(shape) == 2:
        torch.testing.assert_close(net(nodes[1, 2], mask[1, 2], graph[1, 2])[1], whole[1, 2])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits(precision):
    net = make(precision=precision)
    full = make(precision="ieee")
    full.load_state_dict(net.state_dict())
    inputs = batch(4, dtype=torch.float32)
    for ours, exact in zip(net(*inputs), full(*inputs), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact, rtol=0.1, atol=0.02)
    assert (net(*inputs)[1] != full(*inputs)[1]).any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_waits_for_the_host(device):
    net = make(device=device)
    inputs = [part.to(device) for part in batch(4, dtype=torch.float32)]
    with no_host_sync(device):
        each, whole = net(*inputs)
        (each.square().sum() + whole.square().sum()).backward()
        net.graph_embedding(*inputs)


def test_compiled_is_eager(fresh_dynamo):
    net, inputs = make(), batch(4, dtype=torch.float32)
    both = compiled(lambda *parts: (*net(*parts), net.graph_embedding(*parts)), backend="aot_eager")(*inputs)
    for ours, eager in zip(both, (*net(*inputs), net.graph_embedding(*inputs)), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.gpu
def test_cuda_equals_cpu():
    net, inputs = make(precision="ieee"), batch(64, dtype=torch.float32)
    expected = net(*inputs)
    found = net.cuda()(*(part.cuda() for part in inputs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_heads": 3}, "num_heads: expected a divisor of width 16, received 3"),
            ({"groups": 5}, "groups: expected 0 or a divisor of width 16 .*received 5"),
            ({"groups": 16}, "at least 2 numbers a group, received 16"),
            ({"temperature": 0.0}, "temperature: expected a positive number, received 0.0"),
            ({"num_layers": 0}, "sizes: expected at least 1 each"),
            ({"precision": "fp8"}, "precision: expected one of"),
            ({"node_scale": torch.ones(4)}, r"node_scale: expected \[5\]"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(**options)

    def test_unknown_options(self):
        with pytest.raises(TypeError, match=r"options: expected some of .*received \['dropout'\]"):
            make(dropout=0.1)

    def test_inputs(self):
        nodes, mask, graph = batch(4, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"expected bool \[4, 6\].*received torch.float32 \[4, 6\]"):
            make()(nodes, mask.float(), graph)
        with pytest.raises(ValueError, match=r"received torch.bool \[4, 5\]"):
            make()(nodes, mask[:, :5], graph)
        with pytest.raises(ValueError, match=r"and \[3, 3\]"):
            make()(nodes, mask, graph[:3])
