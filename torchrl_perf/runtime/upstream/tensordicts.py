"""tensordict: a TensorDict of entries that are known to fit, and the dict in which it keeps them.

``TensorDict(...)`` and ``set`` check shapes and devices of each entry, which on a path that is called at each step, for
entries that were made to fit, takes longer than the step itself.
"""

from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules

unchecked = TensorDict._new_unsafe
"""``unchecked(entries, batch_size=..., device=...)``: nothing is checked, nothing is copied."""


modules_take_tensordicts = _set_dispatch_td_nn_modules
"""``with modules_take_tensordicts(True)``: modules get TensorDicts alone, as inside TorchRL's buffers."""


def leaves_of(tensordict: TensorDict) -> dict[Any, Any]:
    """The tensors of a TensorDict by key, nested ones too, a tenth of the time of ``items(True, True)``."""
    found: dict[Any, Any] = {}
    waiting: list[tuple[tuple[str, ...], TensorDictBase]] = [((), tensordict)]
    while waiting:
        path, node = waiting.pop()
        for name, value in entries_of(node).items():
            if type(value) is TensorDict:
                waiting.append(((*path, name), value))
            elif isinstance(value, TensorDictBase):
                below = value.items(True, True)
                found |= {(*path, name, *((key,) if isinstance(key, str) else key)): leaf for key, leaf in below}
            else:
                found[(*path, name) if path else name] = value
    return found


def entries_of(tensordict: TensorDictBase) -> dict[str, Any]:
    """The dict of a TensorDict's own entries, tensors and TensorDicts by name: what is written to it is not checked."""
    return tensordict._tensordict  # pyright: ignore[reportAttributeAccessIssue]
