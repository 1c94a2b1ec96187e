"""Whether W&B could log in; the key itself is never read into anything."""

import netrc
import os
from urllib.parse import urlparse

__all__ = ["has_wandb_key"]


def has_wandb_key() -> bool:
    """Whether there is a key in the environment, or a netrc entry for W&B's host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
