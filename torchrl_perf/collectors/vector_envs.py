"""Gymnasium vector envs of what makes single envs: in groups, in processes."""

from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from torchrl_perf.collectors.host_faults import ignore_interrupts
from torchrl_perf.envs.from_callable import Made

__all__ = ["vector_envs"]


def vector_envs(made: Made, num_envs: int, *, groups: int = 1, processes: bool = False) -> list[VectorEnv]:
    """The vector envs of a run, for a :class:`HostCollector`. An env that is done is reset within the step.

    Args:
        made: what makes Gymnasium envs.
        num_envs: N, of all groups.
        groups: vector envs of equal size; one steps while the policy acts for another.
        processes: step each env in a process of its own.

    Raises:
        ValueError: for groups that do not divide the envs, and vector envs that have another number of envs, or
            whose steps are their own where processes are asked for.
    """
    if num_envs % groups:
        raise ValueError(
            f"env_groups: expected a divisor of num_envs = {num_envs}, received {groups}. Remedy: num_envs="
            f"{max(1, num_envs // groups) * groups}."
        )
    size = num_envs // groups
    if made.vector is not None:
        if processes:
            raise ValueError(
                f"env_processes: expected False for {made.label}, a vector env that steps its envs itself, received "
                "True. Remedy: leave it out; env_groups steps several of them at once."
            )
        found = [made.vector(size) for _ in range(groups)]
        if any(envs.num_envs != size for envs in found):
            sizes = [envs.num_envs for envs in found]
            for envs in found:
                envs.close()
            raise ValueError(
                f"num_envs: expected {groups} vector envs of {size} envs, received {sizes} of {made.label}. Remedy: "
                f"num_envs={sizes[0] * groups}, or an argument num_envs of what makes them."
            )
        return found
    assert made.single is not None
    makers = [ignore_interrupts(made.single)] * size
    if processes:
        # importing torchrl makes "spawn" the default way to start a process, which takes seconds each
        same_step = {"autoreset_mode": AutoresetMode.SAME_STEP, "context": "fork"}
        return [AsyncVectorEnv(makers, **same_step) for _ in range(groups)]
    return [SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP) for _ in range(groups)]
