"""What the stages of a colony's task teach: outcomes on near and far goals, with many and few nodes, and a picture."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["STAGE_RUNS", "TASKS", "draw_stages", "taught"]

COLONIES = 256
"""Fresh colonies of each task that a policy is judged by."""
COLONY_SEED = 40_000
"""Names them; a trainer's come from the seed of its run."""
MANY, FEW, NEAR, FAR = 40, 20, 0.4, 0.95
TASKS = {
    f"goal {NEAR:g}, {MANY} nodes": (NEAR, MANY),
    f"goal {FAR:g}, {MANY} nodes": (FAR, MANY),
    f"goal {NEAR:g}, {FEW} nodes": (NEAR, FEW),
    f"goal {FAR:g}, {FEW} nodes": (FAR, FEW),
}
"""Share of the width that is the goal, and nodes beyond which a colony has over-grown; the last is the whole task."""
MIDDLE = 50.0
"""Where the length of a step is computed that an action asks for: halfway along the gradient."""

_FRAMES = "0, 8000, 14000, 20000"
_GOALS, _NODES = {"stage_goals": "0.3, 0.5, 0.7, 0.95"}, {"stage_nodes": "40, 32, 26, 20"}
# small enough for a CPU core: a narrow substrate, few slots, a narrow encoder, and no episode longer than it need be
_COLONY: dict[str, Any] = {
    **{"width": 100.0, "height": 100.0, "critical_nodes": MANY, "stage_nodes": str(FEW), "encoder_width": 16},
    **{"total_steps": 40_000, "max_episode_steps": 100, "eval_interval": 4, "eval_episodes": 64, "log_interval": 2},
}
STAGE_RUNS: dict[str, dict[str, Any]] = {
    "none": _COLONY,
    "goals": {**_COLONY, **_GOALS, "stage_frames": _FRAMES},
    "nodes": {**_COLONY, **_NODES, "stage_frames": _FRAMES},
    "both": {**_COLONY, **_GOALS, **_NODES, "stage_frames": _FRAMES},
    "delete-only": {**_COLONY, "stage_one_frames": 8_000},
}
"""Settings of runs by what their stages change; the last stage of each is the same task."""


def taught(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """What a policy reaches without noise on fresh colonies of each of :data:`TASKS`, and how it acts on the last.

    Of ``trained``: ``success`` on the whole task, ``steps`` to its goal of those that reached it (left out where none
    has), ``deleted``, the mean share of the nodes that it deletes, ``stride``, the mean length of a step that it asks
    for in the middle of the substrate, and the success on each task by its name. ``half`` is a fixed rule, to delete
    half of the nodes and take the longest steps; ``random`` draws actions uniformly.
    """
    env = trainer.make_env()
    low, high = (torch.tensor(bound, device=env.device) for bound in env.settings.action_bounds)
    longest = torch.stack((high[0], high[1], low[2], high[3], torch.zeros_like(low[4])))

    def half(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", longest.expand(*tensordict.batch_size, 5))

    def uniform(tensordict: TensorDictBase) -> TensorDictBase:
        drawn = torch.rand(*tensordict.batch_size, 5, device=low.device)
        return tensordict.set("action", low + (high - low) * drawn)

    policies = {"trained": trainer.actor, "half": half, "random": uniform}
    return {who: _figures(policy, trainer) for who, policy in policies.items()}


def _figures(policy: Any, trainer: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for task, (goal, nodes) in TASKS.items():
        episodes = _first_episodes(policy, trainer, goal, nodes)
        reached = episodes["outcome"] == trainer.env.outcomes.index("success")
        found[task] = float(reached.float().mean())
        if (goal, nodes) == (FAR, FEW):
            lived = episodes["steps"].sum()
            how = {key: float(episodes[key].sum() / lived) for key in ("deleted", "stride")}
            if bool(reached.any()):
                how["steps"] = float(episodes["steps"][reached].mean())
            found = {"success": found[task], **how, **found}
    return found


@torch.no_grad()
def _first_episodes(policy: Any, trainer: Any, goal: float, nodes: int) -> TensorDict:
    """Of each colony's first episode ``[C]``: ``outcome``, ``steps``, and sums of ``deleted`` and ``stride``."""
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    from torchrl_perf.envs.durotaxis import ColonyCurriculum
    from torchrl_perf.envs.durotaxis.dynamics import hill_radius
    from torchrl_perf.runtime.seeds import seeded
    from torchrl_perf.systems.durotaxis.blueprint import make_colony

    config, device = dataclasses.replace(trainer.config, num_envs=COLONIES), trainer.device
    with seeded(COLONY_SEED, device), set_exploration_type(ExplorationType.DETERMINISTIC):
        env = make_colony(config, device, curriculum=ColonyCurriculum(goal=(goal,), critical_nodes=(nodes,)))
        stiffness = torch.tensor(env.settings.stiffness_at(MIDDLE), device=device)
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


def draw_stages(title: str, rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """What each kind of stage teaches: returns on the whole task by step, outcomes by task, and how policies act.

    Args:
        title: heading.
        rows: of the study's runs.
        path: of the picture.
    """
    import numpy as np
    from matplotlib.ticker import EngFormatter

    from torchrl_perf.bench.learning import MOST_POINTS
    from torchrl_perf.metrics.comparison import Curve, band_of
    from torchrl_perf.metrics.figure import new_figure, save_figure

    figure = new_figure(14.5, 4.4)
    learning, success, acting = figure.subplots(1, 3, width_ratios=(1.2, 1.25, 1.0))
    names = list(dict.fromkeys(row["run"] for row in rows))
    table = np.zeros((len(names), len(TASKS)))
    for number, name in enumerate(names):
        own = [row for row in rows if row["run"] == name]
        curves = [row["curves"]["eval/mean_return"] for row in own]
        band = band_of([Curve(curve["step"], curve["value"]) for curve in curves], MOST_POINTS)
        line = learning.plot(band.steps, band.middle, label=name, linewidth=1.4)[0]
        learning.fill_between(band.steps, band.low, band.high, alpha=0.15, color=line.get_color(), linewidth=0)
        trained = [row["evaluation"]["trained"] for row in own]
        table[number] = [np.mean([figures[task] for figures in trained]) for task in TASKS]
        places = [[figures[key] for figures in trained] for key in ("deleted", "stride")]
        acting.scatter(*places, color=line.get_color(), label=name, s=42, edgecolors="white", zorder=3)
    for start in (8_000, 14_000, 20_000):
        learning.axvline(start, color="0.6", linewidth=0.8, linestyle=":")
    half = rows[0]["evaluation"]["half"]
    acting.scatter(half["deleted"], half["stride"], marker="*", color="black", s=130, label="half, longest", zorder=4)
    learning.set(xlabel="env steps", ylabel="return on the whole task", title="learning; dotted: where stages begin")
    learning.xaxis.set_major_formatter(EngFormatter(sep=""))
    acting.set(xlabel="share of the nodes deleted", ylabel="length of a step, halfway", title="how they act at the end")
    success.imshow(table, vmin=0, vmax=1, cmap="YlGn", aspect="auto")
    for number, column in np.ndindex(*table.shape):
        colour = "white" if table[number, column] > 0.6 else "black"
        success.text(column, number, f"{table[number, column]:.0%}", ha="center", va="center", color=colour)
    success.set_xticks(range(len(TASKS)), [task.replace(", ", "\n") for task in TASKS], fontsize=8)
    success.set_yticks(range(len(names)), names)
    success.set_title("colonies at the goal after training")
    for axes in (learning, acting):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(
        f"{title}: interquartile mean and 95% interval, seeds {', '.join(map(str, sorted({r['seed'] for r in rows})))}"
    )
    return save_figure(figure, path, dpi=110)
