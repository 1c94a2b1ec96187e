"""Features of an agent and of a set of objects around it."""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from torchrl_perf.functional.pooling import masked_attention, masked_max, masked_mean
from torchrl_perf.modules.mixed import MixedSequential

Pool = Literal["mean", "max", "attention"]


class SetEncoder(nn.Module):
    """Features of an agent's own state and of up to M objects in any order (Deep Sets, arXiv:1703.06114).

    Each object passes the same layers; the results are pooled over the objects that exist, joined to the agent's own
    features, and pass further layers. The features depend neither on the order of the objects nor on the number or
    content of padded ones; with none, the pool is 0. A trunk for the networks of this package, or for a critic.

    With the default sizes the agent's part has 56 features, the objects' 200, joined 256, then 256 and 128.

    Args:
        self_features: S, size of the agent's own state.
        object_features: F, size of one object.
        self_size: width of the agent's part.
        object_sizes: widths of the layers that all objects pass.
        joint_sizes: widths of the layers after the pool; the last is the number of features.
        pool: ``"mean"``, ``"max"``, or ``"attention"``: a mean weighted by how the agent's part (query) fits each
            object's (key), with one query for each of ``num_heads``.
        num_heads: of the attention; a divisor of the last of ``object_sizes``.
        options: further choices: ``self_scale [S]`` and ``object_scale [F]``, which the inputs are multiplied by and
            which are kept as buffers, ``precision`` of the layers as for :class:`MixedSequential`, ``device``.

    Attributes:
        out_features: the number of features.

    Raises:
        TypeError: for an unknown option.
        ValueError: for sizes below 1, an unknown pool, heads that do not divide, scales of another shape.
    """

    self_scale: Tensor
    object_scale: Tensor

    def __init__(
        self,
        self_features: int,
        object_features: int,
        *,
        self_size: int = 56,
        object_sizes: Sequence[int] = (40, 200),
        joint_sizes: Sequence[int] = (256, 128),
        pool: Pool = "mean",
        num_heads: int = 4,
        **options: object,
    ) -> None:
        super().__init__()
        sizes = [self_features, object_features, self_size, *object_sizes, *joint_sizes, num_heads]
        if min(sizes) < 1 or not object_sizes or not joint_sizes:
            raise ValueError(
                f"sizes: expected at least one layer of each kind and sizes of at least 1, received {sizes}."
            )
        if pool not in ("mean", "max", "attention"):
            raise ValueError(f"pool: expected 'mean', 'max' or 'attention', received {pool!r}.")
        if pool == "attention" and object_sizes[-1] % num_heads:
            raise ValueError(f"num_heads: expected a divisor of {object_sizes[-1]}, received {num_heads}.")
        unknown = sorted(set(options) - {"self_scale", "object_scale", "precision", "device"})
        if unknown:
            raise TypeError(f"options: expected self_scale, object_scale, precision or device, received {unknown}.")
        device, precision = options.get("device"), str(options.get("precision", "tf32"))
        self.pool, self.num_heads, self.out_features = pool, num_heads, joint_sizes[-1]
        self.own = _layers([self_features, self_size], precision)
        self.each = _layers([object_features, *object_sizes], precision)
        self.joint = _layers([self_size + object_sizes[-1], *joint_sizes], precision)
        if pool == "attention":
            self.query = nn.Linear(self_size, object_sizes[-1])
            self.key = nn.Linear(object_sizes[-1], object_sizes[-1])
        self.register_buffer("self_scale", _scale("self_scale", options.get("self_scale"), self_features))
        self.register_buffer("object_scale", _scale("object_scale", options.get("object_scale"), object_features))
        self.to(device)  # pyright: ignore

    def forward(self, state: Tensor, objects: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features of each agent.

        Args:
            state: ``[*, S]`` the agent's own.
            objects: ``[*, M, F]``.
            mask: ``[*, M]`` bool, True for the objects that exist; all by default.

        Returns:
            ``[*, out_features]``.

        Raises:
            ValueError: for a mask of another shape or dtype.
        """
        if mask is None:
            mask = torch.ones(objects.shape[:-1], dtype=torch.bool, device=objects.device)
        elif mask.shape != objects.shape[:-1] or mask.dtype != torch.bool:
            raise ValueError(
                f"mask: expected bool {list(objects.shape[:-1])}, one for each object, received {mask.dtype} "
                f"{list(mask.shape)}."
            )
        own = self.own(state * self.self_scale)
        # masked before the layers: the gradient of a NaN in the padding would reach the weights
        each = self.each(objects.masked_fill(~mask.unsqueeze(-1), 0.0) * self.object_scale)
        return self.joint(torch.cat([own, self._pooled(own, each, mask)], -1))

    def _pooled(self, own: Tensor, each: Tensor, mask: Tensor) -> Tensor:
        if self.pool == "mean":
            return masked_mean(each, mask)
        if self.pool == "max":
            return masked_max(each, mask)
        query, keys, values = (
            part.unflatten(-1, (self.num_heads, -1)) for part in (self.query(own), self.key(each), each)
        )
        return masked_attention(query, keys, values, mask).flatten(-2)


def _layers(sizes: Sequence[int], precision: str) -> MixedSequential:
    """``linear, relu, linear, relu, ...``: what follows a layer of features is a nonlinear function of them."""
    parts: list[nn.Module] = []
    for rows, columns in itertools.pairwise(sizes):
        parts += [nn.Linear(rows, columns), nn.ReLU()]
    return MixedSequential(*parts, precision=precision)


def _scale(name: str, scale: object, size: int) -> Tensor:
    """``[size]`` factors, 1 by default."""
    factors = torch.ones(size) if scale is None else torch.as_tensor(scale, dtype=torch.float32).clone()
    if factors.shape != (size,):
        raise ValueError(f"{name}: expected [{size}], one factor for each number, received {list(factors.shape)}.")
    return factors
