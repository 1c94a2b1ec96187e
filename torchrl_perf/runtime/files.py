"""Checkpoint files: written whole or not at all, loaded without executing code."""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(state: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Writes ``state`` (tensors and plain scalars) whole or not at all: an interrupted write leaves the old file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)
    return path


def load_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint onto ``device``, with ``weights_only=True``.

    Raises:
        FileNotFoundError: naming the file and what lies beside it.
        ValueError: for a file that is cut off or was never a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"checkpoint: expected a file at {path}, found {beside}. Remedy: pass the run's checkpoint.pt."
        )
    if not zipfile.is_zipfile(path):  # what torch.save writes
        raise ValueError(
            f"checkpoint: expected a whole file of torch.save at {path}, received {path.stat().st_size} bytes of "
            "something else, or of one that is cut off. Remedy: an earlier copy; save_checkpoint leaves no such file."
        )
    return torch.load(path, map_location=device, weights_only=True)
