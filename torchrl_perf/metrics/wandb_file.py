"""Reads the rows that W&B has stored in the files of a run, offline ones included."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _PIECE = 7, 32768, 7  # bytes: of the file, of a block, of the header of a piece
_FULL, _LAST = 1, 4


def run_files(run_dir: str | os.PathLike[str], run_id: str) -> list[Path]:
    """The files of a W&B run below a folder, one for each time that it was started, the oldest first.

    Args:
        run_dir: folder that holds W&B's folder ``wandb``.
        run_id: identifier of the run.
    """
    return sorted(Path(run_dir).glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb"))


def read_records(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The records of a ``.wandb`` file, up to its end or to the first incomplete one.

    The file is a LevelDB log: a 7-byte header, then blocks of 32 KiB of pieces ``crc, length, kind, bytes``, where a
    record is one piece or a first, some middle and a last one.

    Args:
        path: a file, which may still be written to.

    Yields:
        W&B's protobuf records.
    """
    from wandb.proto import wandb_internal_pb2

    data = Path(path).read_bytes()
    position, parts = _HEADER, b""
    while position + _PIECE <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _PIECE:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _PIECE])
        if not 0 < kind <= _LAST or position + _PIECE + length > len(data):
            return
        parts += data[position + _PIECE : position + _PIECE + length]
        position += _PIECE + length
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)  # pyright: ignore[reportAttributeAccessIssue]
            parts = b""


def read_history(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a ``.wandb`` file: names to values, the step under ``_step``."""
    items = [record.history.item for record in read_records(path) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in items]


def last_stored_step(run_dir: str | os.PathLike[str], run_id: str) -> int | None:
    """Greatest step that the files of a run hold; None without any row."""
    steps = [int(row["_step"]) for path in run_files(run_dir, run_id) for row in read_history(path) if "_step" in row]
    return max(steps, default=None)
