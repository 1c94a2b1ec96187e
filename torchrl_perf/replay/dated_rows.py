"""Samples that know their age, to find the place of a script that reads one long after it was drawn."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensordict
import torchrl
from tensordict import TensorDict

import torchrl_perf
from torchrl_perf.runtime.self_capture import HELD
from torchrl_perf.runtime.upstream.tensordicts import entries_of

__all__ = ["DatedRows", "Drawn"]

_PACKAGES = tuple(str(Path(package.__file__).parent) for package in (torchrl_perf, torchrl, tensordict))


@dataclass
class Drawn:
    """How many samples a buffer has drawn."""

    number: int = 0


class DatedRows(TensorDict):
    """A sample, or a TensorDict nested in one, whose entries cannot be read once it is too old.

    Tensors that were taken out of it stay readable, and keep the memory; so do copies.
    """

    @classmethod
    def of(cls, rows: TensorDict, drawn: Drawn) -> DatedRows:
        """Rows that were just drawn as number ``drawn.number``."""
        return cls._dated(rows, (drawn, drawn.number, _caller()))

    @classmethod
    def _dated(cls, rows: TensorDict, origin: tuple[Drawn, int, str]) -> DatedRows:
        entries = {
            name: cls._dated(value, origin) if isinstance(value, TensorDict) else value
            for name, value in entries_of(rows).items()
        }
        dated = cls._new_unsafe(entries, batch_size=rows.batch_size, device=rows.device, nested=False)
        dated.__dict__["origin"] = origin
        return dated

    @property
    def _tensordict(self) -> dict[str, Any]:
        """The entries, where TensorDict keeps them: everything that reads rows comes here."""
        origin = self.__dict__.get("origin")
        if origin is not None:
            drawn, number, place = origin
            if drawn.number - number > HELD:
                raise RuntimeError(
                    f"sample: expected number {number} (drawn at {place}) to be read before more than {HELD} others "
                    f"are drawn, received a read {drawn.number - number} samples later. Remedy: read it earlier, or "
                    "keep sample.clone()."
                )
        return self.__dict__["entries"]

    @_tensordict.setter
    def _tensordict(self, entries: dict[str, Any]) -> None:
        self.__dict__["entries"] = entries


def _caller() -> str:
    """File and line of the script that draws."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
