"""Several networks of one architecture, with one set of stacked parameters."""

import copy
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams
from tensordict.utils import NestedKey
from torch import Tensor, nn


class Twins(TensorDictModuleBase):
    """K networks that each write values ``[*, 1]``, as one that writes ``[*, K]``; or ``[*, D]`` and ``[*, K, D]``.

    The parameters are those of ``torchrl.objectives.LossModule.convert_to_functional(..., expand_dim=K)``: ``[K, ...]``
    each, under the names of one network.

    Args:
        template: one of the networks, a TensorDict module; it is copied.
        params: the stacked parameters and buffers of all.
        value_key: where the values are written.
        randomness: of ``torch.vmap``, for networks that draw numbers.

    Attributes:
        net: the copy of the template that holds the stacked parameters; it cannot be called itself.
        num_members: K.
        loop: whether the networks are called one after the other instead of in one ``torch.vmap``; False.
        of_choices: whether each writes the values ``[*, D]`` of all choices; False.
    """

    def __init__(
        self,
        template: nn.Module,
        params: TensorDictParams,
        value_key: NestedKey,
        *,
        randomness: str = "error",
    ) -> None:
        super().__init__()
        self.net = copy.deepcopy(template)
        params.to_module(self.net)
        self.num_members = int(params.batch_size[0])
        self.value_key, self.randomness = value_key, randomness
        self.loop, self.of_choices = False, False
        self.in_keys = list(cast("Any", template).in_keys)  # pyright: ignore
        self.out_keys = [value_key]  # pyright: ignore

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the values of all networks.

        Raises:
            ValueError: where a network writes other values than ``[*, 1]``.
        """
        tensors = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        inputs = tensordict.select(*self.in_keys, strict=False)

        def member(values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.net, values, (inputs.copy(),)).get(self.value_key)

        if self.loop:
            rows = [{name: value[k] for name, value in tensors.items()} for k in range(self.num_members)]
            found = torch.stack([member(values) for values in rows])
        else:
            found = cast("Any", torch.vmap)(member, randomness=self.randomness)(tensors)
        last = found.shape[-1] if self.of_choices else 1
        if found.shape != (self.num_members, *tensordict.batch_size, last):
            raise ValueError(
                f"qvalue_network: expected values {[*tensordict.batch_size, last]} of each network, received "
                f"{list(found.shape[1:])}. Remedy: one output; for a network that is all of the K critics itself and "
                "writes [*, K], num_qvalue_nets=None."
            )
        values = found.movedim(0, -2) if self.of_choices else found.squeeze(-1).movedim(0, -1)
        return tensordict.set(self.value_key, values)


def members_of(network: nn.Module) -> int | None:
    """Number of networks of a batched ensemble, by an int attribute ``num_members`` of a part; None for one network."""
    counts = {part.num_members for part in network.modules() if isinstance(getattr(part, "num_members", None), int)}
    return max(counts) if counts else None
