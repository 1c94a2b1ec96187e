"""Constants of a module that keep 32 bits when its parameters are converted to 16."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class WideBuffers(nn.Module):
    """A module some of whose buffers keep at least 32 bits.

    ``net.to(torch.bfloat16)`` converts buffers, too. Unlike a weight, a level of 1 / 50, an atom, the frequency 62 pi
    or the state of a slow process must not be rounded: it would be another one. These buffers follow the module to
    another device and to float64, but not to 16 bits.
    """

    wide_buffers: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: self.get_buffer(name) for name in self.wide_buffers}
        result = super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self.get_buffer(name)
            if after.dtype in (torch.bfloat16, torch.float16):
                self.register_buffer(name, buffer.to(after.device))
        return result
