"""The claims of options_market on what its log takes, and its remedy against running out of memory."""

import io
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from studies.counts import counts
from studies.options_market.agents import BATCH, ENVS, OBSERVATION
from studies.sitting import Sitting, Variant, difference, judge
from torchrl_perf.metrics import DeviceMetrics

LOUD, QUIET, PACKED, DEFERRED = "each read, loud", "each read, quiet", "dict, then each read", "added up on the device"
NUM_METRICS = 20


# -- out of memory ----------------------------------------------------------------------------------------------------


def accumulation(sitting: Sitting) -> None:
    """Whether more gradient steps are gradient accumulation: parameters after each, and rows that are held at once."""
    rows = torch.randn(256, OBSERVATION, generator=torch.Generator().manual_seed(1)).to(sitting.device)
    goal = rows[:, :1].sin()

    def trained(parts: int, each: bool, batch: Tensor) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(OBSERVATION, 512), nn.ReLU(), nn.Linear(512, 1)).to(sitting.device)
        sgd, most = torch.optim.SGD(net.parameters(), lr=1e-2), 0
        pieces = [batch] * parts if each else list(batch.split(len(batch) // parts))
        for piece in pieces:
            loss = nn.functional.mse_loss(net(piece), goal[: len(piece)] if each else piece[:, :1].sin())
            (loss if each else loss / parts).backward()
            most = max(most, len(piece))
            if each:
                sgd.step()
                sgd.zero_grad()
        if not each:
            sgd.step()
        return [parameter.detach() for parameter in net.parameters()], most

    (whole, held), (accumulated, few), (stepped, still) = (
        trained(*kind, rows) for kind in ((1, False), (4, False), (4, True))
    )
    near, far = (difference(after, whole) for after in (accumulated, stepped))
    for name, apart, count in (
        ("one batch", 0.0, held),
        ("accumulated over 4 parts", near, few),
        ("gradient_steps: 4", far, still),
    ):
        checked = {"ok": apart < 1e-5, "tolerance": 1e-5} if name != "gradient_steps: 4" else {}
        note = f"{count} rows at once, parameters off by {apart:.1e}"
        sitting.add("accumulation", "256 rows", name, off_by=apart, rows_at_once=count, note=note, **checked)
    sitting.verdict(
        "accumulation",
        "gradient_steps: 4 is gradient accumulation, against running out of memory",
        f"{still} rows at once as before, parameters off by {far:.1e}; accumulated, {few} rows and {near:.1e}",
        judge(1.0 if still < held and far < 1e-5 else 0.0, 1.0, 0.5),
        "it makes four updates of whole batches",
    )


# -- logging ----------------------------------------------------------------------------------------------------------


class Nowhere(io.TextIOBase):
    """A stream that keeps nothing."""

    def write(self, text: str, /) -> int:
        """Takes a text."""
        return len(text)


class Recorder:
    """A logger's record of numbers by name, as the original's library keeps it, and its text log of each env.

    Args:
        values: 0-d tensors, what an update gives.
        level: of the text log.
    """

    def __init__(self, values: dict[str, Tensor], level: int) -> None:
        self.values, self.kept = values, dict[str, list[float]]()
        self.log = logging.Logger("claims", level)
        self.log.addHandler(logging.StreamHandler(Nowhere()))

    def record(self, key: str, value: float) -> None:
        """Keeps a number."""
        self.kept.setdefault(key, []).append(value)

    def step(self, packed: bool = False) -> None:
        """Reads and keeps each number, and says something of each env."""
        read = {key: value.item() for key, value in self.values.items()}
        if packed:
            read = {f"{key}": value for key, value in read.items()}
        for key, value in read.items():
            self.record(key, value)
        for env in range(ENVS):
            self.log.debug("env %d: %s", env, read)

    def means(self) -> Tensor:
        """Of what was kept."""
        return torch.tensor([float(np.mean(values)) for values in self.kept.values()], dtype=torch.float64)


def logs(sitting: Sitting) -> None:
    """Twenty numbers of an update, kept at each: read one by one, loud or quiet, or added up where they are."""
    values = {f"m{index}": torch.rand((), device=sitting.device) for index in range(NUM_METRICS)}
    loud, quiet, packed = (Recorder(values, level) for level in (logging.DEBUG, logging.CRITICAL, logging.CRITICAL))
    state, metrics = {"count": 0}, DeviceMetrics(sitting.device)

    def deferred() -> None:
        metrics.add_all(values)
        state["count"] += 1
        if state["count"] % 1000 == 0:
            metrics.flush(state["count"])

    def mean(recorder: Recorder) -> Tensor:
        recorder.step()
        return recorder.means()

    def flushed() -> Tensor:
        metrics.reset()
        deferred()
        row = metrics.flush(state["count"]) or {}
        return torch.tensor([row[name] for name in values], dtype=torch.float64)

    calls: dict[str, Callable[[], Any]] = {
        LOUD: loud.step,
        QUIET: quiet.step,
        PACKED: partial(packed.step, True),
        DEFERRED: deferred,
    }
    outputs = {LOUD: partial(mean, loud), QUIET: partial(mean, quiet), PACKED: partial(mean, packed), DEFERRED: flushed}
    variants = [Variant(name, call, outputs[name]) for name, call in calls.items()]
    if sitting.cuda:
        graph = sitting.graph(partial(metrics.add_all, values))
        variants.append(Variant("added up, in a graph", graph, compared=False, note="the same function, recorded"))
    rows = sitting.compare("logging", f"{NUM_METRICS} numbers", variants, tolerance=1e-6)
    if sitting.cuda:
        graph.release()
    step = _work(sitting)
    for name, row in rows.items():
        row["share_of_step"] = row["us"] / (row["us"] + step)
        if name in calls:
            row |= {
                key: value for key, value in counts(calls[name], sitting.device).items() if key in ("reads", "waits")
            }
    reads = rows.get(LOUD, {}).get("reads")
    for after, claim in (
        (QUIET, "logging -80%: verbose logging off"),
        (PACKED, "logging -80%: batch metric recording"),
        (DEFERRED, "logging -80%: added up on the device, read each 1,000 steps"),
    ):
        before = QUIET if after == PACKED else LOUD
        found = sitting.ratio_of("logging", before, after)
        saved = [1 - 1 / value for value in found]
        shares = [rows[name]["share_of_step"] for name in (before, after) if name in rows]
        text = f"{-saved[0]:+.0%}: {shares[0]:.1%} of a step become {shares[1]:.1%}" if len(shares) == 2 else ""
        remark = {
            PACKED: "a dict, then a loop that records each entry as before",
            DEFERRED: f"{reads} reads of the device a step become none",
        }.get(after, "the text is most of it")
        sitting.verdict("logging", claim, text, judge(saved, 0.8, 0.1), remark)


def _work(sitting: Sitting) -> float:
    """Microseconds of a step of gradient descent on 256 rows, the shares' other part."""
    net = nn.Sequential(nn.Linear(OBSERVATION, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    net, rows = net.to(sitting.device), torch.randn(BATCH, OBSERVATION, device=sitting.device)
    adam = torch.optim.Adam(net.parameters())

    def step() -> None:
        adam.zero_grad()
        net(rows).square().mean().backward()
        adam.step()

    made = sitting.compare("logging", "a step", [Variant("an update of one net", step, compared=False)])
    return made["an update of one net"]["us"]


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {"accumulation": accumulation, "logging": logs}
"""Experiments by name."""
