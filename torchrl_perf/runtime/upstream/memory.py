"""PyTorch: how many hold a piece of memory, as its own trees of CUDA graphs ask."""

import torch

__all__ = ["holders"]


def holders(memory: torch.UntypedStorage) -> int:
    """How many tensors, views and autograd nodes share a storage, itself as a Python object included."""
    return torch._C._storage_Use_Count(memory._cdata)
