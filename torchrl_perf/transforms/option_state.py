"""The running option as state of an environment."""

import torch
from torchrl.data import Categorical, Unbounded

from torchrl_perf.modules.option_set import AGE_KEY, OPTION_KEY
from torchrl_perf.modules.policy_state import PolicyState


class OptionState(PolicyState):
    """Adds the state of an :class:`~torchrl_perf.modules.OptionController` to an env: the running option and its age.

    Keys added, to the specs and to each reset: "option" and "option_age", int64 ``[*batch]``, 0 (no option runs). After
    a step they are what the policy wrote under "next"; after one without an option, such as a random action, 0. See
    :class:`PolicyState`.

    Args:
        num_options: O.

    Raises:
        ValueError: for fewer than two options.
    """

    def __init__(self, num_options: int) -> None:
        if num_options < 2:
            raise ValueError(
                f"num_options: expected at least 2, received {num_options}. Remedy: num_options=2 or more."
            )
        option = Categorical(num_options, shape=torch.Size(()), dtype=torch.int64)
        super().__init__({OPTION_KEY: option, AGE_KEY: Unbounded(shape=torch.Size(()), dtype=torch.int64)})
        self.num_options = num_options

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_options={self.num_options})"
