"""Where to break the fuel so that fires burn less, one cell at a time or all at once.

Dimension key: ``N`` envs, ``H``, ``W`` cells, ``C`` planes of an observation, ``L`` landscapes, ``K`` budget in cells.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec
from typing_extensions import Unpack

from torchrl_perf.envs.drawing import GREEN, INK, PALE, cells
from torchrl_perf.envs.fuel_breaks.assess import Assessment, assess
from torchrl_perf.envs.fuel_breaks.fire import burn, default_sweeps, thresholds
from torchrl_perf.envs.fuel_breaks.landscape import PLANES, Landscape, sides
from torchrl_perf.envs.fuel_breaks.placements import random_breaks
from torchrl_perf.envs.fuel_breaks.search import swap_search
from torchrl_perf.envs.fuel_breaks.words import burned_fraction, word_dtype
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition

__all__ = ["FireOptions", "FuelBreaks"]

Mode = Literal["sequential", "one_shot"]
Reward = Literal["terminal", "shaped"]
OBSERVATIONS = ("planes", "compact")


class FireOptions(TypedDict, total=False):
    """Further arguments of :class:`FuelBreaks`, see there."""

    fires: int
    neighbours: int
    common_random_numbers: bool
    observation: str
    sweeps: int | None
    dtype: torch.dtype


class FuelBreaks(StructuredEnv):
    """Place fuel breaks in a landscape; M wildfires then show what they are worth.

    **Fires** begin at a random cell of those that can burn and are no break, and spread by the model of Alexandridis et
    al., see ``fire``, until they have burned out. The landscape is one of L, drawn at each reset.

    **Sequential mode.** Read: ``"action"`` int64 [N], the cell ``row W + column`` of the next break. An episode has K
    steps, always, and then terminates. An action that ``"action_mask"`` forbids, on a break or where nothing burns,
    places nothing and uses up its part of the budget.

    **One-shot mode.** Read: ``"action"`` bool [N, H W] (or integers, not 0 for a break), all breaks at once: the first
    K allowed cells, in the order of the grid. An episode has one step.

    **Reward**, ``"reward"`` [N, 1] under "next". ``"terminal"``: minus the mean burned fraction of all cells, at the
    last step; 0 before. In one-shot mode minus the number of cells that burned, summed over the fires. ``"shaped"``:
    ``burned_{t-1} - burned_t``, which telescopes to ``burned_0 - burned_K``. With ``common_random_numbers`` an
    episode's fires are the same at all its steps, so that a difference is due to the break alone; otherwise new ones
    are drawn at each step. It does not affect ``"terminal"``, which simulates once an episode.
    ``"burned"`` [N, 1] under "next": the fraction, at the last step, and with ``"shaped"`` at each; 0 elsewhere.
    TorchRL keeps it with the observations: a root repeats it.

    **Written at the root and under "next"**: ``"observation"`` float [N, C, H, W]: the static planes, see
    ``plane_names``, then breaks (0 or 1) and remaining budget (1 to 0 everywhere). ``"action_mask"`` bool [N, H W].
    A replay buffer can store, in place of the planes: ``"breaks"`` bool [N, H, W], ``"remaining"`` float [N, 1],
    ``"landscape_id"`` int64 [N, 1], from which :meth:`planes` makes the observation. Static planes are in memory once:
    buffer ``landscape`` [L, C - 2, H, W]. ``observation="compact"`` leaves out the planes.

    **Cost.** Shapes are static, so that on CUDA each step simulates fires in all rows, needed or not, by a fixed number
    of sweeps. On a CPU only the rows that need fires simulate them, and sweeps end with the last fire. Results are the
    same bit for bit, since fires are integers.

    **State**: ``breaks`` bool [N, H, W], ``remaining`` int32 [N], ``landscape_id`` int64 [N]; with the shaped reward
    also ``burned`` [N] and ``fire_seed`` int64 [N], as buffers ``state_...``.

    Args:
        num_envs: N, at least 1.
        size: H and W, or one number for both; that of the landscape by default, else 20.
        budget: K as a share of all cells (float below 1) or a number of cells (int).
        landscape: where fires burn; ``Landscape.uniform(0.4)`` by default.
        mode: ``"sequential"`` or ``"one_shot"``.
        reward: ``"terminal"`` or ``"shaped"``.
        device: where everything lives.
        seed: passed to ``set_seed``.
        **options: ``fires`` (M, 16, at most 64), ``neighbours`` (8 or 4), ``common_random_numbers`` (True),
            ``observation`` ("planes" or "compact"), ``sweeps`` (four lengths of the grid), ``dtype`` (float32).

    Raises:
        ValueError: for a budget of no cell or above the burnable cells of a landscape, a size that is not the
            landscape's, numbers and names outside what is described.
        TypeError: for an unknown option, a dtype that is not a float type.
    """

    landscape: Tensor
    """Static planes, float ``[L, C - 2, H, W]``."""
    _burnable: Tensor
    _threshold: Tensor

    def __init__(
        self,
        num_envs: int,
        *,
        size: int | tuple[int, int] | None = None,
        budget: float = 0.05,
        landscape: Landscape | None = None,
        mode: Mode = "sequential",
        reward: Reward = "terminal",
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        **options: Unpack[FireOptions],
    ) -> None:
        """Check the arguments and make the landscape's buffers; arguments as in the class."""
        unknown = sorted(set(options) - set(FireOptions.__annotations__))
        if unknown:
            raise TypeError(
                f"FuelBreaks expected options of {sorted(FireOptions.__annotations__)}, received {unknown}. Remedy: "
                "take the others out."
            )
        _check_choice("mode", mode, ("sequential", "one_shot"))
        _check_choice("reward", reward, ("terminal", "shaped"))
        _check_choice("observation", options.get("observation", "planes"), OBSERVATIONS)
        super().__init__(num_envs, device=device, dtype=options.get("dtype", torch.float32))
        ground = Landscape.uniform(size=20 if size is None else size) if landscape is None else landscape
        if size is not None and sides(size) != ground.size:
            raise ValueError(
                f"size: expected that of the landscape, {ground.size}, received {size!r}. Remedy: leave it out."
            )
        self.mode, self.shaped = mode, reward == "shaped"
        self.fires, self.neighbours = options.get("fires", 16), options.get("neighbours", 8)
        self.common_random_numbers = bool(options.get("common_random_numbers", True))
        self.compact = options.get("observation", "planes") == "compact"
        self.budget = _cells(budget, ground)
        word_dtype(self.fires)
        self.height, self.width = ground.size
        sweeps = options.get("sweeps")
        self.sweeps = default_sweeps(*ground.size) if sweeps is None else sweeps
        self.plane_names = (*PLANES, *ground.extra, "breaks", "remaining")
        tables = {
            "landscape": ground.planes().to(self.dtype),
            "_burnable": ground.burnable,
            "_threshold": thresholds(ground.bond_probabilities(self.neighbours)),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(self.device), persistent=False)
        self.begin(seed)

    # -- the task --------------------------------------------------------------------------------------------------

    def make_specs(self) -> EnvSpecs:
        """Return the keys of the class docstring."""
        cells, grid = self.height * self.width, (self.height, self.width)
        observation: dict[NestedKey, TensorSpec] = {
            "action_mask": self.choice(2, cells, dtype=torch.bool),
            "breaks": self.choice(2, *grid, dtype=torch.bool),
            "remaining": self.box(0.0, 1.0, 1),
            "landscape_id": self.choice(len(self.landscape), 1),
        }
        if not self.compact:
            observation["observation"] = self.unbounded(len(self.plane_names), *grid)
        one_shot = self.mode == "one_shot"
        return EnvSpecs(
            observation=observation,
            action={"action": self.choice(2, cells, dtype=torch.bool) if one_shot else self.choice(cells)},
            reward={"reward": self.unbounded(1)},
            info={"burned": self.box(0.0, 1.0, 1)},
        )

    def draw_state(self) -> dict[str, Tensor]:
        """Return landscapes without breaks."""
        return self._draw(None)

    def redraw_state(self, ended: Tensor) -> dict[str, Tensor]:
        """Return landscapes without breaks; the fires of other rows than ``ended`` are not simulated on a CPU."""
        return self._draw(ended.squeeze(-1))

    def picture(self, state: dict[str, Tensor], height: int, width: int) -> Tensor:
        """Draw the ground as a grid: fuel green, bare ground pale, breaks dark."""
        fuel = self.burnable(state["landscape_id"]).unsqueeze(-1)
        green, pale, ink = (torch.tensor(colour, device=self.device) for colour in (GREEN, PALE, INK))
        ground = torch.where(state["breaks"].unsqueeze(-1), ink, torch.where(fuel, green, pale))
        return cells(ground, height, width)

    def advance(self, state: dict[str, Tensor], action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Place breaks, and simulate fires in the rows whose reward needs them."""
        assert isinstance(action, Tensor)
        allowed = self._allowed(state)
        if self.mode == "sequential":
            cells = torch.arange(allowed.shape[1], device=self.device)
            placed = (action.unsqueeze(-1) == cells) & allowed
            remaining = state["remaining"] - 1
        else:
            placed = (action != 0) & allowed
            placed = placed & (placed.cumsum(1) <= self.budget)
            remaining = torch.zeros_like(state["remaining"])
        breaks = state["breaks"] | placed.view_as(state["breaks"])
        over = remaining <= 0
        next_state = {**state, "breaks": breaks, "remaining": remaining}
        if self.shaped:
            if not self.common_random_numbers:
                next_state["fire_seed"] = self._draw_seed()
            burned = self._burn(next_state, None)
            next_state["burned"] = burned
            reward = state["burned"] - burned
        else:
            burned = self._burn({**next_state, "fire_seed": self._draw_seed()}, over)
            burned = torch.where(over, burned, 0.0)
            reward = -burned
            if self.mode == "one_shot":
                reward = (reward * (self.fires * allowed.shape[1])).round()
        entries: dict[NestedKey, Tensor] = {"reward": reward.unsqueeze(-1), "burned": burned.unsqueeze(-1).clone()}
        return Transition(next_state, entries, over)

    def observe(self, state: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        """Return the entries of the class docstring."""
        remaining = (state["remaining"].to(self.dtype) / self.budget).unsqueeze(-1)
        number = state["landscape_id"].unsqueeze(-1)
        seen: dict[NestedKey, Tensor] = {
            "action_mask": self._allowed(state),
            "breaks": state["breaks"].clone(),
            "remaining": remaining,
            "landscape_id": number.clone(),
        }
        if not self.compact:
            seen["observation"] = self.planes(state["breaks"], remaining, number)
        return seen

    def read_action(self, tensordict: TensorDictBase) -> Tensor | dict[NestedKey, Tensor]:
        """Return the action; that of the one-shot mode may be bool or integers."""
        action = tensordict.get("action", None)
        if self.mode == "one_shot" and action is not None and action.dtype == torch.bool:
            tensordict = TensorDict({"action": action.to(torch.int8)}, batch_size=tensordict.batch_size)
        return super().read_action(tensordict)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _of_landscape(self, table: Tensor, number: Tensor) -> Tensor:
        """Rows ``[N, ...]`` of a table ``[L, ...]``; where L is 1, that row alone ``[1, ...]``."""
        return table if len(table) == 1 else table.index_select(0, number.view(-1))

    def _allowed(self, state: dict[str, Tensor]) -> Tensor:
        """Bool [N, H W]: cells that may become a break."""
        return (self._of_landscape(self._burnable, state["landscape_id"]) & ~state["breaks"]).flatten(1)

    def _draw_seed(self) -> Tensor:
        return torch.randint(1 << 62, (self.num_envs,), device=self.device)

    def _draw(self, ended: Tensor | None) -> dict[str, Tensor]:
        rows, count = self.num_envs, len(self.landscape)
        number = torch.zeros(rows, dtype=torch.int64, device=self.device)
        if count > 1:
            number = torch.randint(count, (rows,), device=self.device)
        state = {
            "breaks": torch.zeros(rows, self.height, self.width, dtype=torch.bool, device=self.device),
            "remaining": torch.full((rows,), self.budget, dtype=torch.int32, device=self.device),
            "landscape_id": number,
        }
        if self.shaped:
            state["fire_seed"] = self._draw_seed()
            state["burned"] = self._burn(state, ended)
        return state

    def _burn(self, state: dict[str, Tensor], active: Tensor | None) -> Tensor:
        """Mean burned fraction [N] of the fires of ``fire_seed``; undefined in rows that are not active."""
        number = state["landscape_id"]
        burnable = self._of_landscape(self._burnable, number)
        words = burn(
            state["fire_seed"],
            burnable & ~state["breaks"],
            burnable,
            self._of_landscape(self._threshold, number),
            active=active,
            fires=self.fires,
            neighbours=self.neighbours,
            sweeps=self.sweeps,
        )
        return burned_fraction(words, self.fires, self.dtype)

    # -- from outside ----------------------------------------------------------------------------------------------

    def planes(self, breaks: Tensor, remaining: Tensor, landscape_id: Tensor) -> Tensor:
        """Make observations from the entries that a replay buffer stores in place of the static planes.

        Args:
            breaks: bool ``[B, H, W]``.
            remaining: ``[B, 1]``, share of the budget.
            landscape_id: int64 ``[B, 1]``.

        Returns:
            ``[B, C, H, W]`` of the env's dtype.
        """
        static = self._of_landscape(self.landscape, landscape_id).expand(breaks.shape[0], -1, -1, -1)
        left = remaining.to(self.dtype).view(-1, 1, 1, 1).expand(-1, 1, self.height, self.width)
        return torch.cat((static, breaks.to(self.dtype).unsqueeze(1), left), 1)

    def burnable(self, landscape_id: Tensor | None = None) -> Tensor:
        """Where there is fuel: bool ``[L, H, W]``, or ``[B, H, W]`` for ``landscape_id`` int64 ``[B]``, ``[B, 1]``."""
        return self._burnable if landscape_id is None else self._burnable.index_select(0, landscape_id.view(-1))

    def assess(
        self, breaks: Tensor, *, landscape_id: Tensor | None = None, fires: int = 1024, seed: int = 0
    ) -> Assessment:
        """Light the same fires in each of R placements, as many as it takes to tell them apart.

        Args:
            breaks: bool ``[R, H, W]``, such as ``column_breaks(env.burnable(), env.budget)``.
            landscape_id: int64 ``[R]`` or ``[R, 1]``; the first landscape by default.
            fires: how many, rounded up to a multiple of 64.
            seed: names the fires.

        Returns:
            Burned fraction, its error and the burn probability of each cell.
        """
        number = torch.zeros(breaks.shape[0], dtype=torch.int64, device=self.device)
        number = number if landscape_id is None else landscape_id.view(-1)
        return assess(
            breaks.to(self.device),
            self.burnable(number),
            self._threshold.index_select(0, number),
            fires=fires,
            neighbours=self.neighbours,
            sweeps=self.sweeps,
            seed=seed,
        )

    def light(self, breaks: Tensor, *, landscape_id: Tensor, seed: Tensor, fires: int | None = None) -> Tensor:
        """Mean burned fraction ``[R]`` of some fires in each of R placements, all at once; a seed names fires.

        Args:
            breaks: bool ``[R, H, W]``.
            landscape_id: int64 ``[R]``.
            seed: int64 ``[R]``.
            fires: of each placement, at most 64; those of the env by default.
        """
        fires = self.fires if fires is None else fires
        burnable = self._of_landscape(self._burnable, landscape_id)
        words = burn(
            seed,
            burnable & ~breaks,
            burnable,
            self._of_landscape(self._threshold, landscape_id),
            fires=fires,
            neighbours=self.neighbours,
            sweeps=self.sweeps,
        )
        return burned_fraction(words, fires, self.dtype)

    def search(self, *, start: Tensor | None = None, **options: Any) -> Tensor:
        """Breaks for each landscape by :func:`~torchrl_perf.envs.fuel_breaks.swap_search`, bool ``[L, H, W]``.

        Args:
            start: bool ``[L, H, W]``; a column by default.
            **options: of the search: ``rounds``, ``proposals``, ``fires``, ``seed``.
        """
        return swap_search(
            self._burnable,
            self._threshold,
            self.budget,
            start=start,
            neighbours=self.neighbours,
            **options,
        )

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random action among those that are allowed in the env's present state; K of them in one-shot mode."""
        shape = (self.num_envs, self.height, self.width)
        breaks = random_breaks(
            self._allowed(self._state()).view(shape), 1 if self.mode == "sequential" else self.budget
        )
        action = breaks.flatten(1)
        if self.mode == "sequential":
            action = action.to(torch.int8).argmax(1)
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size, device=self.device)
        return tensordict.set("action", action)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the present state and ``"burnable"`` bool [N, H, W].

        After the step that ended an episode this is the new one; the final breaks are in the observation of that step.
        """
        state = {name: value.clone() for name, value in self._state().items()}
        return {**state, "burnable": self.burnable(state["landscape_id"])}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {list(choices)}, received {value!r}. Remedy: one of these.")


def _cells(budget: float, ground: Landscape) -> int:
    """K, the number of breaks."""
    height, width = ground.size
    if isinstance(budget, bool) or not budget > 0:
        raise ValueError(
            f"budget: expected a share of the cells in (0, 1) or a number of cells, received {budget!r}. Remedy: a "
            "share such as 0.05, or an int."
        )
    cells = budget if isinstance(budget, int) else round(budget * height * width)
    burnable = int(ground.burnable.sum((1, 2)).min())
    if not 1 <= cells <= burnable:
        raise ValueError(
            f"budget: expected 1 to {burnable} breaks, the burnable cells of {height} x {width}, received {budget!r}, "
            f"which is {cells}. Remedy: another budget, or a landscape with more fuel."
        )
    return cells
