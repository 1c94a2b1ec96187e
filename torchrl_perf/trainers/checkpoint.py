"""Checkpoints: written whole or not at all, loaded without executing code."""

import os
from pathlib import Path
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of torch's generators on the CPU and on ``device``."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restores :func:`random_state`."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


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
    """
    path = Path(path)
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"checkpoint: expected a file at {path}, found {beside}. Remedy: pass the run's checkpoint.pt."
        )
    return torch.load(path, map_location=device, weights_only=True)
