"""What trainers ask of checkpoints beside their file: random state, and whether the networks are the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint

__all__ = ["check_modules", "load_checkpoint", "load_random_state", "random_state", "save_checkpoint"]


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
