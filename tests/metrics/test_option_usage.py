"""OptionUsage: shares, synthetic histograms that trip and do not trip, one warning for each collapse."""

import warnings

import pytest
import torch

from torchrl_perf.metrics import DeviceMetrics, OptionCollapseWarning, OptionUsage
from torchrl_perf.runtime import no_host_sync

NAMES = ("open_long", "open_short", "close", "trend", "scalp", "wait")


def usage_of(shares, device="cpu", names=NAMES, **options):
    """The usage and flushed row of a batch with the given shares, in percent."""
    usage = OptionUsage(DeviceMetrics(device), names, **options)
    active = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares)).view(4, -1).to(device)
    with no_host_sync(device):
        usage.update(active, start=active % 2 == 0)
    return usage, usage.metrics.flush(1)


@pytest.mark.parametrize(
    ("shares", "trips"),
    [
        ([20, 20, 15, 15, 15, 15], False),
        ([50, 10, 10, 10, 10, 10], False),  # not above one half
        ([52, 8, 10, 10, 10, 10], True),
        ([50, 46, 4, 0, 0, 0], True),  # two in use
        ([46, 46, 8, 0, 0, 0], False),
        ([46, 46, 4, 4, 0, 0], True),
        ([0, 0, 0, 0, 0, 100], True),
    ],
)
def test_histograms(shares, trips):
    usage, row = usage_of(shares)
    for name, share in zip(NAMES, shares, strict=True):
        assert row[f"option/usage_{name}"] == pytest.approx(share / 100)
    if trips:
        with pytest.warns(OptionCollapseWarning, match=r"collapsed: expected none above 50% .* received open_long"):
            summary = usage.check(row)
    else:
        summary = usage.check(row)
    assert summary["option/max_usage"] == pytest.approx(max(shares) / 100)
    assert summary["option/num_used"] == sum(share > 5 for share in shares)
    chosen = sum(shares[::2]) / 100
    assert summary.get("option/duration", 0) == pytest.approx(1 / chosen if chosen else 0)


def test_on_the_device(device):
    usage, row = usage_of([20, 20, 15, 15, 15, 15], device)
    assert list(row) == [*usage.columns(), "option/choice_rate"]


def test_mask_leaves_steps_out():
    usage = OptionUsage(DeviceMetrics("cpu"), ("a", "b"))
    usage.update(torch.tensor([0, 1, 1, 1]), mask=torch.tensor([True, True, False, False]))
    assert usage.metrics.flush(1) == {"option/usage_a": 0.5, "option/usage_b": 0.5}


def test_one_warning_until_all_is_well_again():
    usage, bad = usage_of([0, 0, 0, 0, 0, 100])
    good = dict.fromkeys(usage.columns(), 1 / 6)
    with pytest.warns(OptionCollapseWarning):
        usage.check(bad)
    resumed = OptionUsage(usage.metrics, NAMES)
    resumed.load_state_dict(usage.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usage.check(bad)
        resumed.check(bad)
        usage.check(good)
    with pytest.warns(OptionCollapseWarning):
        usage.check(bad)


def test_two_options_trip_only_where_one_is_hardly_used():
    usage, row = usage_of([76, 24], names=("a", "b"))
    assert usage.check(row)["option/num_used"] == 2
    usage, row = usage_of([96, 4], names=("a", "b"))
    with pytest.warns(OptionCollapseWarning):
        usage.check(row)


def test_thresholds_are_arguments():
    usage, row = usage_of([30, 30, 10, 10, 10, 10], max_share=0.25)
    assert "open_long leads" in usage.verdict(dict(zip(NAMES, (0.3, 0.3, 0.1, 0.1, 0.1, 0.1), strict=True)))
    with pytest.warns(OptionCollapseWarning, match="above 25%"):
        usage.check(row)
    assert usage_of([20, 20, 15, 15, 15, 15], min_used=6, min_share=0.1)[0].verdict(dict.fromkeys(NAMES, 1 / 6)) is None


def test_an_interval_without_steps_says_nothing():
    assert OptionUsage(DeviceMetrics("cpu"), NAMES).check({"train/loss": 1.0}) == {}


@pytest.mark.parametrize("options", [{"max_share": 1.5}, {"min_share": -0.1}, {"min_used": 7}, {"names": ("a",)}])
def test_refusals(options):
    with pytest.raises(ValueError, match="expected at least two names"):
        OptionUsage(DeviceMetrics("cpu"), **({"names": NAMES} | options))
