"""Both audits find each operation of torch that waits, and none that does not."""

import pytest
import torch
from waiting_operations import audited, found
from waits_of_torch import OPERATIONS, tensors

from torchrl_perf.runtime import HostSyncError, host_syncs, no_host_sync

OPERATIONS = [(name, fn, waits) for name, fn, waits, _ in OPERATIONS]


def check(number, waits, report):
    if waits is True or waits is False:
        assert (number > 0) is waits, report
    else:
        assert number == waits, report


@pytest.mark.parametrize(("name", "fn", "waits"), OPERATIONS, ids=[name for name, *_ in OPERATIONS])
class TestOperations:
    def test_host_syncs(self, name, fn, waits):
        values = tensors()
        with host_syncs("cpu") as report:
            fn(values)
        check(report.total, waits, str(report))

    def test_no_host_sync(self, name, fn, waits):
        values = tensors()
        if waits:
            with pytest.raises(HostSyncError, match="Remedy: "), no_host_sync("cpu"):
                fn(values)
        else:
            with no_host_sync("cpu"):
                fn(values)

    def test_script_audit(self, name, fn, waits):
        values = tensors()
        counts = found(audited(lambda: fn(values)))
        check(sum(counts.values()), waits, counts)


def test_what_is_computed_from_a_copy_on_the_host_waits_for_nothing():
    x = torch.rand(6)
    with host_syncs("cpu") as report:
        y = x.cpu()
        (y * 2).sum().item(), (y > 0.5).nonzero(), float(y.max())
    assert report.total == 1
    with host_syncs("cpu") as report:
        (x.cpu() + x).sum().item()
    assert report.total == 2


def test_everything_is_as_it_was_afterwards():
    before = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "asarray", "quantile", "tensor_split")}
    methods = {name: getattr(torch.Tensor, name) for name in ("cpu", "__repr__", "__reduce_ex__", "new_tensor")}
    x = torch.rand(3)
    audited(x.cpu)
    assert all(getattr(torch, name) is value for name, value in before.items())
    assert all(getattr(torch.Tensor, name) is value for name, value in methods.items())
    assert x.cpu() is x
