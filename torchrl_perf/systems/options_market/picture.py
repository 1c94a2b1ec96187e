"""Pictures of a trader: equity against buying and holding, the position, and which options ran.

Dimension key: ``N`` envs, ``T`` steps, ``O`` options.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import TransformedEnv

from torchrl_perf.metrics.figure import new_figure, save_figure

if TYPE_CHECKING:
    from torchrl_perf.envs.market import OptionMarket

__all__ = ["EquityRecording", "draw_equity", "record_equity", "recorded_equity"]

NO_OPTION = -1
BAND = (0.1, 0.9)
"""Quantiles over the envs between which the band lies."""
LEAST = 1e-3
"""Least equity of which a logarithm is taken."""
SHADES = ("#2ca02c", "#d62728", "#1f77b4", "#ffffff", "#ff7f0e", "#9467bd", "#8c564b")
"""Of the regimes, in the order of their indices; white is none."""
SLICES = 120
"""Greatest number of intervals in which the shares of the options are drawn."""


@dataclass(frozen=True)
class EquityRecording:
    """The first episode of each of N envs, on the host; after its end the last value is repeated.

    Attributes:
        equity: float64 ``[N, T + 1]``, in units of the capital, at the start and after each step.
        price: float64 ``[N, T + 1]``.
        size: float64 ``[N, T + 1]``, the position in units of the equity.
        cost: float64 ``[N, T]``, paid in each step; 0 after the end.
        option: int64 ``[N, T]``, the option that ran, -1 where none did or the episode was over.
        steps: int64 ``[N]`` of each episode.
        cost_rate: cost of a unit of traded notional.
        regime: int64 ``[N, T]``, hidden state of each step's return, -1 after the end; None where it is not known.
    """

    equity: Tensor
    price: Tensor
    size: Tensor
    cost: Tensor
    option: Tensor
    steps: Tensor
    cost_rate: float
    regime: Tensor | None = None

    @property
    def buy_and_hold(self) -> Tensor:
        """Equity ``[N, T + 1]`` of all the capital in the asset from the first step on, its purchase paid."""
        held = self.price / self.price[:, :1] / (1.0 + self.cost_rate)
        return torch.cat((torch.ones_like(held[:, :1]), held[:, 1:]), -1)

    def option_shares(self, num_options: int) -> Tensor:
        """Share ``[O]`` of the recorded steps with an option in which each ran; 0 where none did."""
        ran = self.option.unsqueeze(-1) == torch.arange(num_options)
        return ran.double().sum((0, 1)) / ran.sum().clamp_min(1)

    def gains(self, num_regimes: int, num_options: int) -> Tensor:
        """Log growth of an episode, mean over the envs, by regime and option, float64 ``[K, O]``.

        Raises:
            ValueError: for a recording without regimes.
        """
        if self.regime is None:
            raise ValueError(
                "gains: expected a recording with regimes, received one without. Remedy: record_equity() of a market "
                "of several regimes."
            )
        growth = self.equity.clamp_min(LEAST).log().diff(dim=-1)
        ran = (self.regime >= 0) & (self.option >= 0)
        cell = (self.regime * num_options + self.option)[ran]
        total = torch.zeros(num_regimes * num_options, dtype=torch.float64).index_add(0, cell, growth[ran])
        return total.view(num_regimes, num_options) / len(self.equity)


def record_equity(
    env: OptionMarket | TransformedEnv,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    max_steps: int | None = None,
) -> EquityRecording:
    """Reset an env, let a policy act until the first episode of each row is over, and return the recording.

    Args:
        env: an :class:`~torchrl_perf.envs.OptionMarket`, or a ``TransformedEnv`` around one; it is reset, so do not
            pass the env that a run collects from.
        policy: writes the action, and "active_option" where there are options; under the exploration type of the
            caller.
        max_steps: steps after which the recording is cut off; by default the env's ``max_episode_steps``.

    Raises:
        TypeError: for another env.
        ValueError: for ``max_steps`` below 1, or none in an env without a time limit.
    """
    market = _market(env)
    limit = market.max_episode_steps if max_steps is None else max_steps
    if limit is None or limit < 1:
        raise ValueError(
            f"max_steps: expected an int >= 1, received {max_steps} with max_episode_steps={market.max_episode_steps}. "
            "Remedy: the number of steps after which the recording is cut off."
        )
    steps: list[TensorDictBase] = []
    regimes = [] if _knows_regimes(market) else None
    over = torch.zeros(market.num_envs, dtype=torch.bool)
    with torch.no_grad():
        root = env.reset()
        for _ in range(limit):
            if regimes is not None:
                regimes.append(market.get_buffer("state_regime").cpu().clone())
            stepped, root = env.step_and_maybe_reset(policy(root))
            steps.append(_step(stepped))
            over = over | steps[-1].get("done").flatten()
            if bool(over.all()):
                break
    found = _recording(TensorDict.maybe_dense_stack(steps, 1), market.settings.cost)
    if regimes is None:
        return found
    going = torch.arange(len(steps)) < found.steps.unsqueeze(-1)
    return dataclasses.replace(found, regime=torch.where(going, torch.stack(regimes, 1), NO_OPTION))


def recorded_equity(batch: TensorDictBase, env: OptionMarket | TransformedEnv) -> EquityRecording:
    """The first episode of each row of a collected batch, which need not begin where the batch does.

    Args:
        batch: ``[N, T]`` as :class:`~torchrl_perf.envs.OptionMarket` writes it, with "active_option" where there are
            options.
        env: the env that the batch comes from, or one of the same settings.

    Raises:
        KeyError: for an entry that is missing.
        TypeError: for another env.
        ValueError: for a batch of other dimensions.
    """
    if batch.ndim != 2:
        raise ValueError(f"batch: expected a batch [N, T], received {list(batch.shape)}. Remedy: batch.unsqueeze(-1).")
    needed = ("equity", "price", ("next", "equity"), ("next", "price"), ("next", "cost"), ("next", "done"))
    missing = [key for key in needed if batch.get(key, None) is None]
    if missing:
        raise KeyError(
            f"batch: expected {list(needed)}, which an OptionMarket writes, received none of {missing}. Remedy: "
            "collect with an OptionMarket, and exclude none of its keys."
        )
    return _recording(_step(batch), _market(env).settings.cost)


def draw_equity(
    recording: EquityRecording,
    path: str | os.PathLike[str],
    *,
    row: int | None = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
    regimes: Sequence[str] | None = None,
) -> Path:
    """Draw equity, position and options over the steps of an episode, and save the picture.

    Of several envs the median is drawn, and a band from the 10th to the 90th of a hundred. The equity, on a logarithmic
    axis, is compared with buying and holding, and with the capital, which doing nothing keeps. Of one env the hidden
    regimes are shaded where they are known.

    Args:
        recording: of :func:`record_equity` or :func:`recorded_equity`.
        path: picture to write; the suffix gives the format, for example ``.png``.
        row: one of the N envs, drawn alone; all by default.
        names: of the options, in the order of their indices; those of ``OptionMarket`` by default.
        title: heading; the mean growth by default.
        regimes: names of the regimes, in the order of their indices; those of ``RegimeSettings.five`` by default.

    Returns:
        The path that was written.

    Raises:
        IndexError: for a row that the recording does not have, or an option without a name.
    """
    from torchrl_perf.envs.market.options import OPTION_NAMES

    labels = list(OPTION_NAMES if names is None else names)
    shown = _row(recording, row)
    highest = int(shown.option.max())
    if highest >= len(labels):
        raise IndexError(
            f"names: expected one for each of the {highest + 1} options, received {labels}. Remedy: a name for each "
            "option that the batch has."
        )
    with_options = highest > NO_OPTION
    figure = new_figure(8.0, 7.2 if with_options else 5.0)
    ratios = (3.0, 1.2, 1.8) if with_options else (3.0, 1.2)
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    _draw_equity(panels[0], shown)
    if shown.regime is not None and len(shown.regime) == 1:
        _shade_regimes(panels, shown.regime[0], regimes)
    _draw_size(panels[1], shown)
    if with_options:
        _draw_options(panels[2], shown, labels)
    panels[-1].set_xlabel("step")
    panels[0].set_xlim(0, shown.equity.shape[1] - 1)
    figure.suptitle(title if title is not None else _summary(shown), fontsize=11)
    return save_figure(figure, path)


# -- recording --------------------------------------------------------------------------------------------------------


def _market(env: Any) -> OptionMarket:
    """The market itself."""
    from torchrl_perf.envs.market import OptionMarket

    base = env.base_env if isinstance(env, TransformedEnv) else env
    if not isinstance(base, OptionMarket):
        raise TypeError(
            f"env: expected an OptionMarket or a TransformedEnv around one, received {type(base).__name__}. Remedy: "
            "OptionMarket(...)."
        )
    return base


def _knows_regimes(market: OptionMarket) -> bool:
    """Whether prices come from several regimes."""
    from torchrl_perf.envs.market.regime import RegimeMarket

    return isinstance(market.market, RegimeMarket) and len(market.market.regime.mean) > 1


def _step(stepped: TensorDictBase) -> TensorDictBase:
    """What is kept of steps ``[*]``, on the host."""
    from torchrl_perf.envs.market.columns import reading

    following = cast("TensorDictBase", stepped.get("next"))
    option = stepped.get("active_option", None)
    entries = {
        "equity": stepped.get("equity"),
        "price": stepped.get("price"),
        "size": reading(stepped).size.unsqueeze(-1),
        "next_equity": following.get("equity"),
        "next_price": following.get("price"),
        "next_size": reading(following).size.unsqueeze(-1),
        "cost": following.get("cost"),
        "done": following.get("done"),
        "option": torch.full(stepped.shape, NO_OPTION) if option is None else option.reshape(stepped.shape),
    }
    return TensorDict(dict(entries), batch_size=stepped.shape).cpu()


def _recording(kept: TensorDictBase, cost_rate: float) -> EquityRecording:
    """The first episodes of steps ``[N, T]``."""
    done = kept.get("done").squeeze(-1)
    num_steps = done.shape[1]
    steps = torch.where(done.any(-1), done.int().argmax(-1) + 1, num_steps)
    time = torch.arange(num_steps)
    going = time < steps.unsqueeze(-1)
    last = torch.minimum(time, steps.unsqueeze(-1) - 1)

    def path(name: str) -> Tensor:
        after = kept.get(f"next_{name}").squeeze(-1).gather(-1, last)
        return torch.cat((kept.get(name)[:, 0], after), -1).double()

    return EquityRecording(
        equity=path("equity"),
        price=path("price"),
        size=path("size"),
        cost=torch.where(going, kept.get("cost").squeeze(-1), 0.0).double(),
        option=torch.where(going, kept.get("option"), NO_OPTION),
        steps=steps,
        cost_rate=cost_rate,
    )


def _row(recording: EquityRecording, row: int | None) -> EquityRecording:
    """One row of a recording, or all of them."""
    if row is None:
        return recording
    there = recording.equity.shape[0]
    if not 0 <= row < there:
        raise IndexError(f"row: expected one of the recording's {there}, received {row}. Remedy: row=0, for example.")
    names = ("equity", "price", "size", "cost", "option", "steps", *(() if recording.regime is None else ("regime",)))
    return dataclasses.replace(recording, **{name: getattr(recording, name)[row : row + 1] for name in names})


# -- panels -----------------------------------------------------------------------------------------------------------


def _curve(axes: Any, values: Tensor, color: str, label: str, *, shade: float = 0.25, **style: Any) -> None:
    """The median of ``values`` [N, T + 1] over the envs, and the band."""
    steps = range(values.shape[1])
    axes.plot(steps, values.median(0).values.numpy(), color=color, label=label, **style)
    if values.shape[0] > 1:
        low, high = torch.quantile(values, torch.tensor(BAND, dtype=values.dtype), dim=0).numpy()
        axes.fill_between(steps, low, high, color=color, alpha=shade, linewidth=0)


def _draw_equity(axes: Any, shown: EquityRecording) -> None:
    """The equity, its baselines, and the least and greatest value."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    _curve(axes, shown.buy_and_hold, "tab:orange", "buy and hold", shade=0.15, linewidth=1.2)
    _curve(axes, shown.equity, "tab:blue", "policy", linewidth=1.8)
    axes.axhline(1.0, color="0.35", linestyle="--", linewidth=1.0, label="do nothing")
    paid = float(shown.cost.sum(-1).mean())
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:  # powers of ten would leave one label or none
        axes.yaxis.set_major_locator(MaxNLocator(7))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:.4g}")
    axes.yaxis.set_minor_formatter("{x:.4g}")
    axes.set_ylabel("equity / capital")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small", title=f"costs paid: {paid:.2%} of the capital", title_fontsize=8)


def _shade_regimes(panels: Any, regime: Tensor, names: Sequence[str] | None) -> None:
    """The spans ``[T]`` of each regime behind the curves, with a legend at the second panel."""
    from matplotlib.patches import Patch

    from torchrl_perf.envs.market import FIVE_REGIMES

    known = list(FIVE_REGIMES if names is None else names)
    ends = [*(regime.diff().nonzero().squeeze(-1) + 1).tolist(), len(regime)]
    starts = [0, *ends[:-1]]
    for start, end in zip(starts, ends, strict=True):
        number = int(regime[start])
        if number < 0:
            continue
        for axes in panels[:2]:
            axes.axvspan(start, end, color=SHADES[number % len(SHADES)], alpha=0.12, linewidth=0, zorder=0)
    met = sorted({int(number) for number in regime.unique() if number >= 0})
    labels = [known[number] if number < len(known) else f"regime {number}" for number in met]
    patches = [
        Patch(facecolor=SHADES[number % len(SHADES)], alpha=0.3, edgecolor="0.7", label=label)
        for number, label in zip(met, labels, strict=True)
    ]
    panels[1].legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", title="regime")


def _draw_size(axes: Any, shown: EquityRecording) -> None:
    """The position in units of the equity."""
    _curve(axes, shown.size, "tab:green", "position", linewidth=1.2)
    axes.axhline(0.0, color="0.35", linewidth=0.8)
    axes.set_ylabel("position / equity")
    axes.grid(visible=True, alpha=0.3)


def _draw_options(axes: Any, shown: EquityRecording, labels: list[str]) -> None:
    """The shares of the options over time, stacked; for a single env, which option ran when."""
    count, num_steps = len(labels), shown.option.shape[1]
    ran = (shown.option.unsqueeze(-1) == torch.arange(count)).double().sum(0)  # [T, O]
    width = 1 if shown.option.shape[0] == 1 else -(-num_steps // SLICES)
    edges = [*range(0, num_steps, width), num_steps]
    parts = torch.stack([part.sum(0) for part in ran.split(width)])
    shares = parts / parts.sum(-1, keepdim=True).clamp_min(1.0)
    total = shown.option_shares(count)
    floor = torch.zeros(len(shares), dtype=torch.float64)
    for option, label in enumerate(labels):
        top = floor + shares[:, option]
        axes.stairs(
            top.numpy(),
            edges,
            baseline=floor.numpy(),
            fill=True,
            color=f"C{option}",
            label=f"{label.replace('_', ' ')} {float(total[option]):.0%}",
        )
        floor = top
    axes.set(ylim=(0.0, 1.0), ylabel="option (share)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", title="share of steps", title_fontsize=8)


def _summary(shown: EquityRecording) -> str:
    """The growth of the capital, in words."""
    count = shown.equity.shape[0]
    whose = "one env" if count == 1 else f"{count} envs (median, 10 to 90 %)"
    policy, held = (float(curve[:, -1].log().mean()) for curve in (shown.equity.clamp_min(1e-3), shown.buy_and_hold))
    growth = "log growth" if count == 1 else "mean log growth"
    return f"{whose}, {growth} {policy:+.4f}, buy and hold {held:+.4f}"
