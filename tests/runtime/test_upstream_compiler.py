"""What the compiler's graphs are changed by; see tests/runtime/test_upstream_torch.py for what else it is told."""

import operator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from torchrl_perf.runtime import compiled
from torchrl_perf.runtime.upstream import inductor


class TestPairs:
    @pytest.fixture(autouse=True)
    def sines(self, monkeypatch):
        """Two sines of one shape become one of both, one on the other."""

        def join(graph, first, second):
            whole = [
                inductor.call(graph, torch.ops.aten.unsqueeze.default, each.args[0], 0) for each in (first, second)
            ]
            both = inductor.call(graph, torch.ops.aten.cat.default, whole)
            both = inductor.call(graph, torch.ops.aten.sin.default, both)
            return tuple(inductor.call(graph, torch.ops.aten.select.int, both, 0, n) for n in range(2))

        monkeypatch.setattr(inductor, "_PAIRS", {})
        inductor.pair(torch.ops.aten.sin.default, lambda node: tuple(node.meta["val"].shape) or None, join)

    @staticmethod
    def run(fn, *args):
        """The result of a function through the pass, and how many sines are left."""
        traced = make_fx(fn, tracing_mode="fake")(*args)
        inductor.join_pairs(traced.graph)
        traced.graph.lint()
        traced.recompile()
        torch.testing.assert_close(traced(*args), fn(*args))
        return sum(node.target is torch.ops.aten.sin.default for node in traced.graph.nodes)

    def test_two_become_one_and_a_third_stays(self):
        x, y = torch.rand(4), torch.rand(4)
        assert self.run(lambda x, y: x.sin() + y.sin(), x, y) == 1
        assert self.run(lambda x, y: (x.sin() * 2).exp() + (y * 3).sin() * x.sin().sum(), x, y) == 2

    def test_users_of_the_first_come_after_both(self):
        x, y = torch.rand(4), torch.rand(4)
        assert self.run(lambda x, y: (x.sin() * 2).exp() - ((y + 1) * 3).sin(), x, y) == 1

    def test_what_depends_on_the_first_or_is_of_another_kind_stays(self):
        x = torch.rand(4)
        assert self.run(lambda x: (x.sin() + 1).sin(), x) == 2
        assert self.run(lambda x: x.sin() + x[:2].sin().sum(), x) == 2
        assert self.run(lambda x: x.sum().sin() + x.mean().sin(), x) == 2

    def test_inductor_takes_the_pass(self):
        found = inductor.graph_pass()
        assert found.uuid() == inductor.graph_pass().uuid() is not None
        fn = torch.compile(lambda x: x.sin() + (x + 1).sin(), options={"post_grad_custom_pre_pass": found})
        torch.testing.assert_close(fn(torch.ones(3)), torch.ones(3).sin() + torch.full((3,), 2.0).sin())


class TestSeeds:
    """Attention's seeds lie on the CPU outside a capture, where Inductor takes them for memory of the GPU."""

    @staticmethod
    def traced(kind, dropout, parts=2):
        """Seeds that the gradient reads where the compiler is given attention and gradient for a GPU, twice over."""
        aten = torch.ops.aten
        ops = [getattr(aten, f"_scaled_dot_product_{kind}_attention{of}").default for of in ("", "_backward")]

        def fn(x):
            for _ in range(parts):
                if kind == "efficient":
                    out, sums, *seeds = ops[0](x, x, x, None, True, dropout)
                    x = ops[1](out, x, x, x, None, out, sums, *seeds, dropout, [True, True, True, False])[0]
                elif kind == "flash":
                    out, sums, *lengths, seed, offset, _ = ops[0](x, x, x, dropout)
                    x = ops[1](out, x, x, x, out, sums, *lengths, dropout, False, seed, offset)[0]
                else:
                    out, sums, *lengths, seed, offset, _ = ops[0](x, x, x, None, True, dropout)
                    x = ops[1](out, x, x, x, out, sums, seed, offset, None, *lengths, dropout, False)[0]
            return x

        with FakeTensorMode():
            x = torch.empty(3, 2, 8, 8, device="cuda", dtype=torch.bfloat16)
            found = make_fx(fn)(x)
            inductor.part_seeds(found.graph)
            found.graph.lint()
            found.recompile()
            assert found(x).shape == x.shape
        names = [arg.name for arg in ops[1]._schema.arguments]
        gradients = [node for node in found.graph.nodes if node.target is ops[1]]
        assert len(gradients) == parts
        return [node.args[names.index(f"philox_{each}")] for node in gradients for each in ("seed", "offset")]

    @pytest.mark.parametrize("kind", ["efficient", "cudnn"])
    def test_without_dropout_a_backward_pass_reads_none_of_the_forward_pass(self, kind):
        seeds = self.traced(kind, 0.0)
        assert {seed.target for seed in seeds} == {torch.ops.aten.full.default}
        assert len(set(seeds)) == 1
        assert seeds[0].meta["val"].device.type == "cuda"
        assert (seeds[0].meta["val"].dtype, seeds[0].args) == (torch.int64, ([], 0))

    @pytest.mark.parametrize(("kind", "dropout"), [("efficient", 0.5), ("cudnn", 0.5), ("flash", 0.0), ("flash", 0.5)])
    def test_seeds_that_were_drawn_or_lie_on_the_gpu_are_left(self, kind, dropout):
        assert {seed.target for seed in self.traced(kind, dropout)} == {operator.getitem}

    @pytest.mark.gpu
    def test_results_may_take_their_place(self, fresh_dynamo):
        def fn(x, mask, numbers):
            gradient = grad(lambda x: scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum())(x)
            positive = (gradient.sum() > -1e9).long()
            return gradient, positive + (numbers == 3).sum(), (numbers != 3).sum()

        x = torch.rand(8, 2, 32, 8, device="cuda")
        mask = torch.rand(8, 1, 32, 32, device="cuda") < 0.9
        mask[..., 0] = True
        args = x, mask, torch.randint(5, (500,), device="cuda")
        torch.testing.assert_close(compiled(fn)(*args), fn(*args), rtol=1e-3, atol=1e-4)
