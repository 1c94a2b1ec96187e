"""Triton kernel of the means of categorical values: one program for each row, nothing written in between.

Reference: :func:`torchrl_perf.functional.atoms.atom_means`. Import this module only where Triton is.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _means_kernel(
    logits_ptr, support_ptr, out_ptr,
    ACTIONS: tl.constexpr, ATOMS: tl.constexpr, DUELING: tl.constexpr,
    ACTIONS_PAD: tl.constexpr, ATOMS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, ACTIONS_PAD)
    m = tl.arange(0, ATOMS_PAD)
    actual = (d[:, None] < ACTIONS) & (m[None, :] < ATOMS)
    streams = ACTIONS + (1 if DUELING else 0)
    start = logits_ptr + row * streams * ATOMS
    first = start + (ATOMS if DUELING else 0)
    x = tl.load(first + d[:, None] * ATOMS + m[None, :], mask=actual, other=0.0).to(tl.float32)
    if DUELING:
        value = tl.load(start + m, mask=m < ATOMS, other=0.0).to(tl.float32)
        x += (value - tl.sum(x, 0) / ACTIONS)[None, :]
    x = tl.where(m[None, :] < ATOMS, x, float("-inf"))
    weight = tl.exp(x - tl.max(x, 1)[:, None])
    atoms = tl.load(support_ptr + m, mask=m < ATOMS, other=0.0).to(tl.float32)
    mean = tl.sum(weight * atoms[None, :], 1) / tl.sum(weight, 1)
    tl.store(out_ptr + row * ACTIONS + d, mean, mask=d < ACTIONS)


def forward(logits: torch.Tensor, support: torch.Tensor, num_actions: int, dueling: bool) -> torch.Tensor:
    """``[B, D]`` of contiguous ``logits [B, (D or 1 + D) M]`` and ``support [M]``."""
    rows, atoms = logits.shape[0], support.shape[0]
    out = logits.new_empty(rows, num_actions)
    if rows:
        _means_kernel[(rows,)](
            logits, support, out, ACTIONS=num_actions, ATOMS=atoms, DUELING=dueling,
            ACTIONS_PAD=triton.next_power_of_2(num_actions), ATOMS_PAD=triton.next_power_of_2(atoms), num_warps=1,
        )  # fmt: skip
    return out
