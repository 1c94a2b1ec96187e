"""DeviceMetrics: reductions, masks, intervals, errors, state, no host reads, graph capture."""

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.metrics.device_metrics import MAX_HISTOGRAMS
from torchrl_perf.runtime import no_host_sync


class Rows:
    """A logger that keeps its rows."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, row, step=None):
        self.rows.append((step, row))

    def log_histogram(self, name, data, **kwargs):
        pass


def test_each_reduction_by_hand(device):
    metrics = DeviceMetrics(device)
    for values in ([1.0, 2.0], [6.0]):
        tensor = torch.tensor(values, device=device)
        for reduce in ("mean", "sum", "max", "last"):
            metrics.add(reduce, tensor, reduce=reduce)
    assert metrics.flush(1) == {"mean": 3.0, "sum": 9.0, "max": 6.0, "last": 6.0}


def test_mask_selects_elements_and_hides_nan(device):
    metrics = DeviceMetrics(device)
    value = torch.tensor([[1.0], [math.nan], [5.0]], device=device)
    mask = torch.tensor([[True], [False], [True]], device=device)
    for reduce in ("mean", "sum", "max", "last"):
        metrics.add(reduce, value, reduce=reduce, mask=mask)
    assert metrics.flush(0) == {"mean": 3.0, "sum": 6.0, "max": 5.0, "last": 3.0}


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, None])
def test_a_mask_for_all_is_that_of_each(reduce, dtype, device):
    together, apart = DeviceMetrics(device), DeviceMetrics(device)
    for drawn, counts in ((3.0, True), (math.nan, False), (1.0, True), (7.0, False)):
        number = drawn if dtype != torch.int64 or math.isfinite(drawn) else 9.0
        values = {name: torch.tensor(number + k, dtype=dtype or torch.float32) for k, name in enumerate("abc")}
        if dtype is None:
            values["b"] = values["b"].to(torch.float64)  # values of several dtypes
        values = {name: value.to(device) for name, value in values.items()}
        mask = torch.tensor([counts], device=device)
        together.add_all(values, reduce, mask=mask)
        for name, value in values.items():
            apart.add(name, value, reduce=reduce, mask=mask.view(()))
    row = together.flush(1)
    assert row == apart.flush(1)
    assert row["a"] == {"mean": 2.0, "sum": 4.0, "max": 3.0, "last": 1.0}[reduce]


def test_a_mask_for_all_has_one_element(device):
    with pytest.raises(ValueError, match="expected a mask that broadcasts"):
        DeviceMetrics(device).add_all({"a": torch.ones((), device=device)}, mask=torch.ones(2, device=device).bool())
    with pytest.raises(TypeError, match=r"torch\.bool"):
        DeviceMetrics(device).add_all({"a": torch.ones((), device=device)}, mask=torch.ones((), device=device))


def test_mask_broadcasts(device):
    metrics = DeviceMetrics(device)
    value = torch.arange(6.0, device=device).reshape(2, 3)
    metrics.add("row", value, mask=torch.tensor([[False], [True]], device=device))
    assert metrics.flush(0) == {"row": 4.0}


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "last", "histogram"])
def test_interval_without_an_element_reports_nothing(device, reduce):
    rows = Rows()
    metrics = DeviceMetrics(device, logger=rows)
    metrics.add("a", torch.ones(4, device=device), reduce=reduce, mask=torch.zeros(4, dtype=torch.bool, device=device))
    metrics.add("b", torch.ones(0, device=device), reduce=reduce)
    assert metrics.flush(0) == {}
    assert metrics.last_histograms == {}
    assert rows.rows == []


def test_last_keeps_the_latest_add_that_had_elements(device):
    metrics = DeviceMetrics(device)
    metrics.add("a", torch.tensor([3.0], device=device), reduce="last")
    metrics.add("a", torch.tensor([9.0], device=device), reduce="last", mask=torch.tensor([False], device=device))
    assert metrics.flush(0) == {"a": 3.0}


def test_intervals_start_empty_and_max_may_be_negative(device):
    metrics = DeviceMetrics(device)
    for step, number in enumerate((7.0, -2.0)):
        metrics.add("max", torch.tensor(number, device=device), reduce="max")
        metrics.add("sum", torch.tensor(number, device=device), reduce="sum")
        assert metrics.flush(step) == {"max": number, "sum": number}
    assert metrics.flush(2) == {}


def test_nan_is_visible_for_its_interval_only(device):
    metrics = DeviceMetrics(device)
    for reduce in ("mean", "sum", "max", "last"):
        metrics.add(reduce, torch.tensor([math.nan, 1.0], device=device), reduce=reduce)
    row = metrics.flush(0)
    assert all(math.isnan(value) for value in row.values())
    assert list(row) == ["mean", "sum", "max", "last"]
    metrics.add("mean", torch.tensor(1.0, device=device))
    assert metrics.flush(1) == {"mean": 1.0}


def test_owns_what_it_was_given(device):
    metrics = DeviceMetrics(device)
    tensor = torch.tensor([1.0, 3.0], device=device)
    metrics.add("mean", tensor)
    metrics.add("last", tensor, reduce="last")
    metrics.add_all({"x": tensor[0], "y": tensor[1]})
    tensor.fill_(99.0)
    assert metrics.flush(0) == {"mean": 2.0, "last": 2.0, "x": 1.0, "y": 3.0}


def test_counts_beyond_float32_stay_exact(device):
    metrics = DeviceMetrics(device)
    metrics.add("steps", torch.tensor(2.0**24, device=device), reduce="sum")
    for _ in range(3):
        metrics.add("steps", torch.tensor(1.0, device=device), reduce="sum")
    assert metrics.flush(0) == {"steps": 2.0**24 + 3}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_dtypes(device, dtype, masked):
    metrics = DeviceMetrics(device)
    value = torch.tensor([0, 1, 1, 0], device=device).to(dtype)
    mask = torch.ones(4, dtype=torch.bool, device=device) if masked else None
    for reduce in ("mean", "sum", "max", "last"):
        metrics.add(reduce, value, reduce=reduce, mask=mask)
    assert metrics.flush(0) == {"mean": 0.5, "sum": 2.0, "max": 1.0, "last": 0.5}


def test_gradients_are_not_tracked(device):
    metrics = DeviceMetrics(device)
    loss = torch.ones((), device=device, requires_grad=True) * 2
    for reduce in ("mean", "sum", "max", "last", "histogram"):
        metrics.add(reduce, loss, reduce=reduce)
    metrics.add_all({"a": loss, "b": loss}, reduce="max")
    assert metrics.flush(0)["a"] == 2.0
    assert not metrics._state.requires_grad


class TestAddAll:
    @pytest.mark.parametrize("reduce", ["mean", "sum", "max", "last"])
    def test_equals_single_adds(self, device, reduce):
        together, alone = DeviceMetrics(device), DeviceMetrics(device)
        for scale in (1.0, -2.0):
            values = {f"m{i}": torch.full((1,) * (i % 2), scale * i, device=device) for i in range(5)}
            together.add_all(values, reduce=reduce)
            for name, value in values.items():
                alone.add(name, value, reduce=reduce)
        assert together.flush(0) == alone.flush(0)

    def test_works_when_names_do_not_lie_side_by_side(self, device):
        metrics = DeviceMetrics(device)
        metrics.add("b", torch.tensor(1.0, device=device))
        metrics.add_all({"a": torch.tensor(2.0, device=device), "b": torch.tensor(3.0, device=device)})
        assert metrics.flush(0) == {"b": 2.0, "a": 2.0}

    def test_takes_mixed_dtypes_and_an_empty_mapping(self, device):
        metrics = DeviceMetrics(device)
        metrics.add_all({})
        metrics.add_all({"a": torch.tensor(True, device=device), "b": torch.tensor(2.5, device=device)})
        assert metrics.flush(0) == {"a": 1.0, "b": 2.5}

    def test_refuses_larger_tensors_and_histograms(self):
        metrics = DeviceMetrics("cpu")
        with pytest.raises(ValueError, match=r"one element, received shape \(2,\)"):
            metrics.add_all({"a": torch.ones(2)})
        with pytest.raises(ValueError, match="received 'histogram'"):
            metrics.add_all({"a": torch.ones(())}, reduce="histogram")
        assert metrics.names == ()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(-50, 50), st.booleans()), max_size=6), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_mean_and_sum_do_not_depend_on_the_flush_interval(batches, cuts):
    metrics = DeviceMetrics("cpu")
    total, weighted, count = 0.0, 0.0, 0
    for i, batch in enumerate([*batches, []]):
        value = torch.tensor([float(v) for v, _ in batch])
        mask = torch.tensor([m for _, m in batch], dtype=torch.bool)
        metrics.add("n", mask, reduce="sum")
        metrics.add("sum", value, reduce="sum", mask=mask)
        metrics.add("mean", value, mask=mask)
        if i in cuts or i == len(batches):
            row = metrics.flush(i)
            total += row.get("sum", 0.0)
            weighted += row.get("mean", 0.0) * row.get("n", 0.0)
            count += row.get("n", 0.0)
    chosen = [v for batch in batches for v, m in batch if m]
    assert count == len(chosen)
    assert total == sum(chosen)
    assert weighted == pytest.approx(sum(chosen), abs=1e-9)


class TestFlush:
    def test_one_row_for_all_metrics_and_extras(self):
        rows = Rows()
        metrics = DeviceMetrics("cpu", logger=rows)
        metrics.add_all({f"m{i}": torch.tensor(float(i)) for i in range(10)})
        row = metrics.flush(64, extra={"speed": 5.0})
        assert rows.rows == [(64, {**{f"m{i}": float(i) for i in range(10)}, "speed": 5.0})]
        assert row == rows.rows[0][1]

    def test_steps_never_fall_and_a_refused_flush_loses_nothing(self):
        metrics = DeviceMetrics("cpu")
        metrics.add("a", torch.tensor(1.0))
        metrics.flush(10)
        metrics.add("a", torch.tensor(2.0))
        with pytest.raises(ValueError, match="at least 10, received 9"):
            metrics.flush(9)
        assert metrics.flush(10) == {"a": 2.0}
        assert metrics.last_step == 10

    def test_extra_must_not_hide_a_metric(self):
        metrics = DeviceMetrics("cpu")
        metrics.add("a", torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"received \['a'\]"):
            metrics.flush(0, extra={"a": 2.0})
        assert metrics.flush(0) == {"a": 1.0}


class TestErrors:
    def test_reduce(self):
        metrics = DeviceMetrics("cpu")
        with pytest.raises(ValueError, match=r"'mean', 'sum', .*received 'median'"):
            metrics.add("a", torch.ones(()), reduce="median")
        metrics.add("a", torch.ones(()))
        with pytest.raises(ValueError, match="reduce='mean' as at the first add, received 'sum'"):
            metrics.add("a", torch.ones(()), reduce="sum")
        with pytest.raises(ValueError, match="received 'median'"):
            metrics.add("a", torch.ones(()), reduce="median")

    def test_capacity(self):
        metrics = DeviceMetrics("cpu", capacity=2)
        metrics.add_all({"a": torch.ones(()), "b": torch.ones(())})
        with pytest.raises(RuntimeError, match=r"at most 2 scalar metrics.*capacity > 2"):
            metrics.add("c", torch.ones(()))
        for i in range(MAX_HISTOGRAMS):
            metrics.add(f"h{i}", torch.ones(()), reduce="histogram")
        with pytest.raises(RuntimeError, match="histogram metrics"):
            metrics.add("h", torch.ones(()), reduce="histogram")
        with pytest.raises(ValueError, match="capacity=0"):
            DeviceMetrics("cpu", capacity=0)

    def test_values_and_masks(self):
        metrics = DeviceMetrics("cpu")
        with pytest.raises(TypeError, match="received float"):
            metrics.add("a", 1.0)
        with pytest.raises(TypeError, match="complex"):
            metrics.add("a", torch.ones((), dtype=torch.complex64))
        with pytest.raises(ValueError, match=r"on cpu, received shape \(2,\), dtype torch.float32 on meta"):
            metrics.add("a", torch.ones(2, device="meta"))
        with pytest.raises(TypeError, match=r"torch.bool, received torch.float32"):
            metrics.add("a", torch.ones(2), mask=torch.ones(2))
        with pytest.raises(ValueError, match=r"\(4, 3\), received \(4,\)"):
            metrics.add("a", torch.ones(4, 3), mask=torch.ones(4, dtype=torch.bool))
        assert metrics.names == ()


class TestState:
    def test_resume_goes_on_as_if_never_stopped(self, device):
        def feed(metrics, number):
            value = torch.full((2,), float(number), device=device)
            for reduce in ("mean", "sum", "max", "last", "histogram"):
                metrics.add(reduce, value, reduce=reduce)

        first, second = DeviceMetrics(device), DeviceMetrics(device, capacity=8)
        feed(first, 1)
        first.flush(5)
        feed(first, 2)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        # A name that exists before loading keeps its own slot.
        second.add("last", torch.tensor(-1.0, device=device), reduce="last")
        second.load_state_dict(torch.load(file, weights_only=True))
        for metrics in (first, second):
            feed(metrics, 4)
        with pytest.raises(ValueError, match="at least 5"):
            second.flush(4)
        assert second.flush(6) == first.flush(6) == {"mean": 3.0, "sum": 12.0, "max": 4.0, "last": 4.0}
        assert second.last_histograms == first.last_histograms

    def test_state_does_not_alias_the_accumulators(self):
        metrics = DeviceMetrics("cpu")
        metrics.add("a", torch.tensor(1.0), reduce="sum")
        state = metrics.state_dict()
        metrics.add("a", torch.tensor(1.0), reduce="sum")
        metrics.flush(0)
        assert state["metrics"]["a"]["values"][0] == 1.0

    def test_refuses_another_layout(self):
        metrics = DeviceMetrics("cpu")
        with pytest.raises(KeyError, match="missing"):
            metrics.load_state_dict({})
        with pytest.raises(ValueError, match="histogram_bins=32, received 16"):
            metrics.load_state_dict(DeviceMetrics("cpu", histogram_bins=16).state_dict())


def test_adding_reads_nothing_on_the_host():
    metrics = DeviceMetrics("cpu")
    value, mask = torch.randn(4, 3), torch.rand(4, 3) > 0.5
    with no_host_sync():
        for reduce in ("mean", "sum", "max", "last", "histogram"):
            metrics.add(reduce, value, reduce=reduce)
            metrics.add(f"masked {reduce}", value, reduce=reduce, mask=mask)
        metrics.add_all({"a": value[0, 0], "b": value[0, 1]})
        metrics.reset()


def test_compiles_without_a_graph_break(fresh_dynamo):
    metrics = DeviceMetrics("cpu")

    def step(x):
        metrics.add("mean", x)
        metrics.add("max", x, reduce="max", mask=x > 0)
        return x + 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(torch.tensor([1.0, 3.0]))
    assert metrics.flush(0) == {"mean": 2.0, "max": 3.0}


@pytest.mark.gpu
class TestGraph:
    def test_replays_accumulate_without_python(self):
        metrics = DeviceMetrics("cuda")
        x = torch.tensor([1.0, 2.0], device="cuda")
        mask = torch.tensor([True, False], device="cuda")

        def step():
            for reduce in ("mean", "sum", "max", "last", "histogram"):
                metrics.add(reduce, x, reduce=reduce, mask=mask)
            metrics.add_all({"p": x[0], "q": x[1]}, reduce="sum")

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        metrics.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
            metrics.add("new in capture", x[0], reduce="max")
        for step_number, number in enumerate((1.0, 5.0)):
            x[0] = number
            graph.replay()
            graph.replay()
            row = metrics.flush(step_number)
            assert row == {
                **dict.fromkeys(("mean", "max", "last"), number),
                "sum": 2 * number,
                "p": 2 * number,
                "q": 4.0,
                "new in capture": number,
            }
            assert sum(metrics.last_histograms["histogram"].counts) == 2

    def test_add_and_flush_pass_the_sync_debug_mode(self):
        metrics = DeviceMetrics("cuda")
        x = torch.rand(1000, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for reduce in ("mean", "sum", "max", "last", "histogram"):
                metrics.add(reduce, x, reduce=reduce, mask=x > 0.5)
            row = metrics.flush(0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert row["max"] > 0.5
