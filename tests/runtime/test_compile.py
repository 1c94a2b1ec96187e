"""`compiled` asks for one static graph and refuses implicit CUDA graphs."""

import pytest
import torch

from torchrl_perf.runtime import compiled


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_equals_the_function(backend, fresh_dynamo):
    fn = compiled(lambda x: (x.sin() * 2).sum(), backend=backend)
    x = torch.linspace(0, 1, 5)
    torch.testing.assert_close(fn(x), (x.sin() * 2).sum(), rtol=0, atol=0)


def test_a_graph_break_is_an_error(fresh_dynamo):
    def branch(x):
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(branch, backend="eager")(torch.ones(2))


def test_options_override_the_defaults(fresh_dynamo):
    def branch(x):
        return x + 1 if x.sum() > 0 else x

    assert compiled(branch, backend="eager", fullgraph=False)(torch.ones(2)).sum() == 4


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_implicit_cuda_graphs_are_refused(mode):
    with pytest.raises(ValueError, match=r"runtime\.capture"):
        compiled(torch.sin, mode=mode)
