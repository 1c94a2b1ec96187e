"""Accumulators take every dtype and shape, and numbers at the ends of float64."""

import pytest
import torch

from torchrl_perf.metrics import DeviceMetrics, OptionUsage

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
]
SHAPES = [(4,), (2, 2), (4, 1, 1), (1, 4)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "last", "histogram"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_shape_and_reduction(dtype, reduce, masked):
    metrics = DeviceMetrics("cpu")
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    mask = torch.tensor([True, True, False, False])
    for shape in SHAPES:
        metrics.add("x", values.view(shape), reduce=reduce, mask=mask.view(shape) if masked else None)
    metrics.add("x", values[:0], reduce=reduce)
    metrics.add("x", values[1], reduce=reduce)
    row = metrics.flush(1)
    if reduce == "histogram":
        assert sum(metrics.last_histograms["x"].counts) == (9 if masked else 17)
        return
    expected = {"mean": 5 / 9 if masked else 9 / 17, "sum": 5 if masked else 9, "max": 1, "last": 1}
    assert row["x"] == pytest.approx(expected[reduce])


def test_sums_of_half_precision_are_exact():
    metrics = DeviceMetrics("cpu")
    value = torch.full((100_000,), 0.1, dtype=torch.float16)
    metrics.add("sum", value, reduce="sum")
    metrics.add_all({"one": value[0], "two": value[:1].bfloat16()})
    row = metrics.flush(1)
    assert row["sum"] == pytest.approx(100_000 * value[0].item(), rel=1e-12)
    assert row["one"] == value[0].item()


@pytest.mark.parametrize("bins", [2, 3, 32])
@pytest.mark.parametrize(
    "values",
    [[1e300, -1e300], [1e308, -1.7e308, 1.0], [5e-324, 1e-320], [torch.inf, -torch.inf, torch.nan, 2.0], [7.0]],
)
def test_histograms_at_the_ends_of_float64(values, bins):
    metrics = DeviceMetrics("cpu", histogram_bins=bins)
    metrics.add("x", torch.tensor(values, dtype=torch.float64), reduce="histogram")
    metrics.flush(1)
    histogram = metrics.last_histograms["x"]
    inside = [value for value in values if abs(value) <= 2.0**1000]
    assert sum(histogram.counts) == len(inside)
    assert histogram.nonfinite == len(values) - len(inside)
    assert histogram.edges[0] <= min(inside) <= max(inside) <= histogram.edges[-1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 1), (1, 2, 3)])
def test_option_usage_of_every_dtype_and_shape(dtype, shape):
    metrics = DeviceMetrics("cpu")
    usage = OptionUsage(metrics, ["a", "b", "c"], max_share=1.0, min_used=0)
    option = torch.tensor([0, 1, 1, 2, 2, 2]).to(dtype).view(shape)
    mask = torch.tensor([True, True, True, True, True, False]).view(shape)
    usage.update(option, torch.ones(shape, dtype=torch.bool), mask)
    row = metrics.flush(1)
    assert [row[f"option/usage_{name}"] for name in "abc"] == pytest.approx([0.2, 0.4, 0.4])
    assert usage.check(row)["option/duration"] == 1.0


def test_a_single_step_and_steps_without_an_option():
    metrics = DeviceMetrics("cpu")
    usage = OptionUsage(metrics, ["a", "b"])
    usage.update(torch.tensor(1))
    usage.update(torch.tensor(-1))
    row = metrics.flush(1)
    assert (row["option/usage_a"], row["option/usage_b"]) == (0.0, 0.5)
    with pytest.raises(ValueError, match="expected at least two names, all different"):
        OptionUsage(metrics, ["a", "a"])
