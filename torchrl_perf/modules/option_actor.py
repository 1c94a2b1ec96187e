"""Actor, critic and policy that are told which option runs."""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_perf.functional.losses.hybrid import present, squashed_normal_entropy
from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.actor import DeviceActor
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.hybrid import BoundedNormal
from torchrl_perf.modules.option_set import ACTIVE_KEY, OptionSet, one_hot
from torchrl_perf.modules.options import OptionController
from torchrl_perf.modules.squashed_normal import positive_scale


class OptionConditioned(nn.Module):
    """A network that is told the option: its input is the inputs and the option, one-hot, in one tensor.

    Around an :class:`~torchrl_perf.modules.EnsembleQ` it is a critic of observations, action and option.

    Args:
        network: maps ``[*, I + O]`` to anything, where I is the size of all inputs together.
        num_options: O.
    """

    def __init__(self, network: nn.Module, num_options: int) -> None:
        super().__init__()
        self.network, self.num_options = network, num_options

    def forward(self, *inputs: Tensor) -> Any:
        """Inputs ``[*, I_i]``, the last one the option, int64 ``[*]``."""
        *features, option = inputs
        hot = one_hot(option, self.num_options, features[0].dtype)
        return self.network(torch.cat([*features, hot], -1))


class OptionNormal(BoundedNormal):
    """A :class:`~torchrl_perf.modules.BoundedNormal` in the range of an option, its density in units of the full one.

    The action lies between ``low`` and ``high``, the option's. Log-probabilities and entropy are those of the action as
    it would be if the option's range were stretched to all of the bounds. The reason is soft actor-critic: with the
    density of the action itself, an option with a small range would have a low entropy whatever it does, be pushed to
    noise by the temperature, and be avoided by the entropy term of the targets. Ratios of probabilities are the same
    either way; the log-density of the action itself is ``log_prob + sum(log(2 unit / (high - low)))``.

    Args:
        loc: ``[*, D]`` mean before squashing.
        scale: ``[*, D]`` standard deviation before squashing, positive.
        low: ``[*, D]`` least action of the option.
        high: ``[*, D]`` greatest action of the option.
        unit: ``[*, D]`` half the width of the full bounds.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that exist, all by default; the others act in the middle of
            the option's range, with log-probability, entropy and divergence 0.
        **options: as for :class:`~torchrl_perf.modules.BoundedNormal`.
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor,
        high: Tensor,
        unit: Tensor,
        valid: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(loc, scale, low, high, valid, **options)
        self.unit = unit

    def expand(self, batch_shape: Any, _instance: Any = None) -> "OptionNormal":
        """The same distribution for ``batch_shape`` rows."""
        rows = torch.Size(batch_shape)
        valid = None if self.valid is None else self.valid.expand(rows)
        unit = self.unit.expand(rows + self.event_shape)
        return OptionNormal(*self._expanded(rows), unit, valid, validate_args=self._validate_args)

    def entropy(self) -> Tensor:
        """``[*]`` nats, of the stretched action."""
        return present(squashed_normal_entropy(self.loc, self.scale, -self.unit, self.unit), self.valid)

    def _log_jacobian(self, x: Tensor) -> Tensor:
        """``log |da/dx|`` of the stretched action, ``[*, D]``."""
        half = cast("Tensor", self._half_width)
        return super()._log_jacobian(x) - half.log() + widened(self.unit).log()


class OptionNormalHead(nn.Module):
    """Splits a network's output into the parameters of an :class:`OptionNormal`, and holds the options' ranges.

    The ranges are buffers, so that ``.to(device)`` moves them and ``state_dict`` holds them.

    Args:
        network: maps ``[*, I + O]`` to ``[*, 2 D]``.
        low: ``[D]`` least actions.
        high: ``[D]`` greatest actions.
        ranges: O pairs within [-1, 1], the part of the bounds that each option uses.
        log_scale_range: of the logarithm of the scale before squashing; squashed smoothly into it.
    """

    param_keys: ClassVar[list[str]] = ["loc", "scale", "low", "high", "unit"]
    """Names of the outputs, which are the arguments of :class:`OptionNormal`."""

    def __init__(
        self,
        network: nn.Module,
        low: Tensor,
        high: Tensor,
        ranges: Sequence[tuple[float, float]],
        log_scale_range: tuple[float, float],
    ) -> None:
        super().__init__()
        self.network = OptionConditioned(network, len(ranges))
        middle, half = (high + low) / 2, (high - low) / 2
        parts = torch.tensor(ranges, dtype=low.dtype, device=low.device)
        self.register_buffer("low", middle + half * parts[:, :1])
        self.register_buffer("high", middle + half * parts[:, 1:])
        self.register_buffer("unit", half.clone())
        self.log_scale_min, self.log_scale_max = log_scale_range

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs ``[*, I_i]`` and the option int64 ``[*]`` -> location, scale, low, high and unit, each ``[*, D]``."""
        loc, raw = self.network(*inputs).chunk(2, -1)
        scale = positive_scale(raw, self.log_scale_min, self.log_scale_max)
        low, high, unit = (cast("Tensor", getattr(self, name)) for name in ("low", "high", "unit"))
        return loc, scale, low[inputs[-1]], high[inputs[-1]], unit.expand_as(loc)


class OptionActor(DeviceActor):
    """A squashed normal policy that is told the option and acts within the option's range.

    Keys read: ``in_keys``, "active_option" int64 ``[*]``, and ``valid_key`` if given. Written: "loc", "scale", "low",
    "high", "unit" and "action" ``[*, D]``, "action_log_prob" ``[*]`` (in units of the full bounds, see
    :class:`OptionNormal`).

    With :class:`~torchrl_perf.objectives.DeviceSACLoss` the option is a part of the state: actor and critic read it,
    and :meth:`OptionController.write_following` gives that of the next state.

    Args:
        network: maps ``[*, I + O]``, the inputs and the option one-hot, to ``[*, 2 D]``.
        options: gives O and the ranges of the actions.
        spec: the action's spec ``[*, D]``, continuous with finite bounds.
        in_keys: what the network reads besides the option.
        log_scale_range: of the logarithm of the scale, before squashing.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist; the others act in the middle of their
            option's range, with log-probability 0. All do by default.

    Raises:
        ValueError: as :func:`~torchrl_perf.modules.bounds.action_bounds`.
    """

    def __init__(
        self,
        network: nn.Module,
        options: OptionSet,
        *,
        spec: TensorSpec,
        in_keys: Sequence[NestedKey] = ("observation",),
        log_scale_range: tuple[float, float] = (-5.0, 2.0),
        valid_key: NestedKey | None = None,
    ) -> None:
        low, high = action_bounds(spec)
        super().__init__(
            OptionNormalHead(network, low, high, options.action_ranges, log_scale_range),
            distribution_class=OptionNormal,
            param_keys=OptionNormalHead.param_keys,
            in_keys=[*in_keys, ACTIVE_KEY],
            spec=spec,
            valid_key=valid_key,
        )


class OptionPolicy(TensorDictModuleBase):
    """A controller and an actor of its options: the policy of a collector.

    Keys read and written are those of both.

    Args:
        controller: chooses the option.
        actor: reads "active_option" and writes the action.
    """

    def __init__(self, controller: OptionController, actor: nn.Module) -> None:
        super().__init__()
        self.controller, self.actor = controller, actor
        written = cast("list[NestedKey]", controller.out_keys)
        read = [key for key in cast("list[NestedKey]", actor.in_keys) if key not in written]
        self.in_keys = list(dict.fromkeys([*cast("list[NestedKey]", controller.in_keys), *read]))  # pyright: ignore
        self.out_keys = [*written, *cast("list[NestedKey]", actor.out_keys)]  # pyright: ignore

    @property
    def spec(self) -> Any:
        """The actor's."""
        return self.actor.spec

    def step(self, frames: int | Tensor = 1) -> None:
        """Advances the controller's schedule."""
        self.controller.step(frames)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the option of the step and its action."""
        return self.actor(self.controller(tensordict))
