"""What a W&B run is called and where it belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["WandbMode", "WandbSettings"]

WandbMode = Literal["auto", "online", "offline", "disabled"]


@dataclass(frozen=True)
class WandbSettings:
    """Arguments of ``wandb.init`` beside the project; what is None is left to W&B and its environment variables."""

    entity: str | None = None
    """User or team."""
    group: str | None = None
    """Runs that belong together, such as the seeds of one setting."""
    name: str | None = None
    """Of the run; None is the name of its folder."""
    tags: tuple[str, ...] = ()
    """Words to find the run by."""
    notes: str | None = None
    """A description."""
    mode: WandbMode = "auto"
    """``"auto"`` is ``WANDB_MODE`` where that is set, else online with a key and offline without one."""
    code: str | None = None
    """Folder whose Python files are stored with the run; None stores none."""
