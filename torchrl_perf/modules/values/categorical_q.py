"""Networks of categorical action values (C51, arXiv:1707.06887)."""

from typing import Unpack

import torch
from torch import Tensor, nn

from torchrl_perf.functional.atoms import atom_means, fusable, fused_atom_means
from torchrl_perf.functional.losses.risk import Risk
from torchrl_perf.functional.masked import masked_log_softmax
from torchrl_perf.functional.wide import wide_dtype
from torchrl_perf.modules.values.risk import make_risk
from torchrl_perf.modules.values.value_head import HeadOptions, ValueHead
from torchrl_perf.modules.wide_buffers import WideBuffers


class CategoricalMLP(WideBuffers):
    """A distribution over M atoms for each action; called, it gives their means, the action values.

    As an :class:`EpsilonGreedy`'s network it acts on the means, or on a risk-sensitive value; with ``dueling`` and
    ``noisy`` it is the network of Rainbow (arXiv:1710.02298). :class:`DeviceC51Loss` trains it.

    Args:
        in_features: size of the input's last dim, or of the trunk's output.
        num_actions: D.
        num_atoms: M; one atom is a constant.
        v_min: the first atom, in the unit of discounted returns.
        v_max: the last atom.
        risk: act on this distortion of the distribution; None for the mean.
        trunk: makes features ``[*, F]`` of the inputs; None takes the input itself.
        **options: see :class:`HeadOptions`.

    Attributes:
        support: buffer ``[M]``, the atoms.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an empty support, and an option out of range.
    """

    wide_buffers = ("support",)
    support: Tensor

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        *,
        num_atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        risk: Risk | None = None,
        trunk: nn.Module | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        if num_atoms < 1 or not (v_min < v_max or (num_atoms == 1 and v_min == v_max)):
            raise ValueError(
                f"support: expected num_atoms of at least 1 and v_min below v_max, received {num_atoms} atoms from "
                f"{v_min} to {v_max}. Remedy: the least and the greatest discounted return."
            )
        self.trunk = nn.Identity() if trunk is None else trunk
        self.head = ValueHead(in_features, num_actions, num_atoms, has_trunk=trunk is not None, **options)
        self.num_actions, self.num_atoms = num_actions, num_atoms
        device = next(self.head.parameters()).device
        self.risk = make_risk(risk, device)
        self.register_buffer("support", torch.linspace(v_min, v_max, num_atoms, device=device))

    def logits(self, *inputs: Tensor) -> Tensor:
        """``[*, D, M]`` unnormalised log-probabilities."""
        return self.head(self.trunk(*inputs))

    def log_probs(self, *inputs: Tensor) -> Tensor:
        """``[*, D, M]`` log-probabilities of the atoms."""
        return masked_log_softmax(self.logits(*inputs))

    def action_values(self, *inputs: Tensor) -> Tensor:
        """``[*, D]`` values to act on: means, or risk-sensitive ones."""
        if self.risk is not None:
            logits = self.logits(*inputs)
            mass = self.risk.mass(logits.softmax(-1, dtype=wide_dtype(logits.dtype)).cumsum(-1))
            return (mass * self.support).sum(-1)
        streams = self.head.streams(self.trunk(*inputs))
        fused = fusable(streams, self.num_actions, self.num_atoms)
        means = fused_atom_means if fused else atom_means
        return means(streams, self.support, self.num_actions, self.head.dueling)

    def forward(self, *inputs: Tensor) -> Tensor:
        """:meth:`action_values`."""
        return self.action_values(*inputs)
