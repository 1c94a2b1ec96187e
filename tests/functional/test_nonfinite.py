"""The first value that is not finite, counts, and rows in place of bad ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.rows.nonfinite import KINDS, count_nonfinite, finite_rows, first_nonfinite, repaired_rows
from torchrl_perf.runtime import no_host_sync

BAD = (math.nan, math.inf, -math.inf)


def unpack(code, width):
    index, kind = divmod(int(code), len(KINDS))
    return divmod(index, width), KINDS[kind]


class TestFirst:
    def test_none(self):
        assert int(first_nonfinite(torch.zeros(3, 2))) == -1
        assert int(first_nonfinite(torch.full((1, 1), torch.finfo(torch.float32).max))) == -1

    @pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf")])
    @pytest.mark.parametrize("place", [(0, 0), (1, 1), (2, 1)])
    def test_place_and_kind(self, value, kind, place, device):
        values = torch.zeros(3, 2, device=device)
        values[2, 1] = math.nan
        values[place] = value
        assert unpack(first_nonfinite(values), 2) == (place, kind)

    def test_order_is_row_then_column(self):
        values = torch.zeros(4, 3)
        values[1, 2], values[2, 0] = math.inf, math.nan
        assert unpack(first_nonfinite(values), 3) == ((1, 2), "inf")

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.sampled_from((0.0, 1e38, *BAD)), min_size=1, max_size=24), st.integers(1, 4))
    def test_against_a_loop(self, numbers, width):
        numbers = numbers[: len(numbers) // width * width] or [0.0] * width
        expected = next(((i, x) for i, x in enumerate(numbers) if not math.isfinite(x)), None)
        code = int(first_nonfinite(torch.tensor(numbers).view(-1, width)))
        if expected is None:
            assert code == -1
        else:
            kind = "NaN" if math.isnan(expected[1]) else "inf" if expected[1] > 0 else "-inf"
            assert (code // 3, KINDS[code % 3]) == (expected[0], kind)

    def test_variants_agree(self, variant):
        values = torch.zeros(5, 4, device=variant.device)
        values[3, 1] = -math.inf
        found = variant(first_nonfinite)
        for _ in range(3):
            code = found(values)
        assert unpack(code, 4) == ((3, 1), "-inf")
        assert int(found(torch.zeros(5, 4, device=variant.device))) == -1


def test_counts_of_columns():
    values = torch.tensor([[math.nan, 0.0, 1.0], [math.inf, 0.0, -math.inf]])
    assert count_nonfinite(values).tolist() == [2, 0, 1]


def test_finite_rows_of_several_tensors():
    matrix = torch.tensor([[0.0, 1e38], [math.nan, 0.0], [0.0, 0.0], [math.inf, -math.inf]])
    vector = torch.tensor([1.0, 1.0, -math.inf, 0.0])
    assert finite_rows([matrix, vector]).tolist() == [True, False, False, False]
    assert finite_rows([torch.zeros(2, 2, 2)]).tolist() == [True, True]


class TestRepair:
    @pytest.mark.parametrize(
        ("good", "expected"),
        [
            ([1, 1, 1], [0, 1, 2]),
            ([1, 0, 0, 1], [0, 0, 0, 3]),
            ([0, 0, 1, 0], [2, 2, 2, 2]),
            ([1], [0]),
        ],
    )
    def test_nearest_good_row_before_or_the_first(self, good, expected):
        assert repaired_rows(torch.tensor(good, dtype=torch.bool)).tolist() == expected

    def test_no_good_row_leaves_bad_ones(self):
        rows = repaired_rows(torch.zeros(3, dtype=torch.bool))
        assert ((rows >= 0) & (rows < 3)).all()

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.booleans(), min_size=1, max_size=20).filter(any))
    def test_only_good_rows_are_read_and_good_ones_are_themselves(self, good):
        rows = repaired_rows(torch.tensor(good)).tolist()
        assert all(good[row] for row in rows)
        assert all(row == number for number, row in enumerate(rows) if good[number])


def test_nothing_waits_for_the_host():
    values = torch.zeros(4, 3)
    with no_host_sync("cpu"):
        first_nonfinite(values)
        count_nonfinite(values)
        repaired_rows(finite_rows([values]))
