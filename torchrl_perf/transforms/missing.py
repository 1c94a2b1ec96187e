"""Final observations that are missing, in TensorDict batches."""

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.functional.rows.missing import missing_rows, stand_in_rows


def fill_missing(following: TensorDictBase, root: TensorDictBase, ended: Tensor) -> TensorDictBase:
    """Writes a step's own entries into what follows it, where that is missing (NaN) and the step ended an episode.

    Args:
        following: ``[*batch, T]``, the entries under "next"; written.
        root: the same shape; entries that it lacks (rewards) are left alone.
        ended: bool ``[*batch, T, *F]``, of :func:`~torchrl_perf.functional.rows.missing.steps_without_successor`.

    Returns:
        ``following``.
    """
    for key, value in list(following.items(True, True)):
        own = root.get(key, None)
        if own is not None:
            following.set(key, stand_in_rows(value, own, ended, root.batch_dims))
    return following


def end_where_missing(batch: TensorDictBase) -> TensorDictBase:
    """Transitions without final observations that are missing: such a step is terminated, and keeps its own state.

    So nothing is bootstrapped from it, by any loss and after any number of steps, and nothing that is stored is NaN.

    Args:
        batch: ``[*batch]``, with "done" and "terminated" ``[*batch, 1]`` under "next".

    Returns:
        A shallow copy.
    """
    following = batch.get("next").copy()
    done, terminated = following.get("done"), following.get("terminated")
    names = [key for key in following.keys(True, True) if batch.get(key, None) is not None]
    missing = missing_rows([following.get(key) for key in names], done, batch.batch_dims)
    if missing is None:
        return batch
    following = fill_missing(following, batch, done)
    following.set("terminated", terminated | missing.reshape(terminated.shape))
    return batch.copy().set("next", following)
