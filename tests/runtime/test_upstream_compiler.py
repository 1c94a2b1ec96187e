"""Pairs of operators that the compiler joins: see tests/runtime/test_upstream_torch.py for what else it is told."""

import pytest
import torch

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
        traced = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*args)
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
        found = inductor.pairing()
        assert found.uuid() == inductor.pairing().uuid() is not None
        fn = torch.compile(lambda x: x.sin() + (x + 1).sin(), options={"post_grad_custom_pre_pass": found})
        torch.testing.assert_close(fn(torch.ones(3)), torch.ones(3).sin() + torch.full((3,), 2.0).sin())
