"""Parameters that no loss depends on, which a weight decay would shrink all the same."""

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDictBase

from torchrl_perf.trainers.off_policy.passes import Passes
from torchrl_perf.trainers.optim.optimization import GuardedAdam

__all__ = ["refuse_unused"]


def refuse_unused(
    passes: Passes, optimizers: Sequence[GuardedAdam], names: Sequence[str], sample: TensorDictBase
) -> Literal[False]:
    """Refuses parameters with a weight decay that the losses of a sample do not depend on.

    Their gradients are zeros, since the compiler has no others, and Adam adds the decay to them. Without a decay a
    gradient of zeros moves nothing. The passes are made once more, eagerly; no random number of the run is taken.

    Args:
        passes: of the update.
        optimizers: of all parameters.
        names: of the parameters, in the order of the optimisers.
        sample: ``[B]``.

    Returns:
        False: there is nothing more to look for.

    Raises:
        ValueError: naming them.
    """
    learnt = [param for one in optimizers for param in one.params]
    device = learnt[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        passes.made_once(sample)
    used = {param for part in passes.differentiated() for param in part.depended_on}
    groups = [group for one in optimizers for group in one.param_groups if group["weight_decay"]]
    name_of = dict(zip(learnt, names, strict=True))
    if unused := [name_of[param] for group in groups for param in group["params"] if param not in used]:
        raise ValueError(
            f"weight_decay: expected losses that depend on every parameter that decays, received none that depends on "
            f"{', '.join(unused)}. Remedy: weight_decay=0, or leave them out of the network."
        )
    return False
