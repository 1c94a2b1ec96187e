"""A colony that climbs a stiffness gradient by dividing and by shedding nodes.

Dimension key: ``N`` envs, ``M`` slots for nodes, ``C = M / 2`` critical number of nodes, ``K`` reward components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.envs.drawing import GREEN, PALE, RED, Line
from torchrl_perf.envs.durotaxis.dynamics import Colony, divide, fresh_colony, living, select_deleted, stiffness
from torchrl_perf.envs.durotaxis.features import (
    GRAPH_FEATURES,
    NODE_FEATURES,
    Summary,
    graph_features,
    is_softer,
    mean_of,
    node_features,
    summarize,
)
from torchrl_perf.envs.durotaxis.rewards import (
    COMPONENT_NAMES,
    MILESTONES,
    OUTCOMES,
    TERMINATION_CLIP,
    TERMINATION_REWARD,
    TERMINATION_SCALE,
    RewardMode,
    Step,
    component_weights,
    reward_components,
)
from torchrl_perf.envs.durotaxis.settings import (
    ACTION_NAMES,
    GOAL,
    HELD_SHAPE,
    LEFTWARD_LIMIT,
    ColonyCurriculum,
    ColonySettings,
)
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition
from torchrl_perf.functional.components import weighted_sum

__all__ = ["Durotaxis"]

Actions = Literal["global", "per_node"]
PER_NODE_KEYS: tuple[NestedKey, NestedKey] = (("action", "kind"), ("action", "growth"))


class Durotaxis(StructuredEnv):
    """Lead a colony of cell-like nodes up a stiffness gradient to the right edge, neither over-growing nor dying out.

    **Step.** ``k = floor(delete_ratio * n)`` of the ``n`` nodes are deleted, those farthest left (equal ones by slot).
    Each of the others has one child at the distance ``gamma / (1 + (alpha / I)^2) + noise`` in the direction ``theta``,
    with the stiffness ``I`` under the parent; ``noise`` is a constant that is added, not a random number. Children stay
    ``max(2, 1 %)`` away from the edges. So ``n' = 2 (n - k)``: from 5 nodes, deleting half of the colony at each step
    gives 6, 6, 6, ..., deleting none 10, 20, 40, 80, 160.

    **Ends.** "outcome" says how; if several apply, the first in this order: 2 over-growth, more than C nodes; 3 no node
    left; 4 a node off the substrate; 5 the centroid moved left for 30 steps on end; 1 success, a node at 95 % of the
    width. 6 is the time limit, which truncates; 0 an episode that goes on.

    **Reward**: the sum of the columns "reward_components" by ``reward_weights``. Mode ``"centroid"`` is ``5 (x_t -
    x_{t-1}) / x_goal`` of the centroid plus a reward for the end, 10 for success, -0.3 for over-growth, -2, -2 and -1:
    the sum is ``5 (x_T - x_0) / x_goal`` plus the end's. ``"full"`` is the sum of all columns, with the centroid's
    distance in units of length and the end unscaled (500, -15, -100, -100, -50); ``"delete"`` is the sum of the
    deletions and the end. ``reward_weights`` by name replace the mode's, for other combinations.

    **What moves the colony.** Nodes stay where they are born. With ``theta`` on the full circle and no gradient the
    centroid stays where it is on average if any nodes are deleted, and moves right if the leftmost are: the drift comes
    from selection and from the bound of the angle. The stiffness only scales the length of a step. Real cells do
    follow gradients (Novikova et al., PRL 118, 078103, arXiv:1512.06024); this model does not show that they do.

    **Keys.** Read: ``"action"`` float [N, 5], delete_ratio in [0, delete_max], gamma in [.5, 15], alpha in [.5, 4],
    noise in [.05, .5], theta in [-pi/6, pi/6]. With ``actions="per_node"``: ``("action", "kind")`` int64 [N, M], 0 to
    have a child and 1 to be deleted, and ``("action", "growth")`` float [N, 4], gamma to theta for the colony; kinds of
    slots without a node do nothing. ``HybridActor(spec=env.full_action_spec, valid_key="node_mask", ...)`` fits it.
    Numbers are clipped to their bounds; NaN counts as the least value.

    Written at the root and under "next": ``"nodes"`` float [N, M, 11] (columns ``NODE_FEATURES``), ``"node_mask"``
    bool [N, M], ``"graph"`` float [N, 19] (columns ``GRAPH_FEATURES``), and the flags of :class:`StructuredEnv`. Nodes
    fill the first slots. Only a colony that has just over-grown has more than C: a policy, which never sees one, loses
    nothing with ``nodes[:, :C]``. Under "next" also ``"reward"`` [N, 1], ``"reward_components"`` [N, K] (columns
    ``component_names``) and ``"outcome"`` int8 [N, 1]; the root repeats the latter two of the step before.

    **State**: ``x``, ``y``, ``age``, ``pid`` [N, M]; ``count``, ``next_pid``, ``center_x``, ``moved``, ``left_run``,
    ``milestones``, ``steps``, ``stage`` [N], as buffers ``state_...``; beside them ``frames``, int64, which the
    curriculum goes by, and ``reward_weights`` [K], which may be changed in place, under a graph too.

    Args:
        num_envs: N, at least 1.
        reward_mode: ``"centroid"``, ``"full"`` or ``"delete"``.
        reward_weights: weights of columns by name, 0 for a name left out; those of the mode by default.
        max_episode_steps: time limit; None means none.
        actions: ``"global"``, five numbers, or ``"per_node"``, a choice for each node and four numbers.
        curriculum: stages by frames; the whole task from the start by default.
        device: where everything lives.
        dtype: float type of state, observation, reward and action.
        seed: passed to ``set_seed``.
        **settings: those of :class:`ColonySettings`, such as ``size=(400.0, 400.0)``, ``critical_nodes=100``,
            ``slope=0.01``, ``intercept=1.0``, ``field="linear"``, ``delete_max=0.5``.

    Raises:
        ValueError: for settings, modes, names or stages outside what is described.
        TypeError: for a setting that does not exist, or a dtype that is not a float type.
        RuntimeError: CUDA asked for where there is none.
    """

    scene_half_width = 0.8
    component_names: ClassVar[tuple[str, ...]] = COMPONENT_NAMES
    """Names of the K columns of "reward_components"."""
    outcomes: ClassVar[tuple[str, ...]] = OUTCOMES
    """Names of the numbers in "outcome"."""
    action_names: ClassVar[tuple[str, ...]] = ACTION_NAMES
    """Names of the five numbers of a global action."""

    settings: ColonySettings
    curriculum: ColonyCurriculum
    reward_weights: Tensor
    frames: Tensor
    _stage_frames: Tensor
    _stage_goal: Tensor
    _stage_critical: Tensor
    _stage_alone: Tensor
    _held_shape: Tensor
    _end_reward: Tensor
    _milestone_share: Tensor
    _milestone_reward: Tensor
    _action_low: Tensor
    _action_high: Tensor

    def __init__(
        self,
        num_envs: int,
        *,
        reward_mode: RewardMode = "centroid",
        reward_weights: Mapping[str, float] | None = None,
        max_episode_steps: int | None = 1000,
        actions: Actions = "global",
        curriculum: ColonyCurriculum | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        rules, stages = ColonySettings.of(settings), curriculum or ColonyCurriculum()
        if actions not in ("global", "per_node"):
            raise ValueError(f"actions: expected 'global' or 'per_node', received {actions!r}. Remedy: one of the two.")
        stages.check_for(rules, actions)
        weights = component_weights(reward_mode, reward_weights)
        super().__init__(num_envs, device=device, dtype=dtype, max_episode_steps=max_episode_steps)
        self.settings, self.curriculum = rules, stages
        self.actions, self.reward_mode = actions, reward_mode
        self.register_buffer("reward_weights", torch.tensor(weights, dtype=dtype, device=self.device))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=self.device))
        self._make_tables()
        self.begin(seed)

    def _make_tables(self) -> None:
        """Constants on the device, which no ``state_dict`` needs."""
        stages = len(self.curriculum.frames)
        width = self.settings.size[0]
        ends = torch.tensor(TERMINATION_REWARD, dtype=torch.float64)
        if self.reward_mode != "full":
            ends = (TERMINATION_SCALE * ends).clamp(-TERMINATION_CLIP, TERMINATION_CLIP)
        low, high = self.settings.action_bounds
        tables = {
            "stage_frames": torch.tensor(self.curriculum.frames),
            "stage_goal": torch.tensor(self.curriculum.goal or (GOAL,) * stages, dtype=torch.float64) * width,
            "stage_critical": torch.tensor(
                self.curriculum.critical_nodes or (self.settings.critical_nodes,) * stages, dtype=torch.int32
            ),
            "stage_alone": torch.tensor(self.curriculum.delete_only or (False,) * stages),
            "held_shape": torch.tensor(HELD_SHAPE, dtype=torch.float64).clamp(
                torch.tensor(low[1:], dtype=torch.float64), torch.tensor(high[1:], dtype=torch.float64)
            ),
            "end_reward": ends,
            "milestone_share": torch.tensor([share for share, _ in MILESTONES], dtype=torch.float64),
            "milestone_reward": torch.tensor([0.0, *(worth for _, worth in MILESTONES)], dtype=torch.float64).cumsum(0),
        }
        for name, table in tables.items():
            dtype = self.dtype if table.is_floating_point() else table.dtype
            self.register_buffer(f"_{name}", table.to(self.device, dtype), persistent=False)
        for name, bound in (("low", low), ("high", high)):
            limit = torch.tensor(bound, dtype=self.dtype, device=self.device)
            self.register_buffer(f"_action_{name}", limit, persistent=False)

    # -- what the base asks for --------------------------------------------------------------------------------------

    def make_specs(self) -> EnvSpecs:
        """Return the keys of the class docstring."""
        slots = self.settings.slots
        low, high = self._action_low, self._action_high
        if self.actions == "global":
            action: dict[NestedKey, Any] = {"action": self.box(low, high, 5)}
        else:
            kind, shape = PER_NODE_KEYS
            action = {kind: self.choice(2, slots), shape: self.box(low[1:], high[1:], 4)}
        outcome = self.choice(len(OUTCOMES), 1, dtype=torch.int8)
        return EnvSpecs(
            observation={
                "nodes": self.unbounded(slots, len(NODE_FEATURES)),
                "node_mask": self.choice(2, slots, dtype=torch.bool),
                "graph": self.unbounded(len(GRAPH_FEATURES)),
            },
            action=action,
            reward={"reward": self.unbounded(1)},
            info={"reward_components": self.unbounded(len(COMPONENT_NAMES)), "outcome": outcome},
        )

    def draw_state(self) -> dict[str, Tensor]:
        """Return fresh colonies in the stage of the moment."""
        settings, device = self.settings, self.device
        uniform = torch.rand(self.num_envs, settings.start_nodes, 2, dtype=self.dtype, device=device)
        colony = fresh_colony(uniform, settings)
        zero = torch.zeros(self.num_envs, dtype=torch.int32, device=device)
        # for all rows: indexing with a 0-d tensor would be a host read
        stage = ((self.frames >= self._stage_frames).sum() - 1).to(torch.int32).expand(self.num_envs)
        center = mean_of(colony.x, living(colony.count, settings.slots), colony.count)
        return {
            **colony._asdict(),
            "center_x": center,
            "moved": torch.zeros_like(center),
            "left_run": zero,
            # of an easier stage's goal a fresh colony may have made a quarter of the way
            "milestones": self._passed(center, self._stage_goal[stage]),
            "steps": zero,
            "stage": stage,
        }

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the substrate, the goal on its right, and the nodes."""
        width, height = self.settings.size
        unit = max(width, height)
        there = living(state["count"], self.settings.slots)
        place = torch.stack((state["x"] - width / 2, state["y"] - height / 2), -1) / unit
        nodes = torch.where(there.unsqueeze(-1), place, torch.nan)
        corner = place.new_tensor([[-width, -height], [-width, height], [width, height], [width, -height]]) / 2 / unit
        corners = corner.expand(self.num_envs, 4, 2)
        goal = (self._stage_goal[state["stage"]].to(place.dtype) - width / 2) / unit
        ends = [torch.stack((goal, torch.full_like(goal, side * height / 2 / unit)), -1) for side in (-1, 1)]
        return [
            Line(corners, corners.roll(-1, 1), 0.003, PALE),
            Line(*ends, 0.004, GREEN),
            Line(nodes, nodes, 0.012, RED),
        ]

    def advance(self, state: dict[str, Tensor], action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Delete, divide, and see whether the episode is over."""
        self.frames.add_(self.num_envs)
        settings, half = self.settings, self.settings.critical_nodes
        goal = self._stage_goal[state["stage"]]
        before = _colony(state)
        deleted, shape = self._decide(before, state["stage"], action)
        after, parent_x = divide(before, deleted, shape, settings)
        summary = summarize(after, settings)

        gone = after.count == 0
        center = torch.where(gone, state["center_x"], summary.center_x)
        moved = center - state["center_x"]
        left_run = torch.where(moved < 0, state["left_run"] + 1, 0)
        milestones = torch.maximum(state["milestones"], self._passed(center, goal))
        steps = state["steps"] + 1
        outcome = self._outcome(after, summary, left_run, self._stage_critical[state["stage"]], goal)
        terminated = outcome > 0
        if self.max_episode_steps is not None:
            limit = ~terminated & (steps >= self.max_episode_steps)
            outcome = outcome.masked_fill(limit, OUTCOMES.index("truncated"))

        lived = living(before.count, half)
        firmness = stiffness(before.x[:, :half], settings)
        marked = lived & is_softer(firmness, mean_of(firmness, lived, before.count))
        is_child = summary.alive & ~living(after.count // 2, settings.slots)
        reached = torch.stack((state["milestones"], milestones))
        step = Step(before, marked, deleted, after, parent_x, is_child, moved, reached, outcome)
        tables = (self._end_reward, self._milestone_reward)
        components = reward_components(step, summary, tables, None if self.reward_mode == "full" else goal, settings)
        next_state = {
            **after._asdict(),
            "center_x": center,
            "moved": moved,
            "left_run": left_run,
            "milestones": milestones,
            "steps": steps,
            "stage": state["stage"],
        }
        entries: dict[NestedKey, Tensor] = {
            "reward": weighted_sum(components, self.reward_weights),
            "reward_components": components,
            "outcome": outcome.to(torch.int8).unsqueeze(-1),
        }
        return Transition(next_state, entries, terminated)

    def observe(self, state: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        """Return "nodes", "node_mask" and "graph" of a state."""
        colony, stage = _colony(state), state["stage"]
        summary = summarize(colony, self.settings)
        goal = self._stage_goal[stage]
        limits = (goal, self._stage_critical[stage], self.max_episode_steps)
        return {
            "nodes": node_features(colony, summary, goal, self.settings),
            "node_mask": summary.alive,
            "graph": graph_features(colony, summary, state, limits, self.settings),
        }

    # -- parts of a step -----------------------------------------------------------------------------------------------

    def _decide(self, colony: Colony, stage: Tensor, action: Tensor | dict[NestedKey, Tensor]) -> tuple[Tensor, Tensor]:
        """The nodes to delete, bool [N, C], and gamma, alpha, noise and theta, float [N, 4]."""
        low, high = self._action_low, self._action_high
        half = self.settings.critical_nodes
        if isinstance(action, dict):
            kind, shape = (action[key] for key in PER_NODE_KEYS)
            deleted = living(colony.count, half) & (kind[:, :half] == 1)
            return deleted, _within(shape, low[1:], high[1:])
        action = _within(action, low, high)
        shape = torch.where(self._stage_alone[stage].unsqueeze(-1), self._held_shape, action[:, 1:])
        return select_deleted(colony, action[:, 0], self.settings), shape

    def _outcome(self, after: Colony, summary: Summary, left_run: Tensor, critical: Tensor, goal: Tensor) -> Tensor:
        """How the episode terminates, int64 [N]; 0 where it goes on."""
        width, height = self.settings.size
        fallen = (summary.low_x < 0) | (summary.high_x > width) | (summary.low_y < 0) | (summary.high_y > height)
        outcome = torch.where(summary.high_x >= goal, OUTCOMES.index("success"), 0)
        # the outcomes that take precedence are written last
        for name, applies in (
            ("leftward", left_run >= LEFTWARD_LIMIT),
            ("out_of_bounds", fallen),
            ("empty", after.count == 0),
            ("overgrowth", after.count > critical),
        ):
            outcome = outcome.masked_fill(applies, OUTCOMES.index(name))
        return outcome

    def _passed(self, center: Tensor, goal: Tensor) -> Tensor:
        """Number of milestones at or before each centroid, int32 [N]."""
        return (center.unsqueeze(-1) >= self._milestone_share * goal.unsqueeze(-1)).sum(-1, dtype=torch.int32)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the present state: ``"position"`` float [N, M, 2], ``"alive"`` bool [N, M], and the rest.

        The rest are the entries of the state except x and y, named without ``state_``. After the step that ended an
        episode this is the new colony; the final one is in the observation of that step.
        """
        state = {name: buffer.clone() for name, buffer in self._state().items()}
        position = torch.stack((state.pop("x"), state.pop("y")), -1)
        return {"position": position, "alive": living(state["count"], self.settings.slots), **state}


def _colony(state: dict[str, Tensor]) -> Colony:
    return Colony(*(state[name] for name in Colony._fields))


def _within(action: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The numbers clipped to their bounds, NaN to the lower one, since a state that is once NaN would stay NaN."""
    return torch.where(action.isnan(), low, action).clamp(low, high)
