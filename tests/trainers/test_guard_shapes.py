"""NumericalGuard on batches of every shape and dtype, and the functions behind it."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.functional.rows.nonfinite import count_nonfinite, finite_rows, first_nonfinite, repaired_rows
from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.runtime import LossScale
from torchrl_perf.trainers.run.numerics import NumericalGuard

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "place", "where"), [((4,), (2,), (0, 2)), ((3, 4), (1, 2), (1, 2)), ((3, 4, 2), (1, 2, 1), (1, 2))]
)
def test_the_first_fault_is_named_in_every_shape_and_dtype(shape, place, where, dtype):
    iteration = torch.ones(())
    guard = NumericalGuard(DeviceMetrics("cpu"), iteration)
    entries = {
        "observation": torch.zeros(*shape, 5, dtype=dtype),
        "flat": torch.zeros(shape),
        "mask": torch.ones(shape) > 0,
    }
    batch = TensorDict(entries, shape)
    guard.check(batch)
    guard.report()
    assert guard.verdict(guard.metrics.flush(1)) is None
    batch["observation"][place][3] = torch.inf
    guard.check(batch)
    guard.report()
    fault = guard.verdict(guard.metrics.flush(2)).fault
    assert (fault.key, fault.kind, fault.env, fault.step) == ("observation", "inf", *where)


def test_batches_without_floats_and_without_dims():
    guard = NumericalGuard(DeviceMetrics("cpu"), torch.ones(()))
    guard.check(TensorDict({"count": torch.zeros(3, 4, dtype=torch.int64)}, [3, 4]))
    guard.report()
    assert guard.verdict(guard.metrics.flush(1)) is None
    for shape in ([], [0, 4]):
        with pytest.raises(ValueError, match=r"expected a batch \[N, T\] or \[T\], received"):
            NumericalGuard(DeviceMetrics("cpu"), torch.ones(())).check(TensorDict({}, shape))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
@pytest.mark.parametrize("transposed", [False, True])
def test_functions_of_every_dtype_and_layout(dtype, transposed):
    values = torch.ones(6, 4).to(dtype)
    bad = dtype.is_floating_point
    if bad:
        values[2, 1], values[5, 0] = -torch.inf, torch.nan
    values = values.t().contiguous().t() if transposed else values
    assert count_nonfinite(values).tolist() == ([1, 1, 0, 0] if bad else [0] * 4)
    assert first_nonfinite(values).item() == ((2 * 4 + 1) * 3 + 2 if bad else -1)
    good = finite_rows([values, torch.ones(6)])
    assert repaired_rows(good).tolist() == ([0, 1, 1, 3, 4, 4] if bad else [*range(6)])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_functions_of_nothing(shape):
    values = torch.zeros(shape)
    assert count_nonfinite(values).tolist() == [0] * shape[1]
    assert first_nonfinite(values).item() == -1
    assert repaired_rows(finite_rows([values])).tolist() == [*range(shape[0])]
    for tensors in ([], [torch.zeros(3), torch.zeros(4)], [torch.zeros(())]):
        with pytest.raises(ValueError, match="tensors: expected at least one, all of one number of rows, received"):
            finite_rows(tensors)


def test_loss_scale():
    assert LossScale("cpu").scaled(torch.ones((), dtype=torch.float64)).dtype == torch.float64
    assert LossScale("cpu").scaled(torch.ones((), dtype=torch.float16)).item() == 2.0**12
    for bad in ({"initial": 0.5}, {"initial": float("nan")}, {"initial": float("inf")}, {"interval": 0}):
        with pytest.raises(ValueError, match="LossScale: expected a finite initial >= 1 and interval >= 1, received"):
            LossScale("cpu", **bad)
