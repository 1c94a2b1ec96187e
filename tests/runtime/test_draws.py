"""Random numbers that are drawn ahead: what a step gets, in which order, and how many are drawn at once."""

import threading

import pytest
import torch

from torchrl_perf.runtime.draws import Draw, StepDraws, normal, noted, supplied, uniform

CPU = torch.device("cpu")
UNIFORM = Draw("uniform", torch.Size([3, 2]), torch.float32)
NORMAL = Draw("normal", torch.Size([5]), torch.float64)


def drawn(kind="uniform", shape=(3, 2), dtype=torch.float32):
    return {"uniform": uniform, "normal": normal}[kind](shape, dtype=dtype, device=CPU)


def test_plain_draws_are_those_of_torch():
    torch.manual_seed(0)
    ours = drawn(), drawn("normal", (5,), torch.float64)
    torch.manual_seed(0)
    assert torch.equal(ours[0], torch.rand(3, 2))
    assert torch.equal(ours[1], torch.randn(5, dtype=torch.float64))


def test_what_a_step_draws_is_noted():
    with noted() as draws:
        drawn()
        drawn("normal", (5,), torch.float64)
    drawn()
    assert draws == [UNIFORM, NORMAL]


def test_each_row_is_handed_out_once_and_to_what_fits_it():
    first, second, other = torch.zeros(3, 2), torch.ones(3, 2), torch.full((5,), 2.0, dtype=torch.float64)
    with supplied([("uniform", first), ("normal", other), ("uniform", second)]):
        assert drawn("normal", (5,), torch.float64) is other
        assert drawn() is first
        assert drawn("normal") is not second, "of another kind"
        assert drawn(dtype=torch.float64) is not second, "of another dtype"
        assert drawn() is second
        fresh = drawn()
    assert ((fresh > 0) & (fresh < 1)).all(), "none was left"
    assert drawn() is not first


def test_a_supply_inside_another_hides_it():
    row = torch.zeros(3, 2)
    with supplied([("uniform", row)]):
        with supplied([]):
            assert drawn() is not row
        assert drawn() is row


def test_other_threads_have_their_own():
    found = []
    with supplied([("uniform", torch.zeros(3, 2))]):
        thread = threading.Thread(target=lambda: found.append(drawn()))
        thread.start()
        thread.join()
    assert found[0].sum() > 0


@pytest.mark.parametrize("limit", [10**6, 1, 2 * (32 + 48)])
def test_steps_get_their_own_numbers_whatever_is_drawn_at_once(limit):
    draws = StepDraws([UNIFORM, NORMAL, UNIFORM], 7, CPU, limit)
    # 6 floats begin again after 8, 5 doubles after 6
    assert draws.block == {10**6: 7, 1: 1, 160: 1}[limit]
    seen = [[(kind, row.clone()) for kind, row in draws.rows(step)] for step in range(7)]
    for step in seen:
        assert [(kind, row.shape, row.dtype) for kind, row in step] == [UNIFORM, NORMAL, UNIFORM]
        assert torch.unique(torch.stack([row for kind, row in step if kind == "uniform"])).numel() == 12
    for number in range(3):
        assert torch.unique(torch.stack([step[number][1] for step in seen])).numel() == seen[0][number][1].numel() * 7


def test_a_block_is_drawn_in_its_first_step_alone():
    draws = StepDraws([UNIFORM], 6, CPU, 3 * 32)
    assert draws.block == 3
    torch.manual_seed(1)
    states = []
    for step in range(6):
        draws.rows(step)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[2], states[3])


def test_rows_begin_where_kernels_read():
    draws = StepDraws([Draw("uniform", torch.Size([3]), torch.float32)] * 3, 5, CPU)
    assert all(row.storage_offset() * 4 % 16 == 0 for step in range(5) for _, row in draws.rows(step))


def test_nothing_to_draw():
    draws = StepDraws([], 4, CPU)
    state = torch.get_rng_state()
    assert not draws
    assert list(draws.rows(0)) == []
    assert torch.equal(state, torch.get_rng_state())


def test_traced_functions_take_what_is_supplied_inside_them():
    def step(rows):
        with supplied(rows):
            return drawn(), drawn()

    traced = torch.compile(step, backend="eager", fullgraph=True)
    for number in range(3):
        row = torch.full((3, 2), float(number))
        torch.manual_seed(0)
        first, second = traced([("uniform", row)])
        torch.manual_seed(0)
        assert torch.equal(first, row)
        assert torch.equal(second, torch.rand(3, 2))
