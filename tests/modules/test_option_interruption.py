"""Options that end where another one is better."""

import torch
from option_parts import make_controller, rows


def never(count):
    return lambda td: torch.zeros(*td.shape, count)


def interrupting(logits, **options):
    controller = {"interrupts": True, **options.pop("controller", {})}
    return make_controller(logits, termination=never(len(logits)), controller=controller, **options)


def chosen(controller, td):
    found = controller.choose(td, explore=False)
    return found.option.tolist(), found.start.tolist()


def test_an_option_ends_where_another_one_is_better_and_goes_on_where_it_is_best():
    controller = interrupting((1.0, 3.0, 2.0))
    assert chosen(controller, rows(2, option=0, age=4)) == ([1, 1], [True, True])
    assert chosen(controller, rows(2, option=1, age=4)) == ([1, 1], [False, False])
    assert chosen(make_controller((1.0, 3.0, 2.0), termination=never(3)), rows(1, option=0, age=4)) == ([0], [False])


def test_not_before_its_least_duration():
    controller = interrupting((0.0, 9.0), min_duration=(3, 1))
    for age, ends in ((1, False), (2, False), (3, True)):
        assert chosen(controller, rows(1, option=0, age=age))[1] == [ends]


def test_one_that_may_not_begin_interrupts_nothing_but_may_go_on():
    allowed = torch.tensor([True, False, True])
    controller = interrupting((1.0, 9.0, 2.0), initiation=lambda td: allowed.expand(*td.shape, -1))
    # option 1 is the best and may not begin: 0 ends for 2, which may; 2 goes on; 1 goes on while it runs
    assert chosen(controller, rows(1, option=0, age=4)) == ([2], [True])
    assert chosen(controller, rows(1, option=2, age=4)) == ([2], [False])
    assert chosen(controller, rows(1, option=1, age=4)) == ([1], [False])


def test_candidates_are_those_that_may_begin_and_the_one_that_runs():
    allowed = torch.tensor([True, False, False])
    controller = interrupting((0.0, 0.0, 0.0), initiation=lambda td: allowed.expand(*td.shape, -1))
    td = rows(2, option=2, age=1)
    td["option_age"][1] = 0
    found = controller.candidates(td, controller.available(td))
    assert found.tolist() == [[True, False, True], [True, False, False]]
    plain = make_controller((0.0, 0.0, 0.0), initiation=lambda td: allowed.expand(*td.shape, -1))
    assert plain.candidates(td, plain.available(td)).tolist() == [[True, False, False]] * 2


def test_the_temperature_changes_no_comparison():
    for temperature in (0.1, 10.0):
        controller = interrupting((1.0, 1.2), controller={"temperature": temperature})
        assert chosen(controller, rows(1, option=0, age=2)) == ([1], [True])


def test_exploration_is_not_interrupted_but_learnt_from_as_if_it_were():
    controller = interrupting((1.0, 3.0, 2.0))
    assert controller.choose(rows(64, option=0, age=4), explore=True).option.tolist() == [0] * 64
    td = rows(64, option=0, age=3).set("next", rows(64, option=0, age=4))
    drawn = controller.following_option(td)
    assert set(drawn.tolist()) == {0, 1, 2}  # of the choice after the interruption
    with_best = interrupting((9.0, 3.0, 2.0))
    assert with_best.following_option(td).tolist() == [0] * 64
