"""Features of a graph and of its nodes, of which some are padding, by attention."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_perf.modules.mixed import check_precision
from torchrl_perf.runtime.precision import autocast, widened

_OPTIONS = ("feedforward", "node_scale", "graph_scale", "precision", "device")


class NodeEncoder(nn.Module):
    """A transformer encoder (arXiv:1706.03762) over the nodes of a graph and one token for the graph as a whole.

    The graph token is a learned vector plus a linear map of the graph's own features; it and the nodes attend to the
    nodes that exist and to the token. There are no positions in a sequence: what a node is, its features say. So the
    embedding of a node moves with it when the nodes are permuted, and neither depends on number or content of padded
    ones, NaN included. The token always exists, so that a graph without nodes attends to it alone and nothing is NaN.
    Layers normalise first (arXiv:2002.04745). They use ``torch.nn.functional.scaled_dot_product_attention`` with a
    mask, and have static shapes.

    **Simplicial embedding** (arXiv:2204.00616): the output is cut into ``groups`` of ``width / groups`` numbers, and
    each group is a softmax: a point on a simplex, bounded and close to a choice for small temperatures.

    Args:
        node_features: F, size of a node.
        graph_features: G, size of the graph's own features.
        width: size of the embeddings.
        num_layers: number of layers.
        num_heads: heads of the attention; a divisor of ``width``.
        groups: of the simplicial embedding, a divisor of ``width`` that leaves at least 2 numbers in each; 0 for a
            normalised, linear output instead.
        temperature: of its softmax, positive.
        options: further choices: ``feedforward``, width of the layers' perceptrons (``2 * width`` by default),
            ``node_scale [F]`` and ``graph_scale [G]``, which the inputs are multiplied by and which are kept as
            buffers, ``precision`` of the layers (the map to the embedding is float32 in any case) and ``device``.

    Attributes:
        out_features: size of the embeddings.

    Raises:
        TypeError: for an unknown option.
        ValueError: for sizes below 1, heads or groups that do not divide, a temperature that is not positive, scales
            of another shape, an unknown precision.
    """

    node_scale: Tensor
    graph_scale: Tensor

    def __init__(
        self,
        node_features: int,
        graph_features: int,
        *,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        groups: int = 16,
        temperature: float = 1.0,
        **options: object,
    ) -> None:
        super().__init__()
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise TypeError(f"options: expected some of {', '.join(_OPTIONS)}, received {unknown}.")
        feedforward = cast("int", options.get("feedforward") or 2 * width)
        sizes = [node_features, graph_features, width, num_layers, num_heads, feedforward]
        if min(sizes) < 1:
            raise ValueError(f"sizes: expected at least 1 each, received {sizes}.")
        if width % num_heads:
            raise ValueError(f"num_heads: expected a divisor of width {width}, received {num_heads}.")
        if groups and (groups < 0 or width % groups or width == groups):
            raise ValueError(
                f"groups: expected 0 or a divisor of width {width} with at least 2 numbers a group, received {groups}."
            )
        if not temperature > 0:
            raise ValueError(f"temperature: expected a positive number, received {temperature}.")
        self.precision = check_precision(str(options.get("precision", "tf32")))
        self.groups, self.temperature, self.out_features = groups, temperature, width
        self.node_in = nn.Linear(node_features, width)
        self.graph_in = nn.Linear(graph_features, width)
        self.token = nn.Parameter(torch.randn(width) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer(width, num_heads, feedforward) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.embed = nn.Linear(width, width)
        self.register_buffer("node_scale", _scale("node_scale", options.get("node_scale"), node_features))
        self.register_buffer("graph_scale", _scale("graph_scale", options.get("graph_scale"), graph_features))
        self.to(options.get("device"))  # pyright: ignore

    def forward(self, nodes: Tensor, mask: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of nodes and graph.

        Args:
            nodes: ``[*, M, F]`` float.
            mask: ``[*, M]`` bool, True for the nodes that exist.
            graph: ``[*, G]`` float.

        Returns:
            ``[*, M, width]``, 0 for nodes that do not exist, and ``[*, width]``.

        Raises:
            ValueError: for a mask of another shape or dtype, or leading dims that differ.
        """
        token, tokens = self._tokens(nodes, mask, graph, graph_only=False)
        each = self._embedded(tokens).view(*nodes.shape[:-1], self.out_features)
        return each.masked_fill(~mask.unsqueeze(-1), 0.0), self._embedded(token).view(
            *nodes.shape[:-2], self.out_features
        )

    def graph_embedding(self, nodes: Tensor, mask: Tensor, graph: Tensor) -> Tensor:
        """The second result of :meth:`forward`, ``[*, width]``, without the others.

        The last layer computes the graph token alone, which makes it linear in the number of nodes instead of square.
        """
        token, _ = self._tokens(nodes, mask, graph, graph_only=True)
        return self._embedded(token).view(*nodes.shape[:-2], self.out_features)

    def _tokens(self, nodes: Tensor, mask: Tensor, graph: Tensor, *, graph_only: bool) -> tuple[Tensor, Tensor]:
        """``[B, 1, width]`` and ``[B, M, width]`` after all layers; of the nodes, without the last one if not asked."""
        rows = nodes.shape[:-2]
        if mask.shape != nodes.shape[:-1] or mask.dtype != torch.bool or graph.shape[:-1] != rows:
            raise ValueError(
                f"mask, graph: expected bool {list(nodes.shape[:-1])}, one for each node, and {[*rows, 'G']}, received "
                f"{mask.dtype} {list(mask.shape)} and {list(graph.shape)}."
            )
        count, size = math.prod(rows), nodes.shape[-2]
        mask = mask.reshape(count, size)
        # masked before the layers: the gradient of a NaN in the padding would reach the weights
        nodes = nodes.reshape(count, size, nodes.shape[-1]).masked_fill(~mask.unsqueeze(-1), 0.0)
        # [B, 1, 1, 1 + M], for all heads and queries
        seen = F.pad(mask, (1, 0), value=True).view(count, 1, 1, size + 1)
        with autocast(self.precision, nodes.device):
            token = self.graph_in(graph.reshape(count, 1, graph.shape[-1]) * self.graph_scale) + self.token
            tokens = self.node_in(nodes * self.node_scale)
            for number, layer in enumerate(self.layers, 1):
                token, tokens = layer(token, tokens, seen, token_only=graph_only and number == len(self.layers))
        return widened(token), widened(tokens)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """``[B, L, width]`` -> the same shape, in the dtype of the parameters."""
        with torch.autocast(tokens.device.type, enabled=False):
            values = self.embed(self.norm(tokens.to(self.embed.weight.dtype)))
            if not self.groups:
                return values
            simplices = widened(values).unflatten(-1, (self.groups, -1)) / self.temperature
            return simplices.softmax(-1).flatten(-2).to(values.dtype)


class EncoderLayer(nn.Module):
    """Attention and a perceptron, each added to what came in (arXiv:2002.04745).

    The token of the graph and those of the nodes are two tensors: cut out of one, either would cost the backward pass a
    tensor of the size of all.

    Args:
        width: size of a token.
        num_heads: a divisor of ``width``.
        feedforward: width of the perceptron.
    """

    def __init__(self, width: int, num_heads: int, feedforward: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.joined = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, feedforward), nn.GELU(), nn.Linear(feedforward, width)
        )

    def forward(
        self, token: Tensor, tokens: Tensor, seen: Tensor, *, token_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The tokens after attention to all that are seen.

        Args:
            token: ``[B, 1, width]``, of the graph.
            tokens: ``[B, M, width]``, of the nodes.
            seen: ``[B, 1, 1, 1 + M]`` bool, the graph's first, at least one True in each row.
            token_only: leave the tokens of the nodes as they are.

        Returns:
            ``[B, 1, width]`` and ``[B, M, width]``.
        """
        normed = [self.attention_norm(part) for part in (token, tokens)]
        key, value = (self._heads(torch.cat([layer(part) for part in normed], 1)) for layer in (self.key, self.value))
        results = [token, tokens]
        for number, part in enumerate(normed[:1] if token_only else normed):
            mixed = F.scaled_dot_product_attention(self._heads(self.query(part)), key, value, attn_mask=seen)
            out = results[number] + self.joined(mixed.transpose(1, 2).flatten(2))
            results[number] = out + self.perceptron(out)
        return results[0], results[1]

    def _heads(self, values: Tensor) -> Tensor:
        """``[B, L, width]`` -> ``[B, H, L, width / H]``."""
        return values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _scale(name: str, scale: object, size: int) -> Tensor:
    """``[size]`` factors, 1 by default."""
    factors = torch.ones(size) if scale is None else torch.as_tensor(scale, dtype=torch.float32).clone()
    if factors.shape != (size,):
        raise ValueError(f"{name}: expected [{size}], one factor for each number, received {list(factors.shape)}.")
    return factors
