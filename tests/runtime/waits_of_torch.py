"""Operations of torch that make the host wait on CUDA, and their neighbours that do not, each with its reason.

The list follows torch's own registry: every operator of ``native_functions`` whose result has a size that depends on
values, whose kernel reads a number (``item``, ``cpu``, a size of the next launch), and every method of a tensor that
gives Python a value. What waits was measured with ``torch.cuda.set_sync_debug_mode`` on an H200 with torch 2.11 where
the kernel does not say it by itself; what that mode does not see is marked "source".
"""

import copy
import io
import pickle

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

WAITS, FREE = True, False


def tensors():
    """The operands of the operations below."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, generator=generator) + 0.1
    m = torch.rand(4, 4, generator=generator)
    return {
        "x": x,
        "m": m,
        "sq": m @ m.T + torch.eye(4),
        "long": torch.arange(5),
        "big": torch.arange(1000),
        "mask": x > 0.5,
        "i": torch.tensor(2),
        "s": torch.tensor(0.5),
        "lengths": torch.tensor([2, 4]),
        "capped": nn.Embedding(10, 3, max_norm=1.0),
        "free": nn.Embedding(10, 3),
    }


def set_item(x, index, value):
    x = x.clone()
    x[index] = value


def both(x, read):
    """A copy to the host, and then a read of the source: the second waits too."""
    x.cpu()
    return read(x)


OPERATIONS = [
    # a value for Python
    ("item", lambda t: t["s"].item(), WAITS, "a value"),
    ("bool", lambda t: bool(t["s"]), WAITS, "a value"),
    ("int", lambda t: int(t["i"]), WAITS, "a value"),
    ("float", lambda t: float(t["s"]), WAITS, "a value"),
    ("complex", lambda t: complex(t["s"]), WAITS, "a value"),
    ("index", lambda t: [1, 2, 3][t["i"]], WAITS, "a value"),
    ("format", lambda t: f"{t['s']:.2f}", WAITS, "a value"),
    ("is_nonzero", lambda t: torch.is_nonzero(t["s"]), WAITS, "a value"),
    ("contains", lambda t: 0.1 in t["x"], WAITS, "a value"),
    ("python_max", lambda t: max(t["x"]), WAITS, "a branch on each comparison"),
    ("python_sum", lambda t: sum(t["x"]), FREE, "additions"),
    ("len", lambda t: len(t["x"]), FREE, "a size"),
    ("iterate", lambda t: list(t["x"]), FREE, "views"),
    ("tolist", lambda t: t["x"].tolist(), WAITS, "values"),
    ("numpy", lambda t: t["x"].numpy(), WAITS, "values"),
    ("array", lambda t: np.asarray(t["x"]), WAITS, "values"),
    ("cpu", lambda t: t["x"].cpu(), WAITS, "a copy to the host"),
    ("repr", lambda t: repr(t["x"]), WAITS, "values, to print them"),
    ("print_of_matrix", lambda t: str(t["m"]), WAITS, "values, to print them"),
    ("save", lambda t: torch.save(t["x"], io.BytesIO()), WAITS, "a copy to the host"),
    ("save_state", lambda t: torch.save({"a": {"b": t["x"]}}, io.BytesIO()), WAITS, "a copy to the host"),
    ("save_module", lambda t: torch.save(t["free"].state_dict(), io.BytesIO()), WAITS, "a copy to the host"),
    ("pickle", lambda t: pickle.dumps(t["x"]), WAITS, "a copy to the host"),
    ("deepcopy", lambda t: copy.deepcopy(t["x"]), FREE, "a copy on the device"),
    ("copy", lambda t: copy.copy(t["x"]), FREE, "shared memory"),
    ("equal", lambda t: torch.equal(t["x"], t["x"]), WAITS, "a value"),
    ("allclose", lambda t: torch.allclose(t["x"], t["x"]), WAITS, "a value"),
    ("isclose", lambda t: torch.isclose(t["x"], t["x"]).all(), FREE, "a tensor"),
    # copies on the host are read without a wait, their sources are not
    ("cpu_then_source", lambda t: both(t["x"], lambda x: x[0].item()), 2, "each waits"),
    ("cpu_then_source_list", lambda t: both(t["x"], lambda x: x.tolist()), 2, "each waits"),
    ("cpu_then_source_nonzero", lambda t: both(t["x"], lambda x: x.nonzero()), 2, "each waits"),
    ("cpu_then_numpy", lambda t: t["x"].cpu().numpy(), 1, "the copy is on the host"),
    ("cpu_then_view", lambda t: t["x"].cpu()[0].item(), 1, "the copy is on the host"),
    ("cpu_twice", lambda t: t["x"].cpu().cpu(), 1, "the copy is on the host"),
    ("cpu_of_detached", lambda t: t["x"].detach().cpu().tolist(), 1, "the copy is on the host"),
    # numbers that a kernel or the parser of arguments reads
    ("tensor_of_tensors", lambda t: torch.tensor([t["x"][0], t["x"][1]]), 2, "each element"),
    ("tensor_of_nested", lambda t: torch.tensor([[t["s"]], [t["s"]]]), 2, "each element"),
    ("as_tensor_of_tensors", lambda t: torch.as_tensor([t["s"]]), WAITS, "each element"),
    ("new_tensor", lambda t: t["x"].new_tensor([t["s"]]), WAITS, "each element"),
    ("tensor_of_numbers", lambda t: torch.tensor([1.0, 2.0]), FREE, "numbers of the host"),
    ("stack", lambda t: torch.stack([t["s"], t["s"]]), FREE, "a copy on the device"),
    ("linspace", lambda t: torch.linspace(t["x"][0], t["x"][1], 5), WAITS, "its ends"),
    ("linspace_one_end", lambda t: torch.linspace(t["s"], 1.0, 5), WAITS, "its end"),
    ("linspace_other_end", lambda t: torch.linspace(0.0, t["s"], 5), WAITS, "its end"),
    ("linspace_numbers", lambda t: torch.linspace(0.0, 1.0, 5), FREE, "numbers of the host"),
    ("logspace", lambda t: torch.logspace(t["s"], 1.0, 5), WAITS, "its end"),
    ("arange", lambda t: torch.arange(t["i"]), WAITS, "its end"),
    ("range", lambda t: range(t["i"]), WAITS, "its end"),
    ("full", lambda t: torch.full((2,), t["s"]), WAITS, "its value"),
    ("full_like", lambda t: torch.full_like(t["x"], t["s"]), WAITS, "its value"),
    ("fill", lambda t: t["x"].clone().fill_(t["s"]), FREE, "a copy on the device"),
    ("add_alpha", lambda t: torch.add(t["x"], t["x"], alpha=t["s"]), WAITS, "a number"),
    ("clamp", lambda t: t["x"].clamp(t["s"], t["s"] + 1), FREE, "tensors"),
    ("masked_fill_tensor", lambda t: t["x"].masked_fill(t["mask"], t["s"]), WAITS, "its value"),
    ("masked_fill__tensor", lambda t: t["x"].clone().masked_fill_(t["mask"], t["s"]), WAITS, "its value"),
    ("masked_fill", lambda t: t["x"].masked_fill(t["mask"], 0.0), FREE, "a number of the host"),
    ("index_fill_tensor", lambda t: t["x"].index_fill(0, t["long"], t["s"]), WAITS, "its value"),
    ("index_fill", lambda t: t["x"].index_fill(0, t["long"], 1.0), FREE, "a number of the host"),
    ("where", lambda t: torch.where(t["mask"], t["x"], t["s"]), FREE, "tensors"),
    # indices
    ("mask", lambda t: t["x"][t["mask"]], WAITS, "a size"),
    ("set_mask", lambda t: set_item(t["x"], t["x"] > 0, t["x"]), WAITS, "a size"),
    ("set_mask_number", lambda t: set_item(t["x"], t["mask"], 0.0), FREE, "masked_fill_"),
    ("zero_dim_index", lambda t: t["x"][t["i"]], WAITS, "a number"),
    ("set_zero_dim_index", lambda t: set_item(t["x"], t["i"], 1.0), WAITS, "a number"),
    ("slice_end", lambda t: t["x"][: t["i"]], WAITS, "a number"),
    ("split", lambda t: t["x"].split(t["i"]), WAITS, "a number"),
    ("indices", lambda t: t["x"][t["long"]], FREE, "a gather"),
    ("set_indices", lambda t: set_item(t["x"], t["long"], 1.0), FREE, "a scatter"),
    ("take", lambda t: t["x"].take(t["long"]), FREE, "a gather"),
    ("index_add", lambda t: t["x"].index_add(0, t["long"], t["x"][:5]), FREE, "a scatter"),
    ("masked_scatter", lambda t: t["x"].masked_scatter(t["mask"], t["x"]), FREE, "a scan on the device"),
    # sizes that depend on values
    ("nonzero", lambda t: t["x"].nonzero(), WAITS, "a size"),
    ("argwhere", lambda t: torch.argwhere(t["x"]), WAITS, "a size"),
    ("where_indices", lambda t: torch.where(t["mask"]), WAITS, "a size"),
    ("nonzero_static", lambda t: torch.nonzero_static(t["x"], size=6), FREE, "a given size"),
    ("count_nonzero", lambda t: t["x"].count_nonzero(), FREE, "a tensor"),
    ("masked_select", lambda t: t["x"].masked_select(t["mask"]), WAITS, "a size"),
    ("unique", lambda t: t["x"].unique(), WAITS, "a size"),
    ("unique_dim", lambda t: torch.unique(t["m"], dim=0), WAITS, "a size"),
    ("unique_consecutive", lambda t: torch.unique_consecutive(t["x"]), WAITS, "a size"),
    ("bincount", lambda t: torch.bincount(t["long"]), WAITS, "a size"),
    ("bincount_minlength", lambda t: torch.bincount(t["long"], minlength=9), WAITS, "a size"),
    ("repeat", lambda t: t["x"].repeat_interleave(torch.ones(6).long()), WAITS, "a size"),
    ("repeat_size", lambda t: t["x"].repeat_interleave(torch.ones(6).long(), output_size=6), FREE, "a given size"),
    ("repeat_number", lambda t: t["x"].repeat_interleave(2), FREE, "a given size"),
    ("to_sparse", lambda t: t["m"].to_sparse(), WAITS, "a size"),
    ("histc", lambda t: torch.histc(t["x"]), WAITS, "its range"),
    ("histc_range", lambda t: torch.histc(t["x"], 10, 0, 1), FREE, "a given range"),
    ("isin", lambda t: torch.isin(t["big"], t["big"]), WAITS, "unique values, to sort them"),
    ("isin_few", lambda t: torch.isin(t["x"], t["x"][:2]), FREE, "comparisons"),
    ("isin_number", lambda t: torch.isin(t["big"], 3), FREE, "comparisons"),
    ("one_hot", lambda t: F.one_hot(t["long"]), WAITS, "a size"),
    ("one_hot_classes", lambda t: F.one_hot(t["long"], 9), FREE, "a given size"),
    # checks
    ("searchsorted", lambda t: torch.searchsorted(t["x"], t["x"]), FREE, "no check"),
    ("searchsorted_sorter", lambda t: torch.searchsorted(t["x"], t["x"], sorter=t["x"].argsort()), WAITS, "a check"),
    ("bucketize", lambda t: torch.bucketize(t["x"], t["x"]), FREE, "no check"),
    ("segments", lambda t: torch.segment_reduce(t["x"], "sum", lengths=t["lengths"]), WAITS, "a check"),
    ("segments_unsafe", lambda t: torch.segment_reduce(t["x"], "sum", lengths=t["lengths"], unsafe=True), FREE, "none"),
    ("normal", lambda t: torch.normal(t["x"], t["x"]), WAITS, "a check of the deviations"),
    ("normal_of_number", lambda t: torch.normal(0.0, t["x"]), WAITS, "a check of the deviations"),
    ("normal_deviation", lambda t: torch.normal(t["x"], 1.0), FREE, "a number of the host"),
    ("normal_in_place", lambda t: t["x"].clone().normal_(), FREE, "numbers of the host"),
    ("normal_sample", lambda t: Normal(t["x"], t["x"], validate_args=False).sample(), WAITS, "torch.normal"),
    ("normal_rsample", lambda t: Normal(t["x"], t["x"], validate_args=False).rsample(), FREE, "no check"),
    ("validated", lambda t: Normal(t["x"], t["x"], validate_args=True), WAITS, "a check of the arguments"),
    ("categorical", lambda t: Categorical(t["x"], validate_args=False).sample(), FREE, "checks on the device"),
    ("multinomial", lambda t: torch.multinomial(t["x"], 3, replacement=True), FREE, "checks on the device"),
    ("bernoulli", lambda t: torch.bernoulli(t["x"].clamp(0, 1)), FREE, "checks on the device"),
    ("poisson", lambda t: torch.poisson(t["x"]), FREE, "checks on the device"),
    ("randperm", lambda t: torch.randperm(100), FREE, "numbers of the device"),
    ("quantile", lambda t: torch.quantile(t["x"], t["x"][:2].clamp(0, 1)), FREE, "checked on a CPU alone"),
    ("median", lambda t: t["x"].median(), FREE, "a tensor"),
    ("sort", lambda t: t["x"].sort(), FREE, "tensors"),
    ("covariance_weights", lambda t: torch.cov(t["m"], fweights=t["long"][:4]), WAITS, "a check of the weights"),
    ("covariance", lambda t: torch.cov(t["m"]), FREE, "no check"),
    (
        "clip_nonfinite",
        lambda t: nn.utils.clip_grad_norm_(with_grad(t["x"]), 1.0, error_if_nonfinite=True),
        WAITS,
        "a branch on the norm",
    ),
    ("clip", lambda t: nn.utils.clip_grad_norm_(with_grad(t["x"]), 1.0), FREE, "no branch"),
    ("scaler", lambda t: scaled_step(t["x"]), WAITS, "a branch on what is finite"),
    # linear algebra
    ("inv", lambda t: torch.linalg.inv(t["sq"]), WAITS, "an error code"),
    ("inv_ex", lambda t: torch.linalg.inv_ex(t["sq"]), FREE, "a tensor"),
    ("cholesky", lambda t: torch.linalg.cholesky(t["sq"]), WAITS, "an error code"),
    ("cholesky_ex", lambda t: torch.linalg.cholesky_ex(t["sq"]), FREE, "a tensor"),
    ("solve", lambda t: torch.linalg.solve(t["sq"], t["m"]), WAITS, "an error code"),
    ("eigh", lambda t: torch.linalg.eigh(t["sq"]), WAITS, "an error code"),
    ("svd", lambda t: torch.linalg.svd(t["m"]), WAITS, "convergence"),
    ("pinv", lambda t: torch.linalg.pinv(t["m"]), WAITS, "convergence"),
    ("eig", lambda t: torch.linalg.eig(t["m"]), WAITS, "a solver on the host"),
    ("eigvals", lambda t: torch.linalg.eigvals(t["m"]), WAITS, "a solver on the host"),
    ("lstsq", lambda t: torch.linalg.lstsq(t["m"], t["m"]), WAITS, "an error code"),
    ("matrix_exp", lambda t: torch.linalg.matrix_exp(t["m"]), WAITS, "the degree of the series"),
    ("det", lambda t: torch.linalg.det(t["sq"]), FREE, "no check"),
    ("slogdet", lambda t: torch.linalg.slogdet(t["sq"]), FREE, "no check"),
    ("qr", lambda t: torch.linalg.qr(t["m"]), FREE, "no check"),
    ("lu", lambda t: torch.linalg.lu(t["m"]), FREE, "no check"),
    # layers
    ("embedding_max_norm", lambda t: t["capped"](t["long"]), WAITS, "the number of different indices; source"),
    ("embedding", lambda t: t["free"](t["long"]), FREE, "a gather"),
    ("tensor_split", lambda t: t["x"].tensor_split(torch.tensor([1, 3])), FREE, "its indices have to be on the CPU"),
    ("cross_entropy", lambda t: F.cross_entropy(t["m"], t["long"][:4] % 4), FREE, "checks on the device"),
    ("loader", lambda t: list(torch.utils.data.DataLoader(t["x"], batch_size=2, shuffle=True)), FREE, "on the CPU"),
]


def with_grad(x):
    parameter = nn.Parameter(x.clone())
    parameter.grad = torch.ones_like(parameter)
    return [parameter]


def scaled_step(x):
    parameters = with_grad(x)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(x.sum())
    scaler.step(torch.optim.SGD(parameters, lr=0.1))
