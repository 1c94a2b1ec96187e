"""Operations that make the host wait, and some that do not, each with what an audit counts."""

from collections import Counter

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_perf.runtime.waits.script_audit import ScriptAudit


def audited(fn, *args, **options):
    """Run a function under audit; the report."""
    with ScriptAudit(__file__, cuda=False, **options) as audit:
        fn(*args)
    return audit.report()


def found(report):
    """Operations and how often, whatever the phase."""
    counts = Counter()
    for row in report.rows:
        counts[row.place.op] += row.count + row.before + row.after
    return dict(counts)


def assign_mask(x):
    x[x > 2] = x.new_zeros(3)


def fill_mask(x):
    x[x > 2] = 0.0


def branch(x):
    return 1 if (x > 0).any() else 0


def backward_of_mask(x):
    x = x.requires_grad_()
    x[x > 2].sum().backward()


def shuffled(x):
    return list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2, shuffle=True))


OPERATIONS = {
    "item": (lambda x: x.sum().item(), {"_local_scalar_dense": 1}),
    "float": (lambda x: float(x[0]), {"_local_scalar_dense": 1}),
    "int": (lambda x: int(x[0]), {"_local_scalar_dense": 1}),
    "index": (lambda x: [1, 2, 3][x[1].long()], {"_local_scalar_dense": 1}),
    "format": (lambda x: f"{x[0]:.2f}", {"_local_scalar_dense": 1}),
    "branch": (branch, {"_local_scalar_dense": 1}),
    "range": (lambda x: range(x[3].long()), {"_local_scalar_dense": 1}),
    "tolist": (lambda x: x.tolist(), {"tolist": 1}),
    "numpy": (lambda x: x.numpy(), {"numpy": 1}),
    "asarray": (np.asarray, {"__array__": 1}),
    "cpu": (lambda x: x.cpu(), {"cpu": 1}),
    "tensordict_cpu": (lambda x: TensorDict(x=x).cpu(), {"cpu": 1}),
    "cpu_numpy": (lambda x: x.cpu().numpy(), {"cpu": 1}),
    "cpu_item": (lambda x: x[0].detach().cpu().item(), {"cpu": 1}),
    "nonzero": (lambda x: x.nonzero(), {"nonzero": 1}),
    "argwhere": (torch.argwhere, {"nonzero": 1}),
    "where": (lambda x: torch.where(x > 2), {"nonzero": 1}),
    "masked_select": (lambda x: x.masked_select(x > 2), {"masked_select": 1}),
    "mask": (lambda x: x[x > 2], {"index": 1}),
    "assign_mask": (assign_mask, {"index_put_": 1}),
    "backward_of_mask": (backward_of_mask, {"index": 1, "nonzero": 1}),
    "unique": (lambda x: x.unique(), {"_unique2": 1}),
    "unique_dim": (lambda x: torch.unique(x[None], dim=0), {"unique_dim": 1}),
    "unique_consecutive": (torch.unique_consecutive, {"unique_consecutive": 1}),
    "equal": (lambda x: torch.equal(x, x), {"equal": 1}),
    "allclose": (lambda x: torch.allclose(x, x), {"allclose": 1}),
    "repeat": (lambda x: x.repeat_interleave(torch.ones(6).long()), {"repeat_interleave": 1}),
    "bincount": (lambda x: torch.bincount(x.long()), {"bincount": 1}),
    "validated": (lambda x: torch.distributions.Normal(x, x + 1, validate_args=True), {"_local_scalar_dense": 2}),
    "free_loader": (shuffled, {}),
    "free_where": (lambda x: torch.where(x > 2, x, 0.0), {}),
    "free_fill": (fill_mask, {}),
    "free_index": (lambda x: x[torch.tensor([0, 1])], {}),
    "free_cast": (lambda x: x.to(torch.float64).copy_(x), {}),
    "free_to_same": (lambda x: x.to("cpu"), {}),
    "free_one_hot": (lambda x: nn.functional.one_hot(x.long(), 6), {}),
    "free_one_hot_by_name": (lambda x: nn.functional.one_hot(x.long(), num_classes=6), {}),
    "free_repeat": (lambda x: x.repeat_interleave(torch.ones(6).long(), output_size=6), {}),
    "free_inverse": (lambda x: torch.linalg.inv_ex(x.diag() + torch.eye(6)), {}),
}
