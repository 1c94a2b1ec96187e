"""The update of fuel_breaks's network of cell values: batches of images from lists, and from the device's replay."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from studies.fuel_breaks.costs import as_rows
from studies.originals.episodes import ImageLearner, MaskedMap, stacked
from studies.sitting import CONFIRMED, NOT_HERE, NOT_REPRODUCED, Sitting, Variant, judge, times_text
from torchrl_perf.bench.memory_loops import BATCH
from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape
from torchrl_perf.modules import ConvQMap
from torchrl_perf.replay import DeviceReplayBuffer, make_replay_buffer

HOST, DEVICE, RING, GRAPH = "list on the CPU", "list on the device", "device replay", "device replay, in a graph"
BUFFER, ENVS = 50_000, 16
"""Rows of the original's replay buffer; envs that fill those of the experiment."""


class Images:
    """The same transitions in a list on the CPU, in a list on the device, and in the package's replay.

    Args:
        size: rows and columns of the images, of 12 planes.
        rows: number of transitions, a multiple of 16.
        hidden_size: channels of the network.
        device: of the network.

    Attributes:
        host: transitions on the CPU.
        listed: the same on the device.
        replay: the same as breaks, remaining budget and the number of the landscape.
    """

    def __init__(self, size: int, rows: int, hidden_size: int, device: torch.device) -> None:
        extra = {name: torch.rand(2, size, size, dtype=torch.float64) for name in ("cover", "bulk", "base", "height")}
        land = Landscape.fractal(0, size, count=2, base=0.4)
        land = Landscape(**{**vars(land), "extra": extra})
        self.env = FuelBreaks(ENVS, landscape=land, budget=0.05, device=device, seed=0)
        self.hidden_size, self.device = hidden_size, device
        self.replay: DeviceReplayBuffer = make_replay_buffer(rows, batch_size=BATCH, device=device)
        self.listed: list[tuple[Tensor, ...]] = []
        td = self.env.reset()
        for _ in range(rows // ENVS):
            after, td = self.env.step_and_maybe_reset(self.env.rand_action(td))
            self.replay.extend(as_rows(after))
            names = ("observation", "action", ("next", "reward"), ("next", "observation"), ("next", "done"))
            columns = [after.get(name) for name in names]
            self.listed += [tuple(column[n] for column in columns) for n in range(ENVS)]
        self.host = [tuple(value.cpu() for value in row) for row in self.listed]

    def learner(self) -> ImageLearner:
        """A new network and its optimiser, each time the same."""
        torch.manual_seed(0)
        planes = len(self.env.plane_names)
        network = MaskedMap(ConvQMap(planes, hidden_size=self.hidden_size, device=self.device))
        return ImageLearner(network, self.device)

    def of_list(self, rows: list[tuple[Tensor, ...]]) -> Callable[[], dict[str, Tensor]]:
        """Draws a batch of a list."""
        return lambda: stacked(random.sample(rows, BATCH), self.device)

    def of_rows(self, rows: TensorDictBase) -> dict[str, Tensor]:
        """A batch of rows of the replay: planes are made here."""
        following = cast("TensorDictBase", rows.get("next"))
        images = [
            self.env.planes(part.get("breaks"), part.get("remaining"), part.get("landscape_id"))
            for part in (rows, following)
        ]
        return {
            "observation": images[0],
            "action": rows.get("action"),
            "reward": following.get("reward"),
            "next_observation": images[1],
            "done": following.get("done"),
        }

    def of_replay(self) -> dict[str, Tensor]:
        """Draws a batch of the replay."""
        return self.of_rows(cast("TensorDictBase", self.replay.sample()))


def images(sitting: Sitting) -> None:
    """An update on 32 images: drawn from lists and stacked, or from the device's replay; and what a row takes."""
    sizes = sitting.pick((10,), (20, 50))
    for size in sizes:
        _images_case(sitting, size)
    add = partial(sitting.verdict, "images")
    found = sitting.ratio_of("images", HOST, DEVICE)
    word = judge(found, 1.3, 1.05) if sitting.cuda else NOT_HERE
    add("to keep tensors on the GPU makes the update faster", times_text(found) if sitting.cuda else "", word)
    after = GRAPH if sitting.cuda else RING
    ours = sitting.ratio_of("images", DEVICE, after)
    remark = "" if sitting.cuda else "on a CPU the convolutions are most of the time"
    add("the package's replay makes the update faster than a list", times_text(ours), judge(ours, 1.1, 0.9), remark)
    _storage(sitting, sizes[-1])


def _images_case(sitting: Sitting, size: int) -> None:
    made = Images(size, 64 if size < 20 else 512, sitting.pick(8, 8, 32), sitting.device)
    checked = list(range(BATCH))

    def asks(draw: Callable[[], dict[str, Tensor]]) -> Callable[[], float]:
        learner = made.learner()
        return lambda: learner.update(draw()).item()

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return made.learner().loss(batch).detach().view(1)

    ours = made.learner()
    variants = [
        Variant(HOST, asks(made.of_list(made.host)), lambda: loss_of(stacked(made.host[:BATCH], made.device))),
        Variant(DEVICE, asks(made.of_list(made.listed)), lambda: loss_of(stacked(made.listed[:BATCH], made.device))),
        Variant(
            RING,
            lambda: ours.update(made.of_replay()),
            lambda: loss_of(made.of_rows(_rows(made, checked))),
        ),
    ]
    graph, recorded = None, made.learner()
    if sitting.cuda:
        graph = sitting.graph(lambda: recorded.update(made.of_replay()))
        variants.append(Variant(GRAPH, graph, compared=False, note="the same function, recorded"))
    sitting.compare("images", f"{size} x {size}", variants, tolerance=2e-3 if sitting.cuda else 1e-6)
    if graph is not None:
        graph.release()


def _rows(made: Images, numbers: list[int]) -> Any:
    """Rows of the replay that were written as the ``numbers``-th transitions: it keeps one stream for each env."""
    return torch.stack([made.replay[number] for number in numbers])


def _storage(sitting: Sitting, size: int) -> None:
    """Bytes of a transition of 12 planes as two images, and as the package keeps it."""
    made = Images(size, 64, 4, sitting.device)
    listed = sum(value.numel() * value.element_size() for value in made.listed[0])
    row = made.replay[:1]
    ours = sum(value.numel() * value.element_size() for value in row.values(True, True))
    found = {DEVICE: listed, RING: ours}
    for name, count in found.items():
        note = f"{count:,} bytes a row, {count * BUFFER / 1e9:.2f} GB for {BUFFER:,}"
        sitting.add("images", f"{size} x {size}, memory", name, row_bytes=count, note=note)
    word = CONFIRMED if listed * BUFFER < 12e9 else NOT_REPRODUCED
    text = f"{listed * BUFFER / 1e9:.1f} GB of images of {size} x {size}, {ours * BUFFER / 1e9:.2f} GB in the package"
    remark = "the static planes are the same in all rows of a landscape"
    sitting.verdict("images", f"a buffer of {BUFFER:,} is safe for the memory", text, word, remark)
