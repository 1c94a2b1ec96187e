"""CUDA graphs: replay equals eager, noise is fresh, memory is flat, failure is clean."""

import gc
import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_perf.runtime import CaptureError, HostSyncError, capture, compiled, is_capturing, no_host_sync
from torchrl_perf.trainers import PPOConfig, PPOTrainer

pytestmark = pytest.mark.gpu


def make_training(capturable, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optim = torch.optim.Adam(net.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=capturable)
    x, y = torch.randn(256, 16, device="cuda"), torch.randn(256, 1, device="cuda")

    def step():
        optim.zero_grad()
        loss = (net(x) - y).pow(2).mean()
        loss.backward()
        optim.step()
        return loss

    return net, optim, step


def test_an_adam_step_replayed_equals_eager():
    net, _, plain = make_training(True)
    twin, _, step = make_training(True)
    step = capture(step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable")  # the plain loop is not captured
        expected = [plain().detach().clone() for _ in range(12)]
    received = [step().clone() for _ in range(12)]
    torch.testing.assert_close(torch.stack(received), torch.stack(expected), rtol=1e-5, atol=1e-6)
    for left, right in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-6)
    assert step.captured
    assert step.mode == "graph"
    assert step.calls == 12
    assert step.capture_seconds > 0
    assert step.warmup_seconds > 0


def test_a_changed_learning_rate_is_honoured():
    net, optim, step = make_training(True)
    step = capture(step)
    for _ in range(5):
        step()
    optim.param_groups[0]["lr"].zero_()
    before = [parameter.clone() for parameter in net.parameters()]
    step()
    for left, right in zip(before, net.parameters(), strict=True):
        assert torch.equal(left, right)


def test_copies_of_parameters_with_their_graph_do_no_harm_where_the_parameters_are_named():
    net, _, plain = make_training(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable")
        for _ in range(5):
            plain()
    twin, _, step = make_training(True)
    held = [parameter.clone() for parameter in twin.parameters()]  # nodes of the default stream
    step = capture(step, parameters=twin.parameters())
    step()
    held += [parameter.clone() for parameter in twin.parameters()]
    for _ in range(4):
        step()
    assert step.captured
    for left, right in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-6)
    held[0].sum().backward()


def test_a_trainer_is_captured_while_somebody_holds_the_graph_of_its_parameters(caplog):
    small = {"num_envs": 64, "num_steps": 8, "minibatches": 2, "epochs": 2, "total_steps": 10**6}
    trainer = PPOTrainer(PPOConfig(env="CartPole", device="cuda", logger="none", **small))
    held = [parameter.clone() for parameter in trainer.policy.parameters()]
    for _ in range(4):
        trainer.step()
    assert "cannot be recorded" not in caplog.text
    assert any(not torch.equal(old, new) for old, new in zip(held, trainer.policy.parameters(), strict=True))
    trainer.close()


def test_random_numbers_are_fresh_and_follow_the_seed():
    def draws():
        torch.manual_seed(5)
        draw = capture(lambda: torch.randn(64, device="cuda"))
        return torch.stack([draw().clone() for _ in range(20)])

    first, second = draws(), draws()
    assert torch.equal(first, second)
    assert len(torch.unique(first)) == first.numel()


def test_random_numbers_equal_those_of_eager_calls():
    torch.manual_seed(5)
    expected = torch.stack([torch.randn(64, device="cuda") for _ in range(6)])
    torch.manual_seed(5)
    draw = capture(lambda: torch.randn(64, device="cuda"))
    assert torch.equal(torch.stack([draw().clone() for _ in range(6)]), expected)


def test_a_generator_of_ones_own_is_fresh_too():
    generator = torch.Generator("cuda").manual_seed(1)
    draw = capture(lambda: torch.rand(32, device="cuda", generator=generator), generators=(generator,))
    drawn = torch.stack([draw().clone() for _ in range(10)])
    assert len(torch.unique(drawn, dim=0)) == 10


def test_replay_does_not_wait_for_the_host():
    x = torch.ones(1 << 20, device="cuda")
    td = TensorDict({"a": x, "b": x}, [1 << 20])
    step = capture(lambda x, td: x + td["a"] * td["b"])
    for _ in range(4):
        step(x, td)
    with no_host_sync(trace=False):
        for _ in range(10):
            out = step(x, td)
    assert torch.equal(out, x + 1)


def test_the_static_input_itself_needs_no_copy():
    step = capture(lambda x: x * 2)
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        out = step(x)
    static = step.inputs["args[0]"]
    static.fill_(5)
    assert step(static) is out
    assert torch.equal(out, torch.full_like(out, 10))
    assert torch.equal(step(x), torch.full_like(out, 2))
    assert torch.equal(x, torch.ones_like(x))


def test_inputs_on_another_device_are_refused():
    with pytest.raises(CaptureError, match=r"cuda:0, received cpu"):
        capture(lambda x: x)(torch.ones(2))


@pytest.mark.parametrize("wait", ["item", "mask", "copy", "from_list"])
def test_waits_are_refused_before_anything_is_recorded(wait):
    x = torch.arange(4.0, device="cuda")
    waits = {
        "item": lambda: x.sum().item(),
        "mask": lambda: x[x > 1],
        "copy": x.cpu,
        "from_list": lambda: torch.tensor([1.0], device="cuda"),
    }
    step = capture(waits[wait])
    with pytest.raises(HostSyncError) as caught:
        step()
    assert caught.value.file == __file__
    assert not step.captured
    assert torch.cuda.get_sync_debug_mode() == 0
    assert_cuda_works()


def assert_cuda_works():
    """Check that allocator, random state and capture are as they should be after a failure."""
    torch.cuda.synchronize()
    assert not is_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    first, second = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.empty_cache()
    count = torch.zeros((), device="cuda")
    again = capture(lambda: count.add_(1) + torch.rand((), device="cuda") * 0)
    for k in range(1, 6):
        assert again() == k


@pytest.mark.parametrize("late", ["item", "python", "synchronize", "stream"])
def test_a_failure_while_recording_names_the_line_and_leaves_cuda_usable(late):
    calls = []
    x = torch.ones(2, device="cuda")

    def step():
        calls.append(1)
        noise = torch.randn(2, device="cuda")
        if len(calls) == 3:
            if late == "item":
                float(x[0])
            elif late == "python":
                raise KeyError("mine")
            elif late == "synchronize":
                torch.cuda.synchronize()
            else:
                torch.cuda.current_stream().synchronize()
        return x + noise

    captured = capture(step)
    captured()
    captured()
    with pytest.raises(CaptureError, match=r"call 3.*test_capture_cuda\.py:\d+") as caught:
        captured()
    assert "\n" not in str(caught.value)  # one sentence, without the driver's advice
    assert not captured.captured
    assert captured.calls == 2
    assert torch.cuda.get_sync_debug_mode() == 0
    assert_cuda_works()
    for _ in range(3):
        captured()
    assert captured.captured


def test_a_non_capturable_optimiser_is_refused():
    net = nn.Linear(2, 2).cuda()
    optim = torch.optim.Adam(net.parameters())

    def step():
        optim.zero_grad()
        net(torch.ones(2, device="cuda")).sum().backward()
        optim.step()

    step = capture(step)
    step()
    step()
    with pytest.raises(CaptureError, match="capturable"):
        step()
    assert_cuda_works()


def test_memory_is_flat_over_many_replays():
    _, _, step = make_training(True)
    step = capture(step)
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(2000):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("how", ["release", "del"])
def test_the_pool_goes_back(how):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    step = capture(lambda: torch.ones(64 << 20, device="cuda") * 2)  # 256 MB twice
    for _ in range(4):
        out = step()
    assert torch.cuda.memory_reserved() > before + (400 << 20)
    del out
    if how == "release":
        step.release()
        assert not step.captured
    else:
        del step
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (32 << 20)


def test_after_release_the_next_call_records_again():
    count = torch.zeros((), device="cuda")
    step = capture(lambda: count.add_(1) * 1)
    for k in range(1, 5):
        assert step() == k
    step.release()
    for k in range(5, 8):
        assert step() == k
        assert step.captured


def test_two_graphs_share_a_pool_in_order():
    x = torch.ones(1 << 20, device="cuda")
    first = capture(lambda: torch.sum(x * 2))
    for _ in range(3):
        first()
    second = capture(lambda: torch.sum(x * 3), pool=first.pool)
    for _ in range(3):
        second()
    assert first() == 2 << 20
    assert second() == 3 << 20


def test_a_nested_capture_becomes_part_of_the_outer_graph():
    count = torch.zeros((), device="cuda")
    inner = capture(lambda: count.add_(1) * 1)
    for _ in range(4):
        inner()
    assert inner.captured
    outer = capture(lambda: inner() * 10)
    for k in range(5, 11):
        assert outer() == 10 * k
    assert inner() == 11


def test_inside_a_foreign_capture_it_runs_inline():
    count = torch.zeros((), device="cuda")
    step = capture(lambda: count.add_(1))
    for _ in range(4):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert count == 4
    graph.replay()
    assert count == 5


@pytest.mark.slow
def test_compiled_and_captured_equals_eager(fresh_dynamo):
    count = torch.zeros(128, device="cuda")

    def step(x):
        count.add_(x)
        return (count.sin() * x).sum()

    captured = capture(step, compile=True)
    x = torch.linspace(0, 1, 128, device="cuda")
    expected = torch.zeros(128, device="cuda")
    for _ in range(6):
        expected += x
        torch.testing.assert_close(captured(x), (expected.sin() * x).sum(), rtol=1e-5, atol=1e-5)
    assert captured.captured


@pytest.mark.slow
def test_a_recompilation_while_recording_is_refused(fresh_dynamo):
    inner = compiled(lambda x: x.sin() * 2)
    sizes = iter([8, 8, 16])

    def step():
        inner(torch.ones(next(sizes), device="cuda"))

    captured = capture(step)
    captured()
    captured()
    with pytest.raises(CaptureError, match="recompile"):
        captured()
    assert_cuda_works()
