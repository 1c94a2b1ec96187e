"""Pictures of the paths of robots: one panel for each scenario, and a short animation.

Dimension key: ``E`` scenarios, ``R`` robots, ``O`` obstacles, ``C`` vortex cores, ``T`` steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_perf.metrics.figure import new_figure, save_figure

if TYPE_CHECKING:
    from torchrl_perf.envs.marine.recording import Recording

__all__ = ["animate", "draw_trajectories"]

MOST_PANELS = 9
MARK_SECONDS = 5.0
"""Time between two boats drawn along a robot's path."""
MOST_FRAMES = 120
"""Most frames of an animation; a longer recording is shown in larger steps."""
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c5109", "#6a51a3", "#4d4d4d")
"""One for each robot, distinguishable for the colour-blind too."""
BOAT = ((2.5, 0.0), (0.8, 1.25), (-2.5, 1.25), (-2.5, -1.25), (0.8, -1.25))
"""Outline of a vehicle of 5 m by 2.5 m: metres ahead and to starboard."""
GOAL_RADIUS, ROBOT_RADIUS, CORE_RADIUS = 2.0, 2.795, 0.5  # metres, of the env
STREAM_LIMIT = 1.0
"""Metres a second at which the colour of a current is full."""
REACHED, HIT = 1, 2


def draw_trajectories(
    recording: Recording,
    path: str | os.PathLike[str],
    *,
    scenarios: Sequence[int] | None = None,
    title: str | None = None,
) -> Path:
    """Draw the path of each robot, one panel for each scenario, and save the picture.

    A robot has a colour: its start is a ring, its goal a star in a circle of 2 m, and boats in true size show where it
    was, and its heading, every five seconds. A red cross and disc mark a collision, a square a robot that was still
    under way at the end. Obstacles are grey discs; currents are arrows, coloured by speed, around vortices, whose sense
    of rotation is drawn. Axes are metres of equal length, as on a map: the env's x, north, is up, and its y, east, to
    the right, so that starboard is to the right of a boat that heads up.

    Args:
        recording: of :func:`~torchrl_perf.envs.marine.recording.record`.
        path: picture to write; the suffix gives the format, for example ``.png``.
        scenarios: which of the E to draw, at most nine; the first ones by default.
        title: heading of the picture.

    Returns:
        The path that was written.

    Raises:
        ValueError: for more than nine scenarios, or none.
        IndexError: for one that the recording does not have.
    """
    figure, panels = _figure(recording, scenarios, "draw_trajectories", size=4.6)
    stream = None
    for axes, scenario in panels:
        stream = _draw_world(axes, scenario) or stream
        _draw_ways(axes, scenario)
        axes.set_title(f"scenario {scenario.number}: {_summary(scenario)}", fontsize=9)
    _finish(figure, panels, stream, title=title, boats=f"boat, every {MARK_SECONDS:.0f} s")
    return save_figure(figure, path, dpi=130)


def animate(
    recording: Recording,
    path: str | os.PathLike[str],
    *,
    scenarios: Sequence[int] | None = None,
    frames_per_second: int = 12,
) -> Path:
    """Write the robots' paths as a GIF that repeats, drawn as in :func:`draw_trajectories`.

    Args:
        recording: of :func:`~torchrl_perf.envs.marine.recording.record`.
        path: file to write, ``.gif``.
        scenarios: which of the E to draw; the first by default.
        frames_per_second: speed. A recording of more than 120 steps is shown in larger ones.

    Returns:
        The path that was written.

    Raises:
        ValueError: for more than nine scenarios, or none, or a file that is no ``.gif``.
        IndexError: for one that the recording does not have.
    """
    from matplotlib.animation import PillowWriter

    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"animate: expected a path that ends in .gif, received {path}. Remedy: {path.stem}.gif.")
    chosen = [0] if scenarios is None else scenarios
    figure, panels = _figure(recording, chosen, "animate", size=4.8)
    stream = None
    for axes, scenario in panels:
        stream = _draw_world(axes, scenario) or stream
        _draw_places(axes, scenario)
    _finish(figure, panels, stream, boats="boat")
    for axes, _ in panels:
        axes.set_title(" ", fontsize=9)  # room for the time
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # one layout is enough, and nothing may shift between frames
    last = max(scenario.steps for _, scenario in panels)
    stride = -(-(last + 1) // MOST_FRAMES)
    moments = [*range(0, last, stride), last]
    writer = PillowWriter(fps=frames_per_second)
    with writer.saving(figure, path, dpi=80):
        for moment in [*moments, *[last] * frames_per_second]:  # the end stays for a second
            shown = [artist for axes, scenario in panels for artist in _draw_moment(axes, scenario, moment)]
            writer.grab_frame()
            for artist in shown:
                artist.remove()
    return path


# -- what is drawn of one scenario ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Robot:
    """The path of one robot up to its end, on the map, as numpy arrays.

    Attributes:
        color: of all that belongs to it.
        places: ``[n, 2]`` east, north.
        headings: ``[n]`` radians, clockwise from north.
        goal: ``[2]`` east, north.
        event: how it ended, 0 if it did not.
    """

    color: str
    places: Any
    headings: Any
    goal: Any
    event: int


@dataclass(frozen=True)
class _Scenario:
    """One of the E worlds, as numpy arrays.

    Attributes:
        number: which one.
        robots: those that were there.
        obstacles: ``[o, 3]`` east, north, radius.
        cores: ``[c, 3]`` east, north, sign.
        currents: the vortices as the env has them, ``[c, 4]`` x, y, sign, strength.
        step_seconds: length of a step.
    """

    number: int
    robots: list[_Robot]
    obstacles: Any
    cores: Any
    currents: torch.Tensor
    step_seconds: float

    @property
    def steps(self) -> int:
        """Steps of the robot that took longest."""
        return max((len(robot.places) - 1 for robot in self.robots), default=0)

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Least and greatest east, then north, of everything drawn, with a margin."""
        points = [torch.zeros(0, 2)]
        for robot in self.robots:
            points += [torch.as_tensor(robot.places), torch.as_tensor(robot.goal).unsqueeze(0)]
        points += [torch.as_tensor(self.obstacles)[:, :2], torch.as_tensor(self.cores)[:, :2]]
        seen = torch.cat([part.double() for part in points])
        low, high = (seen.amin(0), seen.amax(0)) if len(seen) else (torch.zeros(2), torch.ones(2))
        middle, half = (low + high) / 2, float((high - low).max()) / 2 + 4.0
        east, north = middle.tolist()
        return east - half, east + half, north - half, north + half


def _scenario(recording: Recording, number: int) -> _Scenario:
    robots = []
    taken = recording.last_step[number]
    for robot in range(recording.goal.shape[1]):
        steps = int(taken[robot])
        if not bool(recording.active[0, number, robot]):
            continue
        robots.append(
            _Robot(
                COLORS[robot % len(COLORS)],
                recording.position[: steps + 1, number, robot].flip(-1).numpy(),
                recording.heading[: steps + 1, number, robot].numpy(),
                recording.goal[number, robot].flip(-1).numpy(),
                int(recording.event[:, number, robot].amax()) if recording.steps else 0,
            )
        )
    obstacles = recording.obstacles[number, : int(recording.num_obstacles[number])]
    cores = recording.cores[number, : int(recording.num_cores[number])]
    to_map = [1, 0, 2]  # x and y change places
    obstacles, on_map = obstacles[:, to_map].numpy(), cores[:, to_map].numpy()
    return _Scenario(number, robots, obstacles, on_map, cores, recording.step_seconds)


def _summary(scenario: _Scenario) -> str:
    ends = [robot.event for robot in scenario.robots]
    parts = ((ends.count(REACHED), "at the goal"), (ends.count(HIT), "collided"), (ends.count(0), "under way"))
    return ", ".join(f"{count} {what}" for count, what in parts if count) + f" in {_seconds(scenario):.0f} s"


def _seconds(scenario: _Scenario) -> float:
    return scenario.steps * scenario.step_seconds


def _draw_world(axes: Any, scenario: _Scenario) -> Any:
    """Obstacles, vortices and currents; returns the arrows, or None without currents."""
    from matplotlib.patches import Circle

    left, right, low, high = scenario.bounds
    axes.set(xlim=(left, right), ylim=(low, high), aspect="equal", xlabel="y, east (m)", ylabel="x, north (m)")
    axes.grid(visible=True, alpha=0.25, linewidth=0.5)
    axes.tick_params(labelsize=8)
    for east, north, radius in scenario.obstacles:
        axes.add_patch(Circle((east, north), radius, facecolor="0.55", edgecolor="0.2", zorder=2))
    for east, north, sign in scenario.cores:
        axes.add_patch(Circle((east, north), CORE_RADIUS, facecolor="#2171b5", edgecolor="none", zorder=2))
        turn = "\N{ANTICLOCKWISE OPEN CIRCLE ARROW}" if sign > 0 else "\N{CLOCKWISE OPEN CIRCLE ARROW}"
        axes.annotate(turn, (east, north), (6, 6), textcoords="offset points", color="#2171b5", fontsize=13, zorder=6)
    return _draw_current(axes, scenario) if len(scenario.cores) else None


def _draw_current(axes: Any, scenario: _Scenario) -> Any:
    """Arrows of one length on a grid, coloured by the speed of the water."""
    from torchrl_perf.envs.marine.currents import current

    left, right, low, high = scenario.bounds
    lines = [torch.linspace(a, b, 23)[1:-1].double() for a, b in ((left, right), (low, high))]
    east, north = (part.flatten() for part in torch.meshgrid(*lines, indexing="xy"))
    cores = scenario.currents.double().unsqueeze(0)
    to_north, to_east = (part[0] for part in current(north.unsqueeze(0), east.unsqueeze(0), cores))
    speed = (to_north.square() + to_east.square()).sqrt()
    length = speed.clamp_min(1e-9)
    spacing = (right - left) / 22
    return axes.quiver(
        *(part.numpy() for part in (east, north, to_east / length, to_north / length, speed)),
        cmap="Blues",
        clim=(-0.25 * STREAM_LIMIT, STREAM_LIMIT),
        angles="xy",
        scale_units="xy",
        scale=1.0 / (0.7 * spacing),
        pivot="mid",
        width=0.0035,
        zorder=1,
    )


def _draw_places(axes: Any, scenario: _Scenario) -> None:
    """Starts and goals."""
    from matplotlib.patches import Circle

    for robot in scenario.robots:
        axes.plot(*robot.places[0], marker="o", markersize=8, fillstyle="none", color=robot.color, zorder=4)
        axes.plot(*robot.goal, marker="*", markersize=11, color=robot.color, markeredgecolor="0.15", zorder=4)
        axes.add_patch(Circle(robot.goal, GOAL_RADIUS, fill=False, linestyle=":", edgecolor=robot.color, zorder=3))


def _draw_ways(axes: Any, scenario: _Scenario) -> None:
    """Lines, boats every few seconds, and how each robot ended."""
    _draw_places(axes, scenario)
    every = max(1, round(MARK_SECONDS / scenario.step_seconds))
    for robot in scenario.robots:
        axes.plot(robot.places[:, 0], robot.places[:, 1], color=robot.color, linewidth=1.6, zorder=4)
        for step in range(0, len(robot.places) - 1, every):
            _boat(axes, robot, step, alpha=0.35)
        _boat(axes, robot, len(robot.places) - 1, alpha=0.95)
        _end(axes, robot)


def _end(axes: Any, robot: _Robot) -> list[Any]:
    """Mark a robot that collided, or was still under way."""
    from matplotlib.patches import Circle

    place = robot.places[-1]
    if robot.event == HIT:
        disc = Circle(place, ROBOT_RADIUS, facecolor="red", alpha=0.2, edgecolor="red", zorder=5)
        (cross,) = axes.plot(*place, marker="X", markersize=9, color="red", markeredgecolor="white", zorder=7)
        return [axes.add_patch(disc), cross]
    if robot.event == 0:
        return axes.plot(*place, marker="s", markersize=13, fillstyle="none", color="0.15", zorder=7)
    return []


def _boat(axes: Any, robot: _Robot, step: int, alpha: float) -> Any:
    """A vehicle in true size."""
    from matplotlib.patches import Polygon

    heading = torch.as_tensor(robot.headings[step]).double()
    ahead = torch.stack((heading.sin(), heading.cos()))
    starboard = torch.stack((heading.cos(), -heading.sin()))
    corners = torch.tensor(BOAT, dtype=torch.float64) @ torch.stack((ahead, starboard))
    corners = corners + torch.as_tensor(robot.places[step])
    boat = Polygon(corners.numpy(), facecolor=robot.color, edgecolor="0.15", linewidth=0.5, alpha=alpha, zorder=5)
    return axes.add_patch(boat)


def _draw_moment(axes: Any, scenario: _Scenario, moment: int) -> list[Any]:
    """Draw the robots at one step with their ways so far; returns what has to go before the next."""
    axes.set_title(f"scenario {scenario.number}: {moment * scenario.step_seconds:4.1f} s", fontsize=9)
    shown: list[Any] = []
    for robot in scenario.robots:
        step = min(moment, len(robot.places) - 1)
        shown += axes.plot(*robot.places[: step + 1].T, color=robot.color, linewidth=1.4, zorder=4)
        ended = step == len(robot.places) - 1
        shown.append(_boat(axes, robot, step, alpha=0.4 if ended and robot.event == REACHED else 0.95))
        if ended:
            shown += _end(axes, robot)
    return shown


# -- the figure -------------------------------------------------------------------------------------------------------


def _figure(
    recording: Recording, scenarios: Sequence[int] | None, caller: str, size: float
) -> tuple[Any, list[tuple[Any, _Scenario]]]:
    """A figure with one panel for each scenario."""
    there = recording.goal.shape[0]
    chosen = list(range(min(there, MOST_PANELS))) if scenarios is None else list(scenarios)
    if not 1 <= len(chosen) <= MOST_PANELS:
        raise ValueError(
            f"{caller}: expected 1 to {MOST_PANELS} scenarios, received {len(chosen)}. Remedy: choose fewer, or at "
            "least one."
        )
    outside = [number for number in chosen if not 0 <= number < there]
    if outside:
        raise IndexError(
            f"{caller}: expected scenarios of 0 to {there - 1}, received {outside}. Remedy: scenarios in this range."
        )
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = new_figure(size * columns, (size + 0.25) * rows + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in panels[len(chosen) :]:
        empty.set_visible(False)
    return figure, [(axes, _scenario(recording, number)) for axes, number in zip(panels, chosen, strict=False)]


def _finish(
    figure: Any, panels: list[tuple[Any, _Scenario]], stream: Any, *, title: str | None = None, boats: str
) -> None:
    """Legend, scale of the currents, heading."""
    from matplotlib.lines import Line2D

    def mark(marker: str, label: str, **style: Any) -> Any:
        return Line2D([], [], linestyle="none", marker=marker, label=label, **style)

    ends = {robot.event for _, scenario in panels for robot in scenario.robots}
    marks = [
        mark("o", "start", color="0.3", fillstyle="none"),
        mark("*", "goal (circle: 2 m)", color="0.3", markersize=10),
    ]
    marks.append(mark(">", boats, color="0.3", markersize=7))
    if any(len(scenario.obstacles) for _, scenario in panels):
        marks.append(mark("o", "obstacle", color="0.55", markeredgecolor="0.2", markersize=9))
    if stream is not None:
        marks.append(mark("o", "vortex and sense of rotation", color="#2171b5", markersize=5))
        bar = figure.colorbar(stream, ax=[axes for axes, _ in panels], shrink=0.6, extend="max", aspect=30)
        bar.set_label("current (m/s)", fontsize=8)
        bar.ax.set_ylim(0.0, STREAM_LIMIT)
        bar.ax.tick_params(labelsize=7)
    if HIT in ends:
        marks.append(mark("X", "collision", color="red", markersize=9, markeredgecolor="white"))
    if 0 in ends:
        marks.append(mark("s", "still under way", color="0.15", fillstyle="none", markersize=9))
    # a narrow figure has no room for one long line
    per_line = {1: 2, 2: 4}.get(len(panels), len(marks))
    figure.legend(handles=marks, loc="outside lower center", ncols=per_line, fontsize=8, frameon=False)
    if title is not None:
        figure.suptitle(title, fontsize=11)
