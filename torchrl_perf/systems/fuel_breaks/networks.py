"""Network and policy of fuel breaks: values of what a replay buffer keeps, and exploration along lines.

Dimension key: ``N`` rows, ``H``, ``W`` cells, ``L`` landscapes, ``C`` planes of an observation.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_perf.envs.fuel_breaks import FuelBreaks, domirank
from torchrl_perf.functional.masked import effective_mask
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.values.conv_q import ConvQMap
from torchrl_perf.systems.fuel_breaks.config import FuelBreaksConfig
from torchrl_perf.trainers.spaces import single_choice

__all__ = ["BREAK_KEYS", "BreakPolicy", "PlacementValues", "make_break_policy"]

BREAK_KEYS = ("breaks", "remaining", "landscape_id")
"""What a replay buffer keeps of an observation, and the network reads."""

Planes = Callable[[Tensor, Tensor, Tensor], Tensor]


class PlacementValues(nn.Module):
    """Values of all cells, of breaks, remaining budget and the number of the landscape.

    The planes of the landscape are in memory once, in the env; a copy of this module, such as a target network, shares
    them.

    Args:
        values: maps planes ``[N, C, H, W]`` to values ``[N, H W]``.
        planes: makes the planes, as :meth:`FuelBreaks.planes`.
    """

    def __init__(self, values: nn.Module, planes: Planes) -> None:
        super().__init__()
        self.values, self.planes = values, planes

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlacementValues":
        """A copy with parameters of its own."""
        return PlacementValues(copy.deepcopy(self.values, memo), self.planes)

    def forward(self, breaks: Tensor, remaining: Tensor, landscape_id: Tensor) -> Tensor:
        """Bool ``[*, H, W]``, float ``[*, 1]`` and int64 ``[*, 1]`` -> ``[*, H W]`` float32."""
        rows = breaks.reshape(-1, *breaks.shape[-2:])
        planes = self.planes(rows, remaining.reshape(-1, 1), landscape_id.reshape(-1, 1))
        return self.values(planes.to(torch.float32)).view(*breaks.shape[:-2], -1)


class BreakPolicy(EpsilonGreedy):
    """Epsilon-greedy on the values of allowed cells; demonstrates DomiRank first, and explores along lines.

    Where TorchRL's exploration type is RANDOM: in the first ``demonstration_frames`` frames the action is the allowed
    cell of the highest rank. Later ones are random with probability epsilon. A share ``line_exploration`` of those are
    drawn from the allowed cells that go on straight with a line of breaks; or, where there are none, from those with
    just one break among their 8 neighbours; or from all. Lines part a landscape, where cells at random do not.

    Keys read: :data:`BREAK_KEYS` and ``"action_mask"`` bool ``[N, H W]``. Written: ``"action"`` int64 ``[N]``.

    Args:
        network: a :class:`PlacementValues`.
        ranks: float ``[L, H W]`` in [0, 1], of the cells of each landscape.
        demonstration_frames: frames at the start, counted by :meth:`step`.
        demonstration_noise: numbers in [0, this) are added to the ranks, drawn anew for each action.
        line_exploration: share of the random actions.
        line_envs: number of rows, the first ones, all of whose actions go on with lines at random, for the whole run,
            as each actor has an epsilon of its own in arXiv:1803.00933: a line takes an episode without greedy actions.
        **options: of :class:`EpsilonGreedy`: ``spec``, ``eps_start``, ``eps_end``, ``decay_frames``.
    """

    ranks: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        ranks: Tensor,
        demonstration_frames: int = 0,
        demonstration_noise: float = 0.0,
        line_exploration: float = 0.0,
        line_envs: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(network, in_keys=BREAK_KEYS, mask_key="action_mask", **options)
        self.demonstration_frames, self.demonstration_noise = demonstration_frames, demonstration_noise
        self.line_exploration, self.line_envs = line_exploration, line_envs
        self.register_buffer("ranks", ranks.to(self.epsilon.device, torch.float32), persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action; explore or not as TorchRL's exploration type says."""
        mask = effective_mask(tensordict.get("action_mask"))
        action = self.action_values(tensordict).masked_fill(~mask, -torch.inf).argmax(-1)
        if interaction_type() is InteractionType.RANDOM:
            breaks, number = tensordict.get("breaks"), tensordict.get("landscape_id")
            action = self._explore(action, self._along_lines(breaks, mask, self.line_exploration))
            if self.line_envs:
                lines = self._draw(self._along_lines(breaks, mask, 1.0))
                action = torch.where(torch.arange(len(lines), device=lines.device) < self.line_envs, lines, action)
            if self.demonstration_frames:
                shown = self._demonstrate(mask, number)
                action = torch.where(self.frames < self.demonstration_frames, shown, action)
        return tensordict.set("action", action)

    def _along_lines(self, breaks: Tensor, mask: Tensor, share: float) -> Tensor:
        """The cells that random actions are drawn from, bool ``[N, H W]``, at least one in each row."""
        if not share:
            return mask
        ends, straight = (cells.flatten(1) & mask for cells in line_ends(breaks))
        ends = torch.where(straight.any(-1, keepdim=True), straight, ends)
        chance = torch.rand(len(mask), 1, device=mask.device)
        keeps = (chance < share) & ends.any(-1, keepdim=True)
        return torch.where(keeps, ends, mask)

    def _draw(self, mask: Tensor) -> Tensor:
        """A cell of each row's, ``[N]`` of bool ``[N, H W]``."""
        return torch.rand(mask.shape, device=mask.device).masked_fill(~mask, -1.0).argmax(-1)

    def _demonstrate(self, mask: Tensor, landscape_id: Tensor) -> Tensor:
        """Allowed cells ``[N]`` of the highest rank, ties in row-major order."""
        ranks = self.ranks.index_select(0, landscape_id.view(-1))
        if self.demonstration_noise:
            ranks = ranks + self.demonstration_noise * torch.rand_like(ranks)
        return ranks.masked_fill(~mask, -torch.inf).argmax(-1)


def line_ends(breaks: Tensor) -> tuple[Tensor, Tensor]:
    """Where lines of breaks end.

    Args:
        breaks: bool ``[N, H, W]``.

    Returns:
        Cells with just one break among their 8 neighbours, bool ``[N, H, W]``, and those of them where it and the
        break behind it, two cells away, are in one line with the cell.
    """
    placed = F.pad(breaks.to(torch.int8), (2, 2, 2, 2))
    height, width = breaks.shape[-2:]
    near = {
        step: placed[:, 2 + step[0] : 2 + step[0] + height, 2 + step[1] : 2 + step[1] + width]
        for step in itertools.product(range(-2, 3), repeat=2)
        if step != (0, 0)
    }
    around = [step for step in near if max(map(abs, step)) == 1]
    ends = (sum(near[step] for step in around) == 1) & ~breaks
    straight = sum(near[step] * near[2 * step[0], 2 * step[1]] for step in around) > 0
    return ends, ends & straight


def make_break_policy(env: FuelBreaks, config: FuelBreaksConfig) -> BreakPolicy:
    """The policy of a config for an env.

    Args:
        env: gives planes, landscapes and device.
        config: gives width, depth, precision, demonstrations and the schedule.

    Raises:
        ValueError: for an env that places all breaks at once.
    """
    values = ConvQMap(
        len(env.plane_names),
        hidden_size=config.hidden_size,
        blocks=config.blocks,
        activation=config.activation,
        dueling=config.dueling,
        precision=config.precision,
        device=env.device,
    )
    return BreakPolicy(
        PlacementValues(values, env.planes),
        ranks=_ranks(env) if config.demonstrations else torch.zeros(1, 1),
        demonstration_frames=config.demonstration_frames,
        demonstration_noise=config.demonstration_noise,
        line_exploration=config.line_exploration,
        line_envs=round(config.line_envs * config.num_envs),
        spec=single_choice(env),
        eps_start=config.eps_start,
        eps_end=config.eps_end,
        decay_frames=config.eps_frames,
    )


def _ranks(env: FuelBreaks) -> Tensor:
    """DomiRank of the cells of each landscape, ``[L, H W]``, divided by the largest."""
    ranks = domirank(env.burnable(), neighbours=env.neighbours).flatten(1)
    return ranks / ranks.amax(1, keepdim=True).clamp_min(1e-12)
