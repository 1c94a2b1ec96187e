"""A captured function has the effect of the function, call by call; what cannot be captured is refused by name."""

import inspect
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from torchrl_perf.runtime import Captured, CaptureError, HostSyncError, capture, is_capturing
from torchrl_perf.runtime._graph import shorten
from torchrl_perf.runtime._signature import detached, signature

on_cpu = partial(capture, device="cpu")
EAGER = {"backend": "eager"}


def line_of(fn, fragment):
    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, line in enumerate(lines) if fragment in line)


class Training:
    """Two-layer regression with Adam; everything in place, so that a graph can repeat it."""

    def __init__(self, device):
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        capturable = torch.device(device).type == "cuda"
        self.optim = torch.optim.Adam(self.net.parameters(), lr=1e-2, capturable=capturable)
        self.x = torch.linspace(-1, 1, 12, device=device).reshape(4, 3)
        self.steps = torch.zeros((), device=device, dtype=torch.int64)

    def __call__(self):
        loss = (self.net(self.x) - self.x.sum(-1, keepdim=True)).pow(2).mean()
        self.optim.zero_grad(set_to_none=True)
        loss.backward()
        self.optim.step()
        self.steps.add_(1)
        return loss

    def parameters(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("calls", [1, 2, 3, 7])
def test_the_kth_call_is_the_kth_call(device, calls):
    plain, wrapped = Training(device), Training(device)
    step = capture(wrapped, device=device)
    for k in range(calls):
        expected, loss = plain(), step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
        assert not loss.requires_grad
        assert step.calls == k + 1
    assert wrapped.steps == plain.steps == calls
    torch.testing.assert_close(wrapped.parameters(), plain.parameters(), rtol=1e-5, atol=1e-6)
    assert step.captured is (step.mode == "graph" and calls > 2)


@settings(max_examples=10, deadline=None)
@given(warmup=st.integers(1, 4), calls=st.integers(1, 8), audit=st.booleans())
def test_counting_is_exact_for_any_warmup(warmup, calls, audit):
    count = torch.zeros((), dtype=torch.int64)
    step = on_cpu(lambda: count.add_(1), warmup=warmup, audit=audit)
    for _ in range(calls):
        step()
    assert count == calls == step.calls


def test_random_numbers_are_those_of_the_function():
    torch.manual_seed(0)
    expected = [torch.randn(3) for _ in range(4)]
    torch.manual_seed(0)
    draw = on_cpu(lambda: torch.randn(3))
    for numbers in expected:
        assert torch.equal(draw(), numbers)


def test_arguments_go_in_and_results_come_out(device):
    double = capture(lambda x, y: {"sum": x + y, "pair": (x, [y * 2])}, device=device)
    for k in range(5):
        x, y = torch.full((2, 3), float(k), device=device), torch.ones(2, 3, device=device)
        out = double(x, y)
        assert torch.equal(out["sum"], x + 1)
        assert torch.equal(out["pair"][0], x)
        assert torch.equal(out["pair"][1][0], y * 2)


def test_a_tensordict_goes_in_and_keeps_its_keys(device):
    def advantage(td):
        return td.set("advantage", td["next", "reward"] * 2)

    step = capture(advantage, device=device)
    for k in range(5):
        td = TensorDict({"obs": torch.ones(3), "next": {"reward": torch.full((3, 1), float(k))}}, [3]).to(device)
        out = step(td)
        assert torch.equal(out["advantage"], td["next", "reward"] * 2)
        assert "advantage" not in td.keys()


def test_key_order_does_not_matter(device):
    step = capture(lambda td: td["a"] - td["b"], device=device)
    a, b = torch.ones(2, device=device), torch.zeros(2, device=device)
    for k in range(5):
        td = TensorDict({"a": a, "b": b} if k % 2 else {"b": b, "a": a}, [2])
        assert torch.equal(step(td), a)


def test_named_tuples_come_back():
    pair = namedtuple("pair", "left right")
    weight = torch.ones(2, requires_grad=True)
    out = on_cpu(lambda: pair(weight * 2, None))()
    assert type(out) is pair
    assert not out.left.requires_grad


def test_no_type_of_an_argument_or_result_is_new_to_tensordict(monkeypatch):
    """Compiled code asks how many types tensordict has met, and would be compiled anew while a graph is recorded."""
    met = {}
    monkeypatch.setattr("tensordict.utils._TENSORCLASS_MEMO", met)
    value = (None, 1, 2.0, "a", True, [torch.zeros(1)], {"b": (torch.zeros(1),)})
    assert signature(value) == signature(detached(value))
    assert met == {}


def test_results_are_detached_in_every_container():
    weight = torch.ones(2, requires_grad=True)
    step = on_cpu(lambda: (weight * 2, {"a": [weight * 3]}, TensorDict({"b": weight * 4}, [2]), 5))
    tensor, mapping, td, number = step()
    assert not tensor.requires_grad
    assert not mapping["a"][0].requires_grad
    assert not td["b"].requires_grad
    assert number == 5


def test_a_preallocated_result_is_the_same_object():
    batch = TensorDict({"a": torch.zeros(2)}, [2])
    assert on_cpu(lambda: batch)() is batch


def test_a_host_wait_is_refused_with_file_line_and_operation(device):
    def waits():
        total = torch.ones(2, device=device).sum()
        if total > 1:
            return total
        return -total

    step = capture(waits, device=device)
    with pytest.raises(HostSyncError) as caught:
        step()
    error = caught.value
    assert error.op == "_local_scalar_dense"
    assert (Path(error.file), error.line) == (Path(__file__), line_of(waits, "if total > 1"))
    assert "waits" in error.__notes__[0]
    assert not step.captured
    assert step.calls == 0
    assert not is_capturing()


def test_a_refused_function_is_audited_again():
    fail = [True]

    def waits(x):
        return x.sum().item() if fail[0] else x.sum()

    step = on_cpu(waits)
    with pytest.raises(HostSyncError):
        step(torch.ones(2))
    with pytest.raises(HostSyncError):
        step(torch.ones(3))
    fail[0] = False
    assert step(torch.ones(4)) == 4


def test_without_audit_a_cpu_function_may_wait():
    assert on_cpu(lambda: torch.ones(2).sum().item(), audit=False)() == 2.0


@pytest.mark.parametrize("warm", [0, 1, 3])
def test_other_shapes_dtypes_and_counts_are_refused(device, warm):
    step = capture(lambda x: x + 1, device=device)
    x = torch.ones(2, 3, device=device)
    for _ in range(warm + 1):
        step(x)
    for other, word in [(x[:1], r"float32\[1, 3\]"), (x.double(), "float64"), (x.int(), "int32")]:
        with pytest.raises(CaptureError, match=rf"expected float32\[2, 3\] .* args\[0\], received {word}"):
            step(other)
    with pytest.raises(CaptureError, match="missing"):
        step()
    with pytest.raises(CaptureError, match="new"):
        step(x, x)
    assert torch.equal(step(x), x + 1)


def test_other_keys_are_refused():
    step = on_cpu(lambda td: td["a"] + 1)
    step(TensorDict({"a": torch.ones(2)}, [2]))
    with pytest.raises(CaptureError, match="'b'"):
        step(TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2]))


def test_a_result_that_changes_shape_is_refused(device):
    sizes = iter([2, 3, 4])
    step = capture(lambda: torch.ones(next(sizes), device=device), device=device)
    step()
    with pytest.raises(CaptureError, match=r"received a change: .*expected float32\[2\].*received float32\[3\]"):
        step()


def test_a_number_that_changes_is_refused():
    count = iter(range(5))
    step = on_cpu(lambda: next(count))
    step()
    with pytest.raises(CaptureError, match="expected 0 at the value, received 1"):
        step()


@pytest.mark.parametrize("bad", [3, 0.5, [1, 2], "x", None])
def test_arguments_that_are_no_tensors_are_refused(bad):
    with pytest.raises(CaptureError, match="0-d tensor"):
        on_cpu(lambda x: x)(bad)


def test_an_argument_that_needs_a_gradient_is_refused():
    with pytest.raises(CaptureError, match="detached"):
        on_cpu(lambda x: x * 2)(torch.ones(2, requires_grad=True))


def test_an_argument_on_another_device_is_refused():
    with pytest.raises(CaptureError, match=r"tensor on cpu, received meta"):
        on_cpu(lambda x: x)(torch.ones(2, device="meta"))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: TensorDict({"a": x}, [2])])
def test_writing_to_an_argument_is_refused(wrap):
    def write(value):
        (value if isinstance(value, torch.Tensor) else value["a"]).add_(1)

    with pytest.raises(CaptureError, match=r"args\[0\].* in place"):
        on_cpu(write)(wrap(torch.ones(2)))


def test_nested_captures_run_inline(device):
    seen = []
    count = torch.zeros((), device=device)
    inner = capture(lambda: (seen.append(is_capturing()), count.add_(1))[1] * 2, device=device)

    def outer_step():
        return inner() + 1

    outer = capture(outer_step, device=device)
    for k in range(1, 6):
        assert outer() == 2 * k + 1
    assert not inner.captured
    assert all(seen)
    assert not is_capturing()


def test_an_inner_capture_is_audited_by_the_outer_one():
    inner = on_cpu(lambda: torch.ones(()).item())
    with pytest.raises(HostSyncError, match="item"):
        on_cpu(lambda: inner() + 1)()


def test_exceptions_of_the_function_pass(device):
    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(fails, device=device)()
    assert not is_capturing()


def test_compile_on_a_cpu_is_eager_first_and_compiled_after(fresh_dynamo):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    count = torch.zeros(2)

    def step(x):
        count.add_(x)
        return count * 2

    captured = on_cpu(step, compile={"backend": backend})
    assert captured.mode == "compile"
    x = torch.ones(2)
    for k in range(1, 5):
        assert torch.equal(captured(x), torch.full((2,), 2.0 * k))
        assert len(graphs) == (k > 1)


def test_a_compiled_function_inside_is_audited_eagerly(fresh_dynamo):
    inner = torch.compile(lambda x: x.sin(), backend="eager", fullgraph=True)
    step = on_cpu(lambda x: inner(x) * 2)
    x = torch.ones(2)
    for _ in range(3):
        assert torch.equal(step(x), x.sin() * 2)


def test_a_captured_function_may_be_compiled(fresh_dynamo):
    inner = on_cpu(lambda x: x * 3)
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 4.0))


def test_release_on_a_cpu_does_nothing_and_calls_go_on():
    count = torch.zeros(())
    step = on_cpu(lambda: count.add_(1))
    step()
    step.release()
    step.release()
    assert step() == 2
    assert step.pool is None
    assert step.inputs == {}
    assert step.capture_seconds == 0
    assert step.warmup_seconds > 0


def test_modes():
    assert on_cpu(lambda: None).mode == "eager"
    assert on_cpu(lambda: None, compile=True).mode == "compile"
    assert isinstance(on_cpu(lambda: None), Captured)


@pytest.mark.parametrize("options", [{"warmup": 0}, {"warmup": 1, "compile": EAGER}])
def test_too_small_a_warmup_is_refused(options):
    with pytest.raises(CaptureError, match="warmup >= "):
        on_cpu(lambda: None, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused_at_construction():
    with pytest.raises(CaptureError, match=r'device="cuda", received none. Remedy: pass device="cpu"'):
        capture(lambda: None, device="cuda")


def test_other_devices_are_refused():
    with pytest.raises(CaptureError, match="meta"):
        capture(lambda: None, device="meta")


def test_of_the_drivers_error_the_first_line_is_kept():
    long = RuntimeError("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be ...")
    other = RuntimeError("mine\nin two lines")
    for error in (long, other, KeyError("key")):
        shorten(error)
    assert str(long) == "CUDA error: operation not permitted when stream is capturing"
    assert str(other) == "mine\nin two lines"
