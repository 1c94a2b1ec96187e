"""The zoo: trained policies that come with the package, each in the folder of a small run. Loads no torch.

``zoo:ppo-CartPole`` names one wherever a finished run is asked for. ``python -m torchrl_perf.bench.zoo`` makes them.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_perf.near_names import nearest_word
from torchrl_perf.run_layout import read_json

__all__ = ["CARD", "FOLDER", "MOST_BYTES", "PREFIX", "ZooEntry", "run_path", "zoo_entries", "zoo_name"]

PREFIX = "zoo:"
FOLDER = Path(__file__).parent / "zoo_entries"
CARD = "entry.json"
"""What a folder of the zoo has beside the files of a run."""
MOST_BYTES = 2 * 2**20
"""Limit of all entries together: they are a part of the wheel."""


class ZooEntry(NamedTuple):
    """A trained policy.

    Attributes:
        name: algorithm and task, such as ``ppo-CartPole``.
        path: its folder.
        card: ``algorithm``, ``task``, ``parameters`` (their number), ``steps`` and ``seconds`` of training, ``seed``;
            ``evaluation`` with ``episodes``, ``unfinished``, ``mean_return``, ``return_deviation``, ``interval``,
            ``mean_length``, ``seed`` and ``device``; ``machine``; where returns are not what counts, ``measure`` with
            ``name`` and ``value``.
    """

    name: str
    path: Path
    card: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def zoo_entries(folder: Path = FOLDER) -> dict[str, ZooEntry]:
    """All entries, by name in the order of the alphabet.

    Args:
        folder: where they are.
    """
    places = sorted(card.parent for card in folder.glob(f"*/{CARD}"))
    return {place.name: ZooEntry(place.name, place, read_json(place / CARD)) for place in places}


def zoo_name(run: str | os.PathLike[str]) -> str | None:
    """The name behind ``zoo:``; None for the path of a run."""
    text = os.fspath(run)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def run_path(run: str | os.PathLike[str]) -> Path:
    """Where a run is: the path itself, or the folder of ``zoo:NAME``.

    Args:
        run: path of a run's folder or checkpoint, or the name of an entry.

    Raises:
        FileNotFoundError: for a name that the zoo does not have, with the nearest that it has.
    """
    if (name := zoo_name(run)) is None:
        return Path(run)
    known = zoo_entries()
    if name not in known:
        near = nearest_word(name, known)
        remedy = f"{PREFIX}{near}" if near else "torchrl-perf zoo, which lists them"
        raise FileNotFoundError(f"zoo: expected one of {', '.join(known)}, received {name!r}. Remedy: {remedy}.")
    return known[name].path
