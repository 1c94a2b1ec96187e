"""What the stages of a colony's task teach: outcomes on near and far goals, with many and few nodes, and a picture."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["FULL", "SMALL", "Size", "draw_stages", "learnt_after", "stage_runs", "stages_table", "tasks_of", "taught"]

COLONIES = 128
"""Fresh colonies of each task that a policy is judged by."""
COLONY_SEED = 40_000
"""Names them; a trainer's come from the seed of its run."""
NEAR, FAR = 0.4, 0.95
"""Share of the width that is the goal of a near task, and of the whole one."""
LEARNT = 10.0
"""Return that only colonies at the goal have."""


class Size(NamedTuple):
    """A colony, and when its stages begin."""

    nodes: tuple[int, ...]
    """Nodes beyond which it has over-grown, in each stage of those runs whose stages are of nodes; the last is that of
    the whole task."""
    frames: tuple[int, ...]
    """Env steps at which the stages begin; the share to delete is alone until the second does."""
    settings: Mapping[str, Any]
    """Of all runs."""


_OFTEN: dict[str, Any] = {"eval_episodes": 64, "log_interval": 2}
# small enough for a CPU core: a narrow substrate, few slots, a narrow encoder, and no episode longer than it need be
SMALL = Size(
    (40, 32, 26, 20),
    (0, 8_000, 14_000, 20_000),
    {**_OFTEN, "width": 100.0, "height": 100.0, "encoder_width": 16, "total_steps": 60_000, "eval_interval": 6}
    | {"max_episode_steps": 100},
)
FULL = Size(
    (200, 160, 130, 100),
    (0, 33_000, 58_000, 83_000),
    {**_OFTEN, "eval_interval": 24, "max_episode_steps": 300},
)
"""The colony of the preset, with stages as long a part of its run as the small one's."""


def stage_runs(size: Size) -> dict[str, dict[str, Any]]:
    """Settings of runs by what their stages change; the last stage of each is the same task."""
    frames, nodes = (", ".join(map(str, numbers)) for numbers in (size.frames, size.nodes))
    same = {**size.settings, "critical_nodes": size.nodes[0], "stage_nodes": str(size.nodes[-1])}
    goals, nodes = {"stage_goals": "0.3, 0.5, 0.7, 0.95"}, {"stage_nodes": nodes}
    return {
        "none": same,
        "goals": {**same, **goals, "stage_frames": frames},
        "nodes": {**same, **nodes, "stage_frames": frames},
        "both": {**same, **goals, **nodes, "stage_frames": frames},
        "delete-only": {**same, "stage_one_frames": size.frames[1]},
    }


def tasks_of(config: Any) -> dict[str, tuple[float, int]]:
    """Near and far goals with the nodes of the first stage and of the last, by name; the last is the whole task."""
    from torchrl_perf.systems.durotaxis.stages import last_stage

    few = last_stage(config).critical_nodes or (config.critical_nodes,)
    several = [(goal, nodes) for nodes in (config.critical_nodes, few[-1]) for goal in (NEAR, FAR)]
    return {f"goal {goal:g}, {nodes} nodes": (goal, nodes) for goal, nodes in several}


def taught(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """What a policy reaches without noise on fresh colonies of its :func:`tasks_of`, and how it acts on the last.

    Of ``trained``: ``success`` on the whole task, ``steps`` to its goal of those that reached it (left out where none
    has), ``deleted``, the mean share of the nodes that it deletes, ``stride``, the mean length of a step that it asks
    for in the middle of the substrate, and the success on each task by its name. ``half`` is a fixed rule, to delete
    half of the nodes and take the longest steps; ``random`` draws actions uniformly.
    """
    found = {"trained": _figures(trainer.actor, trainer.config, trainer.device)}
    return {**found, **_rules(trainer.config, trainer.device)}


_KNOWN: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}


def _rules(config: Any, device: torch.device) -> dict[str, dict[str, float]]:
    """The figures of ``half`` and ``random``, which are the same for all runs of a study."""
    from torchrl_perf.systems.durotaxis.blueprint import make_colony

    tasks = tuple(tasks_of(config))
    key = (COLONIES, config.width, config.height, tasks, config.max_episode_steps, str(device))
    if key not in _KNOWN:
        bounds = make_colony(dataclasses.replace(config, num_envs=1), device).settings.action_bounds
        low, high = (torch.tensor(bound, device=device) for bound in bounds)
        longest = torch.stack((high[0], high[1], low[2], high[3], torch.zeros_like(low[4])))

        def half(tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("action", longest.expand(*tensordict.batch_size, 5))

        def uniform(tensordict: TensorDictBase) -> TensorDictBase:
            drawn = torch.rand(*tensordict.batch_size, 5, device=device)
            return tensordict.set("action", low + (high - low) * drawn)

        _KNOWN[key] = {who: _figures(rule, config, device) for who, rule in (("half", half), ("random", uniform))}
    return _KNOWN[key]


def _figures(policy: Any, config: Any, device: torch.device) -> dict[str, float]:
    from torchrl_perf.envs.durotaxis import Durotaxis

    found: dict[str, float] = {}
    tasks = tasks_of(config)
    for task, (goal, nodes) in tasks.items():
        episodes = _first_episodes(policy, config, device, goal, nodes)
        reached = episodes["outcome"] == Durotaxis.outcomes.index("success")
        found[task] = float(reached.float().mean())
        if task == list(tasks)[-1]:
            lived = episodes["steps"].sum()
            how = {key: float(episodes[key].sum() / lived) for key in ("deleted", "stride")}
            if bool(reached.any()):
                how["steps"] = float(episodes["steps"][reached].mean())
            found = {"success": found[task], **how, **found}
    return found


@torch.no_grad()
def _first_episodes(policy: Any, config: Any, device: torch.device, goal: float, nodes: int) -> TensorDict:
    """Of each colony's first episode ``[C]``: ``outcome``, ``steps``, and sums of ``deleted`` and ``stride``."""
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_perf.envs.durotaxis import ColonyCurriculum
    from torchrl_perf.envs.durotaxis.dynamics import hill_radius
    from torchrl_perf.runtime.seeds import seeded
    from torchrl_perf.systems.durotaxis.blueprint import make_colony

    config = dataclasses.replace(config, num_envs=COLONIES)
    with seeded(COLONY_SEED, device), set_exploration_type(ExplorationType.DETERMINISTIC):
        env = make_colony(config, device, curriculum=ColonyCurriculum(goal=(goal,), critical_nodes=(nodes,)))
        # that of the length of a step that an action asks for, halfway along the gradient
        stiffness = torch.tensor(env.settings.stiffness_at(config.width / 2), device=device)
        running, root = torch.ones(COLONIES, 1, dtype=torch.bool, device=device), env.reset()
        sums = {name: torch.zeros_like(running, dtype=torch.float64) for name in ("steps", "deleted", "stride")}
        outcome = torch.zeros_like(running, dtype=torch.int8)
        for _ in range(config.max_episode_steps):
            stepped, root = env.step_and_maybe_reset(policy(root))
            share, gamma, alpha, noise, _ = stepped.get("action").split(1, -1)
            added = {"steps": torch.ones_like(share), "deleted": share}
            added["stride"] = hill_radius(gamma, alpha, noise, stiffness)
            for key, value in added.items():
                sums[key] += torch.where(running, value.double(), 0.0)
            outcome = torch.where(running, stepped.get(("next", "outcome")), outcome)
            running &= ~stepped.get(("next", "done"))
            if not bool(running.any()):
                break
    rows: dict[str, Tensor] = {"outcome": outcome, **sums}
    return TensorDict({name: value.squeeze(-1) for name, value in rows.items()}, [COLONIES])


def learnt_after(curve: Mapping[str, Sequence[float]]) -> float:
    """Env steps after which the return on the whole task is :data:`LEARNT`, between evaluations on a line; NaN before.

    Args:
        curve: "step" and "value" of ``eval/mean_return``.
    """
    before = (0.0, 0.0)
    for step, value in zip(curve["step"], curve["value"], strict=True):
        if value >= LEARNT:
            return before[0] + (step - before[0]) * (LEARNT - before[1]) / (value - before[1])
        before = step, value
    return math.nan


def stages_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of ``docs/systems.md``: by run the mean over its seeds, the least and the greatest.

    Args:
        rows: of the study's runs.
    """
    from torchrl_perf.bench.report import format_table

    lines = []
    for name in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == name]
        after = [learnt_after(row["curves"]["eval/mean_return"]) / 1000 for row in own]
        trained = [row["evaluation"]["trained"] for row in own]
        line = {"stages": name, "env steps to a return of 10": _spread(after, "{:.1f} k")}
        line["at the goal"] = _spread([figures["success"] for figures in trained], "{:.0%}")
        line["share deleted"] = _spread([figures["deleted"] for figures in trained], "{:.2f}")
        line["length of a step"] = _spread([figures["stride"] for figures in trained], "{:.1f}")
        lines.append(line)
    return format_table(lines, list(lines[0]))


def _spread(values: Sequence[float], form: str) -> str:
    """The mean of the finite values with the least and the greatest, and how many of all that are."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "never"
    middle, low, high = (form.format(value) for value in (sum(finite) / len(finite), min(finite), max(finite)))
    count = "" if len(finite) == len(values) else f", {len(finite)} of {len(values)}"
    return f"{middle} [{low}, {high}]{count}"


def draw_stages(size: Size, title: str, rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """What each kind of stage teaches: the whole task and the task of the moment by step, when, and how policies act.

    Args:
        size: whose stages began at its frames.
        title: heading.
        rows: of the study's runs.
        path: of the picture.
    """
    from matplotlib.ticker import EngFormatter

    from torchrl_perf.metrics.figure import new_figure, save_figure

    figure = new_figure(17.0, 4.2)
    learning, ending, when, acting = figure.subplots(1, 4, width_ratios=(1.15, 1.15, 1.0, 1.0))
    names = list(dict.fromkeys(row["run"] for row in rows))
    for number, name in enumerate(names):
        own = [row for row in rows if row["run"] == name]
        colour = _draw_band(learning, own, "eval/mean_return", name)
        _draw_band(ending, own, "episode/overgrowth", name)
        after = [learnt_after(row["curves"]["eval/mean_return"]) for row in own]
        when.plot(after, [number] * len(after), "o", color=colour, markersize=7, alpha=0.8)
        trained = [row["evaluation"]["trained"] for row in own]
        places = [[figures[key] for figures in trained] for key in ("deleted", "stride")]
        acting.scatter(*places, color=colour, s=42, edgecolors="white", zorder=3)
    for start in size.frames[1:]:
        for axes in (learning, ending):
            axes.axvline(start, color="0.6", linewidth=0.8, linestyle=":")
    half = rows[0]["evaluation"]["half"]
    acting.scatter(half["deleted"], half["stride"], marker="*", color="black", s=130, label="half, longest", zorder=4)
    learning.axhline(LEARNT, color="0.3", linewidth=0.8, linestyle="--")
    learning.set(xlabel="env steps", ylabel="return on the whole task", title="the whole task; dotted: stages begin")
    ending.set(xlabel="env steps", ylabel="share that over-grew", title="the task of the moment")
    when.set(xlabel="env steps", title=f"whole task learnt (return of {LEARNT:g})", ylim=(len(names) - 0.5, -0.5))
    when.set_xlim(0, max(row["steps"] for row in rows))
    when.set_yticks(range(len(names)), names)
    acting.set(xlabel="share of the nodes deleted", ylabel="length of a step, halfway", title="how they act at the end")
    for axes in (learning, ending, when):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (learning, ending, when, acting):
        axes.grid(alpha=0.3)
    learning.legend(fontsize=8)
    acting.legend(fontsize=8)
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    figure.suptitle(f"{title}: interquartile mean and 95% interval, seeds {seeds}")
    return save_figure(figure, path, dpi=110)


def _draw_band(axes: Any, rows: Sequence[Mapping[str, Any]], column: str, name: str) -> Any:
    """The interquartile mean of some rows' curves and its interval; returns the colour."""
    from torchrl_perf.bench.learning import MOST_POINTS
    from torchrl_perf.metrics.comparison import Curve, band_of

    band = band_of([Curve(row["curves"][column]["step"], row["curves"][column]["value"]) for row in rows], MOST_POINTS)
    line = axes.plot(band.steps, band.middle, label=name, linewidth=1.4)[0]
    axes.fill_between(band.steps, band.low, band.high, alpha=0.15, color=line.get_color(), linewidth=0)
    return line.get_color()
