"""Final observations that are missing, in TensorDict batches."""

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.functional.missing import stand_in_rows


def fill_missing(following: TensorDictBase, root: TensorDictBase, ended: Tensor) -> TensorDictBase:
    """Writes a step's own entries into what follows it, where that is missing (NaN) and the step ended an episode.

    Args:
        following: ``[*batch, T]``, the entries under "next"; written.
        root: the same shape; entries that it lacks (rewards) are left alone.
        ended: bool ``[*batch, T, *F]``, of :func:`~torchrl_perf.functional.missing.steps_without_successor`.

    Returns:
        ``following``.
    """
    for key, value in list(following.items(True, True)):
        own = root.get(key, None)
        if own is not None:
            following.set(key, stand_in_rows(value, own, ended, root.batch_dims))
    return following
