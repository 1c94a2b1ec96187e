"""``compiled`` asks for one static graph and refuses implicit CUDA graphs."""

import functools

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


def test_a_mode_is_added_to_the_packages_options(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch, "compile", lambda fn, **settings: seen.update(settings) or fn)
    compiled(torch.sin, mode="max-autotune-no-cudagraphs", options={"max_autotune": False})
    assert "mode" not in seen
    assert seen["options"]["fallback_random"]
    assert seen["options"]["coordinate_descent_tuning"]
    assert seen["options"]["max_autotune"] is False
    compiled(torch.sin, mode="default")
    assert "max_autotune" not in seen["options"]


def test_launches_overlap_and_pairs_are_joined_on_cuda_alone(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch, "compile", lambda fn, **settings: seen.update(settings["options"]) or fn)
    compiled(torch.sin, device=torch.device("cpu"))
    assert "triton.enable_pdl" not in seen and "post_grad_custom_pre_pass" not in seen
    compiled(torch.sin, device=torch.device("cuda"))
    assert seen["triton.enable_pdl"] and seen["post_grad_custom_pre_pass"].uuid() is not None


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"expected a mode among .* received 'fast'"):
        compiled(torch.sin, mode="fast")


class Counter:
    def __init__(self, start):
        self.total = torch.tensor(float(start))

    def plain(self, x):
        return self.total + x

    @torch.no_grad()
    def decorated(self, x):
        return self.total + x


def test_a_wrapper_of_what_is_no_function_compiles(fresh_dynamo):
    class Doubles:
        def __call__(self, x):
            return 2 * x

    inner = Doubles()

    @functools.wraps(inner, assigned=())
    def outer(x):
        return inner(x) + 1

    assert compiled(outer, backend="eager")(torch.ones(2)).tolist() == [3, 3]


@pytest.mark.parametrize("name", ["plain", "decorated"])
def test_objects_beyond_the_limit_of_recompilations_do_not_share_it(name, fresh_dynamo):
    x = torch.ones(2, requires_grad=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        made = [compiled(getattr(Counter(start), name), backend="eager") for start in range(5)]
        results = [fn(x) for fn in made]
    assert [result[0].item() for result in results] == [1, 2, 3, 4, 5]
    assert all(result.requires_grad == (name == "plain") for result in results)
