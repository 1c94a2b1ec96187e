"""Values of ``info``, where some envs have an entry and others do not."""

import numpy as np
import pytest
import torch
from torchrl.data import Unbounded

from torchrl_perf.collectors.host_info import info_leaves, read_info

ROWS = [np.full(2, i, np.float32) for i in range(3)]


def objects(*values):
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def read(info, key="entry"):
    (leaf,) = info_leaves({key: Unbounded((2,), dtype=torch.float32)}, [])
    return read_info(leaf, info, 3).tolist()


def test_an_env_without_the_entry_has_zeros():
    assert read({"entry": objects(ROWS[2], None, ROWS[1])}) == [[2, 2], [0, 0], [1, 1]]


def test_an_entry_that_the_mask_leaves_out_is_an_old_one():
    info = {"entry": objects(ROWS[2], ROWS[2], None), "_entry": np.array([False, True, True])}
    assert read(info) == [[0, 0], [2, 2], [0, 0]]
    assert read({"entry": np.stack(ROWS), "_entry": np.array([True, False, True])}) == [[0, 0], [0, 0], [2, 2]]


def test_masks_of_every_level_count():
    inner = {"entry": np.stack(ROWS), "_entry": np.array([True, True, False])}
    info = {"outer": inner, "_outer": np.array([True, False, True])}
    info["outer"]["entry"][0] = 7
    assert read(info, ("outer", "entry")) == [[7, 7], [0, 0], [0, 0]]


@pytest.mark.parametrize("info", [{}, {"entry": None}, {"outer": {}}])
def test_no_entry_at_all(info):
    assert read(info, ("entry", "inner")) == [[0, 0]] * 3


def test_a_dict_is_no_value():
    with pytest.raises(ValueError, match="info_keys: expected an array below"):
        read({"entry": {"inner": np.zeros(3)}})
