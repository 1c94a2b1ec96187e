"""Pictures of a colony on its stiffness gradient over time.

Dimension key: ``N`` envs, ``T`` steps, ``M`` slots for nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.metrics.figure import new_figure, save_figure

if TYPE_CHECKING:
    from torchrl_perf.envs.durotaxis import Durotaxis

__all__ = ["ColonyRecording", "draw_colony", "record_colony", "recorded_colony"]

SHOWN = 9
"""Number of moments whose nodes are drawn."""
PLACES = 256
"""Number of places whose stiffness is drawn."""

_KEYS: tuple[NestedKey, ...] = (
    *("nodes", "node_mask", "graph"),
    *(("next", "nodes"), ("next", "node_mask"), ("next", "outcome"), ("next", "done")),
)


@dataclass(frozen=True)
class ColonyRecording:
    """One episode of one colony, on the host.

    Attributes:
        positions: places ``[n, 2]`` of the nodes at the start and after each step, the final one included.
        outcome: how it ended, ``"running"`` if it was cut off.
        size: width and height of the substrate.
        goal: x of the goal.
        critical_nodes: number of nodes beyond which the colony has over-grown.
        stiffness: float ``[P]``, that of P places from the left edge to the right.
    """

    positions: list[Tensor]
    outcome: str
    size: tuple[float, float]
    goal: float
    critical_nodes: int
    stiffness: Tensor

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return len(self.positions) - 1

    @property
    def centers(self) -> Tensor:
        """Places of the centroid ``[T + 1, 2]``; without nodes it stays at its last place."""
        centers = [self.positions[0].mean(0)]
        for nodes in self.positions[1:]:
            centers.append(nodes.mean(0) if len(nodes) else centers[-1])
        return torch.stack(centers)


def recorded_colony(batch: TensorDictBase, env: Durotaxis, row: int = 0) -> ColonyRecording:
    """The colony of one row of a collected batch, from its first step to the end of the episode or of the batch.

    Args:
        batch: ``[N, T]`` with "nodes", "node_mask" and "graph", and under "next" "nodes", "node_mask", "outcome" and
            "done", as :class:`~torchrl_perf.envs.Durotaxis` writes them.
        env: the env that the batch comes from, or one of the same settings.
        row: which of the N envs.

    Raises:
        IndexError: for a row that the batch does not have.
        KeyError: for an entry that is missing.
    """
    from torchrl_perf.envs.durotaxis import NODE_FEATURES

    if batch.ndim != 2 or not 0 <= row < batch.shape[0]:
        raise IndexError(
            f"row: expected one of the N rows of a batch [N, T], received {row} of a batch {list(batch.shape)}. "
            "Remedy: row=0, for example."
        )
    missing = [key for key in _KEYS if batch.get(key, None) is None]
    if missing:
        raise KeyError(
            f"batch: expected {list(_KEYS)}, which a Durotaxis env writes, received it without {missing}. Remedy: "
            "collect with a Durotaxis env, and exclude none of its keys."
        )
    part = cast("TensorDictBase", batch.select(*_KEYS)[row]).cpu()
    ended = part.get(("next", "done")).flatten()
    part = cast("TensorDictBase", part[: int(ended.int().argmax()) + 1 if bool(ended.any()) else None])
    nodes, mask = part.get("nodes"), part.get("node_mask")
    scale = torch.tensor(env.settings.size, dtype=nodes.dtype)
    frames = [(nodes[0], mask[0])]
    frames += zip(part.get(("next", "nodes")), part.get(("next", "node_mask")), strict=True)
    # Goal and critical number belong to the stage in which the episode ran; the features contain them.
    first = dict(zip(NODE_FEATURES, nodes[0, 0].tolist(), strict=True))
    width = env.settings.size[0]
    places = torch.linspace(0.0, width, PLACES).tolist()
    return ColonyRecording(
        positions=[values[alive, :2] * scale for values, alive in frames],
        outcome=env.outcomes[int(part.get(("next", "outcome"))[-1])],
        size=env.settings.size,
        goal=(first["goal_distance"] + first["x"]) * width,
        critical_nodes=round(int(mask[0].sum()) / float(part.get("graph")[0, 0])),
        stiffness=torch.tensor([env.settings.stiffness_at(place) for place in places]),
    )


def record_colony(
    env: Durotaxis, policy: Callable[[TensorDictBase], TensorDictBase], *, row: int = 0, max_steps: int = 1000
) -> ColonyRecording:
    """Reset an env, let a policy act until the episode of one row is over, and return that row's colony.

    Args:
        env: its colonies are reset, so do not pass the env that a run collects from.
        policy: writes the action; under the exploration type of the caller.
        row: which of the N envs.
        max_steps: steps after which the recording is cut off.

    Raises:
        IndexError: for a row that the env does not have.
        ValueError: for ``max_steps`` below 1.
    """
    if not 0 <= row < env.num_envs:
        raise IndexError(f"row: expected one of the env's {env.num_envs}, received {row}. Remedy: row=0, for example.")
    if max_steps < 1:
        raise ValueError(f"max_steps: expected at least 1, received {max_steps}. Remedy: max_steps=1 or more.")
    steps: list[TensorDictBase] = []
    with torch.no_grad():
        root = env.reset()
        for _ in range(max_steps):
            stepped, root = env.step_and_maybe_reset(policy(root))
            steps.append(cast("TensorDictBase", stepped.select(*_KEYS)[row : row + 1]).cpu())
            if bool(steps[-1].get(("next", "done")).all()):
                break
    return recorded_colony(TensorDict.maybe_dense_stack(steps, 1), env)


def draw_colony(
    recording: ColonyRecording, path: str | os.PathLike[str], *, title: str | None = None, shown: int = SHOWN
) -> Path:
    """Draw a colony on the stiffness of its substrate, and below it the number of nodes; save the picture.

    At some moments the colony is drawn as the shape of its convex hull, rounded, with its nodes, in the colour of the
    time; the solid line is the path of the centroid, the dashed one the goal, and rings mark the last colony.

    Args:
        recording: of :func:`record_colony` or :func:`recorded_colony`.
        path: picture to write; the suffix gives the format, for example ``.png``.
        title: heading; how the episode ended by default.
        shown: number of moments whose nodes are drawn, at least 1.

    Returns:
        The path that was written.

    Raises:
        ValueError: for ``shown`` below 1.
    """
    if shown < 1:
        raise ValueError(f"shown: expected at least 1, received {shown}. Remedy: shown=1 or more.")

    figure = new_figure(7.2, 7.0)
    place, number = figure.subplots(2, 1, height_ratios=(3.2, 1.0))
    _draw_places(figure, place, recording, shown)
    _draw_numbers(number, recording)
    ends = recording.outcome.replace("_", " ")
    figure.suptitle(title if title is not None else f"{ends} after {recording.steps} steps")
    return save_figure(figure, path)


def _draw_places(figure: Any, axes: Any, recording: ColonyRecording, shown: int) -> None:
    """The substrate, its nodes at some moments, and the path of the centroid."""
    width, height = recording.size
    field = axes.imshow(
        recording.stiffness.unsqueeze(0).numpy(), extent=(0, width, 0, height), origin="lower", cmap="Greys", alpha=0.6
    )
    figure.colorbar(field, ax=axes, label="stiffness", shrink=0.8)
    last = max(recording.steps, 1)
    moments = sorted({round(moment) for moment in torch.linspace(0, recording.steps, shown).tolist()})
    nodes = None
    for moment in moments:
        positions = recording.positions[moment]
        times = [moment] * len(positions)
        nodes = axes.scatter(*positions.numpy().T, c=times, cmap="viridis", vmin=0, vmax=last, s=12, zorder=3)
        outline = hull(positions.tolist())
        if outline:
            # opaque, so that fill and outline are one shape; a wide line makes one of a single node, too
            colour = [0.45 * part + 0.55 for part in nodes.cmap(moment / last)[:3]]
            axes.fill(*zip(*outline, strict=True), color=colour, linewidth=9, joinstyle="round", zorder=2)
    if nodes is not None:
        figure.colorbar(nodes, ax=axes, label="step", shrink=0.8)
    final = recording.positions[-1].numpy()
    axes.scatter(*final.T, facecolors="none", edgecolors="tab:red", s=34, linewidths=0.8, zorder=4, label="at the end")
    axes.plot(*recording.centers.numpy().T, color="tab:orange", linewidth=1.4, zorder=4, label="centroid")
    axes.axvline(recording.goal, color="tab:green", linestyle="--", linewidth=1.2, label="goal")
    axes.set(xlim=(0, width), ylim=(0, height), xlabel="x, along the gradient", ylabel="y")
    axes.legend(loc="upper left", fontsize="small")


def hull(points: list[list[float]]) -> list[list[float]]:
    """The corners of the convex hull of points ``[x, y]``, against the clock from the leftmost one (Andrew's chain)."""

    def half(ordered: list[list[float]]) -> list[list[float]]:
        chain: list[list[float]] = []
        for x, y in ordered:
            while len(chain) > 1:
                (ax, ay), (bx, by) = chain[-2:]
                if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                    break
                chain.pop()
            chain.append([x, y])
        return chain[:-1]

    ordered = sorted(map(list, set(map(tuple, points))))
    return ordered if len(ordered) < 3 else half(ordered) + half(ordered[::-1])


def _draw_numbers(axes: Any, recording: ColonyRecording) -> None:
    """The number of nodes by step, and the critical number."""
    numbers = [len(positions) for positions in recording.positions]
    axes.step(range(len(numbers)), numbers, where="post", linewidth=1.4)
    axes.axhline(recording.critical_nodes, color="tab:red", linestyle="--", linewidth=1.0, label="over-growth")
    axes.set(xlabel="step", ylabel="nodes", ylim=(0, 1.1 * max(*numbers, recording.critical_nodes)))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
