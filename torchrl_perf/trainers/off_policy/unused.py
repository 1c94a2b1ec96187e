"""Parameters that no loss depends on, which a weight decay would shrink all the same."""

from typing import TYPE_CHECKING, Literal

import torch
from tensordict import TensorDictBase

from torchrl_perf.functional.pullback import Differentiable

if TYPE_CHECKING:
    from torchrl_perf.trainers.off_policy.actor_critic import ActorCritic

__all__ = ["refuse_unused"]


def refuse_unused(algorithm: "ActorCritic", sample: TensorDictBase) -> Literal[False]:
    """Refuses parameters with a weight decay that the losses of a sample do not depend on.

    Their gradients are zeros, since the compiler has no others, and Adam adds the decay to them. Without a decay a
    gradient of zeros moves nothing. The passes are made once more, eagerly; no random number of the run is taken.

    Args:
        algorithm: the update.
        sample: ``[B]``.

    Returns:
        False: there is nothing more to look for.

    Raises:
        ValueError: naming them.
    """
    device = algorithm.setup.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.compiler.set_stance("force_eager"):
        rows = sample if algorithm.slices is None else algorithm.slices.prepared(sample)
        context = algorithm.passes.context(rows, None)
        algorithm.passes.critic(rows, context)
        algorithm.passes.actor(rows, context)
    parts = [part for part in vars(algorithm.passes).values() if isinstance(part, Differentiable)]
    used = {param for part in parts for param in part.depended_on}
    optimizers = algorithm.critic_optimizer, algorithm.actor_optimizer
    groups = [group for one in optimizers for group in one.param_groups if group["weight_decay"]]
    names = dict(zip([param for one in optimizers for param in one.params], algorithm.parameter_names, strict=True))
    if unused := [names[param] for group in groups for param in group["params"] if param not in used]:
        raise ValueError(
            f"weight_decay: expected losses that depend on every parameter that decays, received none that depends on "
            f"{', '.join(unused)}. Remedy: weight_decay=0, or leave them out of the network."
        )
    return False
