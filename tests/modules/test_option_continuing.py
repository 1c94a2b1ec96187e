"""Options that may be chosen again where they may not begin, after an end by chance."""

import pytest
import torch
from option_parts import make_controller, rows

ALLOWED = torch.tensor([True, False, False])


def initiation(td):
    return ALLOWED.expand(*td.shape, -1)


def ends(*probs):
    return lambda td: torch.tensor(probs).expand(*td.shape, -1)


def continuing(logits, *, continues=True, **options):
    return make_controller(logits, initiation=initiation, continues=continues, **options)


def test_the_running_option_is_among_those_to_choose_from_unless_its_end_is_certain():
    controller = continuing((0.0, 0.0, 0.0), termination=ends(1.0, 0.9, 1.0))
    assert controller.available(rows(1, option=1, age=4)).tolist() == [[True, True, False]]
    assert controller.available(rows(1, option=2, age=4)).tolist() == [[True, False, False]]
    # none runs
    assert controller.available(rows(1, option=1, age=0)).tolist() == [[True, False, False]]
    first = rows(2, option=1, age=4).set("is_init", torch.tensor([True, False]))
    assert controller.available(first).tolist() == [[True, False, False], [True, True, False]]
    plain = continuing((0.0, 0.0, 0.0), termination=ends(1.0, 0.9, 1.0), continues=False)
    assert plain.available(rows(1, option=1, age=4)).tolist() == [[True, False, False]]


def test_before_its_least_duration_no_end_is_certain():
    controller = continuing((0.0, 0.0, 0.0), termination=ends(1.0, 1.0, 1.0), min_duration=3)
    for age, stays in ((2, True), (3, False)):
        assert controller.available(rows(1, option=1, age=age)).tolist() == [[True, stays, False]]


@pytest.mark.parametrize(("best", "expected"), [((1.0, 5.0, 9.0), 1), ((6.0, 5.0, 9.0), 0)])
def test_after_an_end_by_chance_the_better_of_them_runs_and_counts_from_its_beginning(best, expected):
    controller = continuing(best, termination=ends(0.9, 0.9, 0.9))
    controller.ends_by_chance = False  # above one half: it ends
    td = controller(rows(1, option=1, age=4))
    assert td["active_option"].tolist() == [expected]
    assert td["option_start"].all() and td["next", "option_age"].tolist() == [1]
    chances = torch.tensor(best[:2]).softmax(0)
    assert td["option_log_prob"].exp().item() == pytest.approx(chances[expected].item(), rel=1e-5)


def test_certain_ends_leave_it():
    controller = continuing((1.0, 5.0, 9.0), termination=ends(1.0, 1.0, 1.0))
    assert controller.choose(rows(3, option=1, age=4), explore=False).option.tolist() == [0, 0, 0]
