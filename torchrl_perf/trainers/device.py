"""Where a run takes place, and in which mode."""

import torch


def resolve_device(name: str) -> torch.device:
    """``"auto"`` is CUDA where there is one, else the CPU.

    Raises:
        ValueError: for a name that is no CPU or CUDA device, and for CUDA where there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'auto', 'cpu', 'cuda' or 'cuda:<index>', received {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: expected a device of this machine, received {name!r}, and PyTorch sees no CUDA. Remedy: "
            "device='cpu'."
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def resolve_mode(mode: str, device: torch.device) -> str:
    """``"auto"`` is ``"graph"`` on CUDA and ``"eager"`` on a CPU.

    Raises:
        ValueError: for ``"graph"`` on a CPU.
    """
    if mode == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if mode == "graph" and device.type != "cuda":
        raise ValueError(f"mode='graph': expected a CUDA device, received {device}. Remedy: mode='compile' or 'eager'.")
    return mode
