"""Micro-batches after an out-of-memory error: the same gradient, the same numbers drawn, nothing left behind."""

import gc
import math
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from torchrl_perf.runtime import CaptureError, capture
from torchrl_perf.runtime.oom import MicroBatches, OutOfMemoryWarning, is_out_of_memory, parts_of, refused

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def limited(limit, fn):
    """A function of rows that runs out of memory for more than ``limit`` of them."""

    def run(batch):
        if len(batch) > limit:
            raise torch.OutOfMemoryError(f"no room for {len(batch)} rows")
        return fn(batch)

    return run


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 40), parts=st.integers(1, 40))
def test_parts_hold_every_row_in_order_and_their_weights_sum_to_one(rows, parts):
    parts = min(parts, rows)
    pieces = parts_of(torch.arange(rows), parts)
    assert torch.equal(torch.cat([part.batch for part in pieces]), torch.arange(rows))
    sizes = [len(part.batch) for part in pieces]
    assert len(sizes) == parts and max(sizes) - min(sizes) <= 1
    assert math.isclose(sum(part.weight for part in pieces), 1.0)


def test_weights_of_parts_are_shares_of_the_importance_weights():
    pieces = parts_of(torch.arange(4), 2, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert [float(part.weight) for part in pieces] == pytest.approx([0.3, 0.7])
    assert [part.share for part in pieces] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected
    wrapped = CaptureError("recording")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected


def test_a_real_allocation_that_cannot_be_made_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [64, 10, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_is_that_of_the_whole_batch(device, rows, weighted):
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).to(device, torch.float64)
    data = {"x": torch.randn(rows, 5), "y": torch.randn(rows, 1), "w": torch.rand(rows)}
    batch = TensorDict(data, [rows]).to(device).to(torch.float64)
    weights = batch["w"] if weighted else None

    def loss_fn(part):
        error = (net(part["x"]) - part["y"]).square().squeeze(-1)
        return (error * part["w"]).sum() / part["w"].sum() if weighted else error.mean()

    expected = torch.autograd.grad(loss_fn(batch), list(net.parameters()))
    micro = MicroBatches(device)
    with pytest.warns(OutOfMemoryWarning, match=f"{rows} rows"):
        loss = micro.backward(limited(max(1, rows // 4), loss_fn), batch, net.parameters(), weights=weights)
    assert micro.parts >= 3 and float(micro.count) == micro.parts
    torch.testing.assert_close(loss, loss_fn(batch).detach(), rtol=1e-12, atol=1e-12)
    for param, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-12, atol=1e-12)


def test_it_says_so_once_and_stays_split():
    micro, sizes = MicroBatches("cpu"), []
    param = nn.Parameter(torch.ones(()))

    def loss_fn(part):
        sizes.append(len(part))
        return (param * part).mean()

    with pytest.warns(OutOfMemoryWarning, match="4 micro-batches of 4 rows, with the same gradient") as said:
        micro.backward(limited(4, loss_fn), torch.ones(16), [param])
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        micro.backward(limited(4, loss_fn), torch.ones(16), [param])
    assert sizes == [4] * 8
    assert MicroBatches("cpu").parts == 1


def test_an_attempt_that_failed_leaves_no_draw_no_gradient_and_no_memory():
    micro = MicroBatches("cpu")
    param = nn.Parameter(torch.ones(8))
    held, draws, undone = [], [], []

    def attempt(parts):
        draws.append(torch.rand(3))
        if parts == 1:
            intermediate = param * 2
            held.append(weakref.ref(intermediate))
            intermediate.sum().backward()
            raise torch.OutOfMemoryError("no room")
        assert param.grad is None
        assert held[0]() is None
        return parts

    def undo():
        undone.append(True)
        param.grad = None

    state = torch.get_rng_state()
    with pytest.warns(OutOfMemoryWarning):
        assert micro.run(attempt, 8, undo=undo) == 2
    assert torch.equal(*draws) and undone == [True]
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(3), draws[0])
    gc.collect()


def test_a_row_that_does_not_fit_is_an_error_with_a_remedy():
    param = nn.Parameter(torch.ones(()))
    with pytest.raises(torch.OutOfMemoryError, match=r"one row at a time.*Remedy") as caught:
        MicroBatches("cpu").backward(limited(0, lambda part: (param * part).mean()), torch.ones(6), [param])
    assert is_out_of_memory(caught.value.__cause__)


def test_disabled_passes_the_error_on_as_it_came():
    error = torch.OutOfMemoryError("as it comes")

    def attempt(parts):
        raise error

    with pytest.raises(torch.OutOfMemoryError) as caught:
        MicroBatches("cpu", enabled=False).run(attempt, 8)
    assert caught.value is error


def test_other_errors_pass():
    def attempt(parts):
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        MicroBatches("cpu").run(attempt, 8)


def test_refused_names_what_did_not_fit():
    with pytest.raises(torch.OutOfMemoryError, match=r"collect: expected.*no room\. Remedy: fewer num_envs\."):  # noqa: SIM117
        with refused("collect", "fewer num_envs"):
            raise torch.OutOfMemoryError("no room\nand many lines")
    with pytest.raises(RuntimeError, match="shapes"), refused("collect", "fewer num_envs"):
        raise RuntimeError("shapes")


def test_state_keeps_the_number_of_parts():
    micro = MicroBatches("cpu")
    micro.load_state_dict({"parts": 4})
    assert micro.state_dict() == {"parts": 4} and float(micro.count) == 4


def test_call_passes_through_what_is_not_captured():
    assert MicroBatches("cpu").call(lambda a, b: a + b, 1, 2) == 3
    step = capture(lambda: torch.ones(2), device="cpu")
    assert torch.equal(MicroBatches("cpu").call(step), torch.ones(2))


@pytest.mark.gpu
# of the recording that broke off
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("when", ["warm-up", "recording"])
def test_a_graph_is_recorded_anew_in_parts(when):
    device = torch.device("cuda", torch.cuda.current_device())
    param = nn.Parameter(torch.ones(64, device=device))
    batch = torch.randn(256, 64, device=device)
    micro, calls, grads = MicroBatches(device), [], torch.zeros(64, device=device)

    def loss_fn(part):
        calls.append((len(part), micro.recording))
        if len(part) > 64 and (when == "warm-up" or micro.recording):
            raise torch.OutOfMemoryError("no room")
        return (param * part).square().mean()

    def update():
        micro.backward(loss_fn, batch, [param])
        grads.copy_(param.grad)
        param.grad = None

    step = capture(update, device=device, audit=False)
    with pytest.warns(OutOfMemoryWarning):
        for _ in range(8):
            micro.call(step)
    assert step.captured and micro.parts == 4
    expected = torch.autograd.grad((param * batch).square().mean(), param)[0]
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)
    count = len(calls)
    micro.call(step)
    assert len(calls) == count  # a replay
    step.release()


@pytest.mark.gpu
def test_real_memory_runs_out_and_the_update_goes_on():
    device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    net = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 1)).to(device)
    batch = torch.randn(2**15, 64, device=device)
    expected = torch.autograd.grad(net(batch).square().mean(), list(net.parameters()))
    expected = [grad.clone() for grad in expected]
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved(device)
    try:
        torch.cuda.set_per_process_memory_fraction((used + 2**29) / total, device)  # of 1.5 GiB of activations
        micro = MicroBatches(device)
        with pytest.warns(OutOfMemoryWarning):
            micro.backward(lambda part: net(part).square().mean(), batch, net.parameters())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert micro.parts > 1
    for param, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-4, atol=1e-6)
    assert free > 0
