"""Episodes of robots under a policy, recorded step by step on the device and copied to the host once, for pictures.

Dimension key: ``E`` envs, ``R`` robots, ``O`` obstacles, ``C`` vortex cores, ``T`` steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.arguments import check_count
from torchrl_perf.envs.marine.env import MarineNavigation
from torchrl_perf.envs.marine.vehicle import SUBSTEPS, TIME_STEP

__all__ = ["Recording", "record"]

Policy = Callable[[TensorDictBase], TensorDictBase]

_MOVING = ("position", "heading", "velocity", "active")
_FIXED = ("goal", "obstacles", "num_obstacles", "cores", "num_cores")


@dataclass(frozen=True)
class Recording:
    """One episode of each env, or its beginning, on the host.

    Attributes:
        position: ``[T + 1, E, R, 2]``, metres, before each step and after the last.
        heading: ``[T + 1, E, R]``, radians.
        velocity: ``[T + 1, E, R, 2]`` over ground, m/s.
        active: bool ``[T + 1, E, R]``, whether the robot takes part in the step that follows.
        event: int8 ``[T, E, R]``: 0, 1 at the goal, 2 for a collision.
        goal: ``[E, R, 2]``, metres.
        obstacles: ``[E, O, 3]`` x, y, radius.
        num_obstacles: int64 ``[E]``, how many of them there are.
        cores: ``[E, C, 4]`` x, y, sign, strength.
        num_cores: int64 ``[E]``.
        step_seconds: length of a step.
    """

    position: Tensor
    heading: Tensor
    velocity: Tensor
    active: Tensor
    event: Tensor
    goal: Tensor
    obstacles: Tensor
    num_obstacles: Tensor
    cores: Tensor
    num_cores: Tensor
    step_seconds: float

    @property
    def steps(self) -> int:
        """T."""
        return len(self.event)

    @property
    def last_step(self) -> Tensor:
        """Number of steps that each robot took, int64 ``[E, R]``; 0 for one that was never there."""
        return self.active[:-1].sum(0)


def record(env: MarineNavigation | AgentStreams, policy: Policy, steps: int) -> Recording:
    """Let a policy act from the env's present state for one episode of each row, without resets.

    A robot's path includes the state that ended it, which an env that resets inside its step does not show. The env's
    worlds, its counter of frames and the policy's entries are restored afterwards; state inside the policy, such as
    that of a noise, is not, and random numbers have been drawn.

    Args:
        env: to choose the worlds call ``env.load_layout(scenario_set(...))`` before, or ``env.reset()``. Of
            :class:`AgentStreams` the policy sees the streams.
        policy: writes the action. It acts as under ``ExplorationType.DETERMINISTIC`` and without gradients; a scripted
            one may look at ``env.snapshot()``.
        steps: T; a robot that is still under way at the env's time limit rests from there on.

    Returns:
        The recording, on the host.

    Raises:
        TypeError: for another env.
        ValueError: for ``steps`` below 1.
    """
    marine = env.base_env if isinstance(env, AgentStreams) else env
    if not isinstance(marine, MarineNavigation):
        raise TypeError(
            f"record expected a MarineNavigation, or AgentStreams of one, received {type(marine).__name__}. Remedy: "
            "pass the MarineNavigation itself."
        )
    check_count("record", "steps", steps)
    before = {name: value.clone() for name, value in marine.state_dict().items()}
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        try:
            frames, events = _walk(env, marine, policy, steps)
        finally:
            marine.load_state_dict(before)
    moving = {name: torch.stack([frame[name] for frame in frames]) for name in _MOVING}
    fixed = {name: frames[0][name] for name in _FIXED}
    copied = _on_host({**moving, **fixed, "event": torch.stack(events)})
    return Recording(**copied, step_seconds=SUBSTEPS * TIME_STEP)


def _walk(
    env: MarineNavigation | AgentStreams, marine: MarineNavigation, policy: Policy, steps: int
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Snapshots ``[E, ...]`` before each step and after the last, and the events ``[E, R]`` of each step."""
    root = marine.root()
    td = env.root_of(root) if isinstance(env, AgentStreams) else root
    frames, events = [marine.snapshot()], []
    for _ in range(steps):
        td = policy(td)
        entries = marine.sail(env.env_action(td) if isinstance(env, AgentStreams) else td)
        frames.append(marine.snapshot())
        events.append(entries["agents", "event"].squeeze(-1).clone())
        td = _next_root(env, marine, td, entries)
    return frames, events


def _next_root(
    env: MarineNavigation | AgentStreams, marine: MarineNavigation, td: TensorDictBase, entries: dict[NestedKey, Tensor]
) -> TensorDict:
    """The root that the policy sees next; what it wrote itself is carried on, as in a collector."""
    root = marine.root()
    for key in (("agents", "event"), ("agents", "colregs")):
        root.set(key, entries[key])
    following = env.root_of(root) if isinstance(env, AgentStreams) else root
    known = set(following.keys(True, True))
    for key in td.keys(True, True):
        if key not in known and key not in env.action_keys:
            following.set(key, td.get(key))
    return following


def _on_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors of any kind to the host as one block of float64, which holds their numbers exactly."""
    flat = torch.cat([value.double().flatten() for value in values.values()]).cpu()
    parts = flat.split([value.numel() for value in values.values()])
    return {
        name: part.view(value.shape).to(value.dtype) for (name, value), part in zip(values.items(), parts, strict=True)
    }
