"""Checkpoints: written whole or not at all, loaded without executing code."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


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


def check_modules(parts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """That a checkpoint holds the tensors of the modules among ``parts``, in their shapes.

    Args:
        parts: what a trainer saves, by name; optimisers and the like are not looked at.
        saved: their states.

    Raises:
        ValueError: naming what differs.
    """
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        expected, received = _shapes(part.state_dict()), _shapes(saved.get(name, {}))
        if expected != received:
            differing = sorted(key for key in expected | received if expected.get(key) != received.get(key))
            listed = ", ".join(f"{key}: {expected.get(key)}, received {received.get(key)}" for key in differing[:4])
            raise ValueError(
                f"checkpoint: expected in {name} {listed}{', ...' if differing[4:] else ''}. Nothing was changed. "
                "Remedy: make the trainer with the settings, such as hidden_size, that the checkpoint was saved with."
            )


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int]]:
    return {key: list(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor)}
