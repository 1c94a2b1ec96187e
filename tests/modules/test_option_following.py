"""The option that follows a transition: "is_init" of "next" marks a reset that is not part of that transition."""

import torch
from option_parts import make_controller, rows


def test_is_init_of_next_does_not_force_a_new_option():
    controller = make_controller((0.0, 0.0, 50.0), min_duration=10)  # no option ends before its tenth step
    following = rows(8, option=1, age=3)
    td = rows(8, option=1, age=2).set("next", following)
    continued = controller.following_option(td)
    assert (continued == 1).all()
    following["is_init"] = torch.ones(8, 1, dtype=torch.bool)
    assert torch.equal(controller.following_option(td), continued)
    # The same flag at the root begins an option.
    assert (controller.choose(following, explore=True).option == 2).all()
