"""The audit finds each kind of host wait at its exact line, and nothing else."""

import contextlib
import inspect
import pickle
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.modules import TanhNormal

from torchrl_perf.runtime import HostSyncError, capture, host_syncs, no_host_sync


def line_of(fn, fragment):
    """Return the line number of the line of ``fn`` that contains ``fragment``."""
    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, line in enumerate(lines) if fragment in line)


def use_bool(x):
    if (x > 0).any():
        return 1
    return 0


def assign_mask(x):
    x[x > 2] = x.new_zeros(3)


WAITS = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "float": (lambda x: float(x[0]), "_local_scalar_dense"),
    "int": (lambda x: int(x[0]), "_local_scalar_dense"),
    "bool": (use_bool, "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 2), "nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 2), "masked_select"),
    "mask": (lambda x: x[x > 2], "index"),
    "byte_mask": (lambda x: torch.ops.aten.index(x, [(x > 2).to(torch.uint8)]), "index"),
    "assign_mask": (assign_mask, "index_put_"),
    "unique": (lambda x: x.unique(), "_unique2"),
    "unique_dim": (lambda x: torch.unique(x[None], dim=0), "unique_dim"),
    "unique_consecutive": (torch.unique_consecutive, "unique_consecutive"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "allclose": (lambda x: torch.allclose(x, x), "allclose"),
    "repeat": (lambda x: x.repeat_interleave(torch.ones(6, dtype=torch.long, device=x.device)), "repeat_interleave"),
    "bincount": (lambda x: torch.bincount(x.long()), "bincount"),
    "one_hot": (lambda x: nn.functional.one_hot(x.long()), "_local_scalar_dense"),
    "validated": (lambda x: torch.distributions.Normal(x, x + 1, validate_args=True), "_local_scalar_dense"),
}
FREE = {
    "where": lambda x: torch.where(x > 2, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 2, 0.0),
    "index": lambda x: x[torch.tensor([0, 1])],
    "index_put": lambda x: x.index_put((torch.tensor([0, 1]),), torch.zeros(2)),
    "slice": lambda x: x[1:3] + x[0],
    "cast": lambda x: x.to(torch.float64).copy_(x),
    "one_hot": lambda x: nn.functional.one_hot(x.long(), 6),
    "repeat": lambda x: (x.repeat_interleave(2), x.repeat_interleave(torch.ones(6).long(), output_size=6)),
    "inverse": lambda x: torch.linalg.inv_ex(x.diag() + torch.eye(6)),
    "categorical": lambda x: torch.distributions.Categorical(logits=x, validate_args=False).sample(),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_kind_of_wait_is_counted_and_refused(name):
    fn, op = WAITS[name]
    x = torch.arange(6.0)
    with host_syncs("cpu") as report:
        fn(x)
    assert {row.op for row in report.rows} == {op}
    assert {Path(row.file) for row in report.rows} == {Path(__file__)}
    with pytest.raises(HostSyncError, match="Remedy") as caught, no_host_sync("cpu"):
        fn(x)
    assert caught.value.op == op
    assert caught.value.remedy


@pytest.mark.parametrize("name", FREE)
def test_sync_free_code_passes(name):
    x = torch.arange(6.0)
    with host_syncs("cpu") as report, no_host_sync("cpu"):
        FREE[name](x)
    assert report.total == 0
    assert report.rows == ()


def test_file_line_source_and_count_are_exact():
    def step(x):
        total = 0.0
        for _ in range(3):
            total += x.sum().item()
        return bool(x[0]), total

    with host_syncs("cpu") as report:
        step(torch.ones(4))
    first, second = report.rows
    assert (first.op, first.count, first.line) == ("_local_scalar_dense", 3, line_of(step, ".item()"))
    assert (second.count, second.line) == (1, line_of(step, "bool(x[0])"))
    assert first.source == "total += x.sum().item()"
    assert Path(first.file) == Path(__file__) == Path(first.library_file)
    assert first.library_line == first.line
    assert report.total == 4
    assert "4 host waits at 2 lines" in str(report)
    assert f"{__file__}:{first.line}" in str(report)


def test_the_users_line_and_the_librarys_line_differ_inside_a_library():
    def read(td):
        return (td == td).all()

    td = TensorDict({"a": torch.ones(2)}, [2])
    with host_syncs("cpu") as report:
        read(td)
    assert report.total > 0
    for row in report.rows:
        assert (Path(row.file), row.line) == (Path(__file__), line_of(read, "td == td"))
        assert "tensordict" in row.library_file


class Reader(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        grad.sum().item()
        return grad


class Masker(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.masked_select(grad, grad > 0)


@pytest.mark.parametrize(("node", "op"), [(Reader, "_local_scalar_dense"), (Masker, "masked_select")])
def test_the_backward_pass_is_seen(node, op):
    x = torch.ones(3, requires_grad=True)
    loss = node.apply(x).sum()
    with host_syncs("cpu") as report:
        loss.backward()
    (row,) = report.rows
    assert row.op == op
    assert Path(row.file) == Path(__file__)
    with pytest.raises(HostSyncError, match=op), no_host_sync("cpu"):
        node.apply(x).sum().backward()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_the_optimisers_own_cpu_counters_are_not_reported(optimizer, options):
    net = nn.Linear(3, 2)
    optim = optimizer(net.parameters(), lr=1e-3, **options)
    with no_host_sync("cpu"):
        for _ in range(2):
            optim.zero_grad()
            net(torch.ones(4, 3)).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optim.step()


def test_a_read_that_the_optimiser_does_not_cause_is_reported_next_to_one_that_it_does():
    parameter = nn.Parameter(torch.ones(2))
    optim = torch.optim.Adam([parameter])
    with host_syncs("cpu") as report:
        parameter.sum().backward()
        optim.step()
        nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    (row,) = report.rows
    assert "error_if_nonfinite" in row.source


def test_a_lazy_storage_with_counters_on_the_cpu_is_quiet():
    storage_module = pytest.importorskip("torchrl.data.replay_buffers")
    storage = storage_module.LazyTensorStorage(8, compilable=True)
    with no_host_sync("cpu"):
        storage._bump_mutation_revision()
        assert storage._mutation_revision == 1
        assert storage._last_cursor_index is None


def test_nested_contexts_each_count_what_is_inside():
    x = torch.ones(2)
    with host_syncs("cpu") as outer:
        float(x[0])
        with host_syncs("cpu") as inner:
            float(x[1])
    float(x[0])
    assert (outer.total, inner.total) == (2, 1)


def test_the_first_error_survives_code_that_swallows_it():
    with pytest.raises(HostSyncError, match="item"), no_host_sync("cpu"), contextlib.suppress(Exception):
        torch.ones(()).item()


def test_the_first_error_survives_code_that_wraps_it():
    def wrapping():
        try:
            torch.ones(()).item()
        except Exception as error:
            raise ValueError("wrapped") from error

    with pytest.raises(HostSyncError) as caught, no_host_sync("cpu"):
        wrapping()
    assert isinstance(caught.value.__cause__, ValueError)


def test_other_exceptions_pass_and_leave_no_mode_behind():
    for context in (host_syncs, no_host_sync):
        with pytest.raises(KeyError, match="mine"), context("cpu"):
            raise KeyError("mine")
    assert torch.ones(()).item() == 1.0
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_compiled_functions_run_eagerly_inside(fresh_dynamo):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    fn = torch.compile(lambda x: x.sin() * 2, backend=backend, fullgraph=True)
    with no_host_sync("cpu"):
        fn(torch.ones(2))
    assert not calls
    fn(torch.ones(2))
    assert len(calls) == 1


def test_it_can_be_used_in_several_threads_and_gives_the_compiler_back(fresh_dynamo):
    totals = []
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first():
        with host_syncs("cpu"):
            first_in.set()
            second_in.wait(10)
        first_out.set()

    def second():
        first_in.wait(10)
        with host_syncs("cpu"):
            second_in.set()
            first_out.wait(10)

    def work():
        with host_syncs("cpu") as report:
            for _ in range(5):
                torch.ones(()).item()
        totals.append(report.total)

    threads = [threading.Thread(target=target) for target in (first, second, work, work, work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [5, 5, 5]
    graphs = []
    torch.compile(torch.sin, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(torch.ones(2))
    assert len(graphs) == 1


def test_the_error_survives_pickling():
    with pytest.raises(HostSyncError) as caught, no_host_sync("cpu"):
        torch.ones(()).item()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.op, copy.file, copy.line, copy.remedy) == (
        caught.value.op,
        caught.value.file,
        caught.value.line,
        caught.value.remedy,
    )
    assert str(copy) == str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("context", [host_syncs, no_host_sync])
def test_cuda_where_there_is_none_is_refused(context):
    with pytest.raises(RuntimeError, match="received none"), context("cuda"):
        pass


@pytest.mark.parametrize("context", [host_syncs, no_host_sync])
def test_other_devices_are_refused(context):
    with pytest.raises(ValueError, match="meta"), context("meta"):
        pass


def test_without_trace_nothing_is_checked_on_a_cpu():
    with no_host_sync("cpu", trace=False):
        assert torch.ones(()).item() == 1.0


@settings(max_examples=15, deadline=None)
@given(reads=st.lists(st.sampled_from(["item", "mask", "free"]), max_size=8))
def test_the_total_is_the_number_of_waits(reads):
    x = torch.arange(4.0)
    actions = {"item": lambda: float(x[1]), "mask": lambda: x[x > 1], "free": lambda: x + 1}
    with host_syncs("cpu") as report:
        for read in reads:
            actions[read]()
    assert report.total == sum(read != "free" for read in reads)
    assert report.total == sum(row.count for row in report.rows)


@pytest.mark.gpu
class TestOnCuda:
    @pytest.mark.parametrize("name", sorted(set(WAITS) - {"numpy"}))
    def test_each_kind_of_wait(self, name):
        fn, _ = WAITS[name]
        x = torch.arange(6.0, device="cuda")
        with host_syncs() as report:
            fn(x)
        assert report.total > 0
        assert Path(report.rows[0].file) == Path(__file__)
        before = torch.cuda.get_sync_debug_mode()
        with pytest.raises(HostSyncError) as caught, no_host_sync():
            fn(x)
        assert Path(caught.value.file) == Path(__file__)
        assert torch.cuda.get_sync_debug_mode() == before

    def test_reads_of_cpu_tensors_are_not_waits(self):
        with host_syncs() as report, no_host_sync():
            torch.ones(3)[torch.ones(3) > 0].sum().item()
        assert report.total == 0

    def test_blocking_copies_are_waits_and_pinned_ones_are_not(self):
        device, host, pinned = torch.ones(4, device="cuda"), torch.ones(4), torch.ones(4).pin_memory()
        copies = [device.cpu, lambda: host.to("cuda"), lambda: device.copy_(host), lambda: host.copy_(device)]
        for copy in copies:
            with host_syncs() as report:
                copy()
            assert report.total == 1
            with pytest.raises(HostSyncError, match="cop"), no_host_sync():
                copy()
        with no_host_sync(), host_syncs() as report:
            pinned.copy_(device, non_blocking=True)
            device.copy_(pinned, non_blocking=True)
            pinned.to("cuda", non_blocking=True)
        assert report.total == 0
        torch.cuda.synchronize()

    def test_a_cpu_index_is_a_wait(self):
        x = torch.ones(4, device="cuda")
        with host_syncs() as report:
            x[torch.tensor([0, 1])]
        assert report.total >= 1
        with pytest.raises(HostSyncError) as caught, no_host_sync():
            x[torch.tensor([0, 1])]
        assert "torch.tensor([0, 1])" in caught.value.source

    def test_a_tensor_made_from_python_data_is_a_wait(self):
        with host_syncs() as report:
            torch.tensor([1.0, 2.0], device="cuda")
        assert report.total >= 1
        with pytest.raises(HostSyncError), no_host_sync():
            torch.tensor([1.0, 2.0], device="cuda")

    def test_filling_a_mask_with_a_number_is_free(self):
        x = torch.arange(4.0, device="cuda")
        with no_host_sync(), host_syncs() as report:
            x[x > 1] = 0.0
        assert report.total == 0

    def test_the_backward_thread_is_seen(self):
        x = torch.ones(3, requires_grad=True, device="cuda")
        with host_syncs() as report:
            Reader.apply(x).sum().backward()
        (row,) = report.rows
        assert "grad.sum().item()" in row.source
        with pytest.raises(HostSyncError, match="item"), no_host_sync():
            Reader.apply(x).sum().backward()

    def test_without_trace_only_the_sync_debug_mode_checks(self):
        x = torch.ones(3, device="cuda")
        with pytest.raises(HostSyncError) as caught, no_host_sync(trace=False):
            x.sum().item()
        assert caught.value.source == "x.sum().item()"
        assert torch.cuda.get_sync_debug_mode() == 0


def test_a_refused_wait_of_a_library_names_what_replaces_it():
    # asked of the host wherever it is made, but for recordings and compilers
    with pytest.raises(HostSyncError, match="Remedy: use SquashedNormal, whose bounds are buffers") as caught:
        capture(lambda: TanhNormal(torch.zeros(2, 1), torch.ones(2, 1)).rsample(), device="cpu")()
    assert pickle.loads(pickle.dumps(caught.value)).remedy == caught.value.remedy
    with pytest.raises(HostSyncError) as caught, no_host_sync("cpu"):
        torch.ones(2).sum().item()
    assert "SquashedNormal" not in caught.value.remedy
