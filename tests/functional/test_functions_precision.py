"""Every public function in each precision: its result is the float64 one on the rounded inputs, rounded once."""

import importlib
import inspect
import pkgutil
import zlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_perf import functional
from torchrl_perf.functional import (
    advantages,
    atoms,
    chain,
    components,
    exploration,
    implicit,
    masked,
    members,
    mlp,
    moments,
    n_step,
    polyak,
    pooling,
    priority_tree,
    scan,
    schedules,
)
from torchrl_perf.functional.losses import (
    distributional,
    dqn,
    elbo,
    hybrid,
    icm,
    information,
    options,
    ppo,
    risk,
    sac,
)
from torchrl_perf.functional.rows import copies, missing, nonfinite, selection, valid

# the package has the function of that name
coloured = importlib.import_module("torchrl_perf.functional.coloured_noise")
N, T, D, K = 6, 200, 5, 7
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def normal(name, *shape):
    """Standard normal numbers that belong to a name, float64."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def positive(name, *shape):
    return normal(name, *shape).abs() + 0.3


def unit(name, *shape):
    return normal(name, *shape).sigmoid()


def flags(name, *shape, share=0.1):
    return unit(name, *shape) < torch.tensor(share, dtype=torch.float64).logit().sigmoid()


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


MASK = flags("mask", N, D, share=0.6) | (torch.arange(D) == 0)
DONE = flags("done", N, T, 1, share=0.02)
START = flags("start", N, T, share=0.1)


def series(c):
    return c(normal("value", N, T, 1)), c(normal("next", N, T, 1)), c(normal("reward", N, T, 1))


def log_probs(name):
    return normal(name, N, D).log_softmax(-1).masked_fill(~MASK, -torch.inf)


def tree(c):
    words = torch.zeros(2 * priority_tree.FAN_OUT, dtype=torch.int64)
    weight, _ = priority_tree.priority_weight(c(positive("priority", 100)), c(scalar(0.7)))
    priority_tree.write_leaves_(words, torch.arange(100), weight)
    sums, minima = torch.zeros(2, dtype=torch.float64), torch.zeros(2)
    priority_tree.refresh_nodes_(words, sums, minima)
    return words, sums, minima


def polyak_case(c):
    target, source = c(normal("target", N, D)).clone(), c(normal("source", N, D))
    polyak.polyak_update_([target], [source], c(scalar(0.05)))
    return target


def copy_case(c):
    target = c(normal("target", N))
    copies.copy_all_([target], [normal("source", N)])
    return target


def in_place_case(c):
    value = c(normal("value", N, T, 1)).to(torch.promote_types(c(scalar(1.0)).dtype, torch.float32))
    return scan.scan_in_place(0.9, DONE, value, 1, reverse=True)


def network(c, *shapes):
    return [c(normal(f"weight {number}", *shape) / 3) for number, shape in enumerate(shapes)]


def sensitivity(c):
    return c(normal("sensitivity", N, 4, 2, 3)), c(positive("variance", N, 4, 2))


def covariance(c):
    root = normal("root", 3, 3)
    return c(root @ root.mT + torch.eye(3, dtype=torch.float64))


KEPT = flags("kept", N, share=0.6) | (torch.arange(N) == 0)

CASES = {
    "sac.critic_rows": lambda c: sac.critic_rows(c(normal("value", N, 2)), c(normal("target", N)), "smooth_l1"),
    "valid.kept": lambda c: valid.kept(c(normal("value", N, D)), KEPT),
    "valid.finite_where_absent": lambda c: valid.finite_where_absent(c(normal("value", N, D)), KEPT),
    "valid.valid_mean": lambda c: valid.valid_mean(c(normal("value", N, D)), KEPT),
    "valid.reduced": lambda c: valid.reduced(c(normal("value", N)), KEPT, "mean", c(positive("weight", N))),
    "valid.explained_variance": lambda c: valid.explained_variance(
        c(100 * normal("target", N, D)), c(100 * normal("value", N, D)), KEPT
    ),
    "missing.stand_in": lambda c: missing.stand_in(c(normal("next", N, D)), c(normal("root", N, D)), KEPT, 1),
    "missing.stand_in_rows": lambda c: missing.stand_in_rows(c(normal("next", N, D)), c(normal("root", N, D)), KEPT, 1),
    "advantages.generalized_advantage_estimate": lambda c: advantages.generalized_advantage_estimate(
        c(scalar(0.97)), 0.95, *series(c), DONE, DONE & START.unsqueeze(-1)
    ),
    "advantages.td_lambda_targets": lambda c: advantages.td_lambda_targets(
        c(scalar(0.97)), c(scalar(0.95)), *series(c)[1:], DONE
    ),
    "advantages.vtrace_advantage_estimate": lambda c: advantages.vtrace_advantage_estimate(
        c(scalar(0.97)), c(-positive("pi", N, T, 1)), c(-positive("mu", N, T, 1)), *series(c), DONE,
        rho_thresh=c(scalar(0.9)),
    ),
    "atoms.duel": lambda c: atoms.duel(c(normal("streams", N, (1 + D) * K)), D),
    "atoms.atom_means": lambda c: atoms.atom_means(
        c(normal("streams", N, (1 + D) * K)), c(normal("support", K)), D, dueling=True
    ),
    "coloured_noise.coloured_noise": lambda c: coloured.coloured_noise(c(normal("white", N, 12)), 1.0),
    "coloured_noise.coloured_gains": lambda c: coloured.coloured_gains(12, 1.0, dtype=c(scalar(1.0)).dtype),
    "coloured_noise.coloured_filter": lambda c: coloured.coloured_filter(12, 1.0, dtype=c(scalar(1.0)).dtype),
    "components.weighted_sum": lambda c: components.weighted_sum(c(normal("parts", N, D)), c(normal("w", D))),
    "components.standardized_components": lambda c: components.standardized_components(c(normal("parts", N, D) + 9)),
    "copies.copy_all_": copy_case,
    "distributional.categorical_projection": lambda c: distributional.categorical_projection(
        c(normal("p", N, K).softmax(-1)), c(normal("reward", N)), c(unit("discount", N)),
        c(torch.arange(K, dtype=torch.float64)),
    ),
    "distributional.quantile_huber_loss": lambda c: distributional.quantile_huber_loss(
        c(normal("quantiles", N, K)), c(normal("targets", N, D)), c(unit("taus", N, K)), 0.7
    ),
    "dqn.action_value": lambda c: dqn.action_value(c(normal("q", N, D)), torch.arange(N) % D),
    "dqn.q_targets": lambda c: dqn.q_targets(
        c(normal("reward", N)), DONE[:, 0, 0], c(scalar(0.97)), c(normal("q", N, D)), action_mask=MASK
    ),
    "dqn.q_loss": lambda c: dqn.q_loss(c(normal("q", N) * 3), c(normal("target", N)), "huber", c(positive("w", N))),
    "elbo.decayed_weights": lambda c: elbo.decayed_weights(5, dtype=c(scalar(1.0)).dtype),
    "elbo.gaussian_kl": lambda c: elbo.gaussian_kl(
        c(normal("q", N, D)), c(positive("vq", N, D)), c(normal("p", N, D)), c(positive("vp", N, D))
    ),
    "elbo.gaussian_log_likelihood": lambda c: elbo.gaussian_log_likelihood(
        c(normal("y", N, D)), c(normal("m", N, D)), c(positive("v", D))
    ),
    "elbo.poisson_log_likelihood": lambda c: elbo.poisson_log_likelihood(
        c(torch.arange(N * D, dtype=torch.float64).view(N, D)), c(normal("rate", N, D))
    ),
    "elbo.masked_latent": lambda c: elbo.masked_latent(MASK.long(), c(normal("a", N, D)), c(normal("b", N, D))),
    "elbo.beta_at": lambda c: elbo.beta_at(torch.arange(900), "cyclic", beta=c(scalar(0.3)), anneal=300),
    "exploration.ou_step": lambda c: exploration.ou_step(
        c(normal("x", N, D)), c(normal("noise", N, D)), theta=0.15, sigma=c(scalar(0.3)),
        mean=c(normal("mean", D)), dt=0.1,
    ),
    "exploration.factor_noise": lambda c: exploration.factor_noise(c(normal("noise", N))),
    "exploration.bounded_gaussian": lambda c: exploration.bounded_gaussian(
        c(normal("a", N, D)), c(normal("noise", N, D)), c(scalar(0.3)), c(-positive("low", D)), c(positive("high", D))
    ),
    "hybrid.normal_log_prob": lambda c: hybrid.normal_log_prob(
        c(normal("x", N, D)), c(normal("loc", N, D)), c(positive("scale", N, D))
    ),
    "hybrid.normal_entropy": lambda c: hybrid.normal_entropy(c(positive("scale", N, D))),
    "hybrid.normal_kl": lambda c: hybrid.normal_kl(
        c(normal("a", N, D)), c(positive("b", N, D)), c(normal("c", N, D)), c(positive("d", N, D))
    ),
    "hybrid.squash_log_jacobian_mean": lambda c: hybrid.squash_log_jacobian_mean(
        c(normal("a", N)), c(positive("b", N))
    ),
    "hybrid.squashed_normal_entropy": lambda c: hybrid.squashed_normal_entropy(
        c(normal("a", N, D)), c(positive("b", N, D)), c(-positive("low", D)), c(positive("high", D))
    ),
    "hybrid.present": lambda c: hybrid.present(c(normal("x", N)), MASK[:, 1]),
    "hybrid.sum_to": lambda c: hybrid.sum_to(c(normal("x", N, D)), 1),
    "hybrid.expected_soft_value": lambda c: hybrid.expected_soft_value(
        c(normal("q", N, D)), c(log_probs("policy")), c(scalar(0.2))
    ),
    "icm.forward_error": lambda c: icm.forward_error(c(normal("a", N, D)), c(normal("b", N, D))),
    "icm.intrinsic_reward": lambda c: icm.intrinsic_reward(
        c(normal("a", N, D)), c(normal("b", N, D)), c(scalar(0.006))
    ),
    "icm.inverse_error": lambda c: icm.inverse_error(c(normal("a", N, D)), torch.arange(N) % D, discrete=True),
    "icm.inverse_accuracy": lambda c: icm.inverse_accuracy(c(normal("a", N, D)), torch.arange(N) % D),
    "implicit.implicit_mean": lambda c: implicit.implicit_mean(
        c(normal("psi", N, 4)), c(normal("phi", K, 4)), network(c, (4, 4), (4,), (2, 4), (2,))
    ),
    "information.discount_weights": lambda c: information.discount_weights(300, 0.97, dtype=c(scalar(1.0)).dtype),
    "information.discounted_return": lambda c: information.discounted_return(c(positive("r", N, T)), 0.97),
    "information.fisher_diagonal": lambda c: information.fisher_diagonal(*sensitivity(c), discount=0.97),
    "information.fisher_matrix": lambda c: information.fisher_matrix(*sensitivity(c), discount=0.97),
    "information.a_optimality": lambda c: information.a_optimality(c(positive("i", N, D)), c(scalar(0.5))),
    "information.d_optimality": lambda c: information.d_optimality(c(positive("i", N, D)), c(scalar(0.5))),
    "information.embedding_information_gain": lambda c: information.embedding_information_gain(
        covariance(c), covariance(c)
    ),
    "information.information_gain": lambda c: information.information_gain(
        covariance(c), *sensitivity(c), discount=0.9
    ),
    "information.ensemble_disagreement": lambda c: information.ensemble_disagreement(c(normal("members", K, N, D) + 9)),
    "masked.chosen": lambda c: masked.chosen(c(normal("x", N, D)), torch.arange(N).unsqueeze(-1) % D),
    "masked.masked_log_softmax": lambda c: masked.masked_log_softmax(c(normal("logits", N, D)), MASK),
    "masked.masked_expectation": lambda c: masked.masked_expectation(c(log_probs("p")), c(normal("x", N, D))),
    "masked.masked_entropy": lambda c: masked.masked_entropy(c(log_probs("p"))),
    "masked.masked_kl": lambda c: masked.masked_kl(c(log_probs("p")), c(log_probs("q"))),
    "members.members": lambda c: members.members(
        c(normal("x", 2, N, 3)), [network(c, (2, 3, 4), (2, 4, 1)), network(c, (2, 1, 4), (2, 1, 1))]
    ),
    "chain.chain": lambda c: chain.chain(c(normal("x", N, 4)), network(c, (4, 4), (4,), (2, 4), (2,))),
    "mlp.mlp": lambda c: mlp.mlp(c(normal("x", N, 4)), network(c, (4, 4), (4,), (4, 4), (4,), (2, 4), (2,))),
    "moments.moments_of": lambda c: moments.moments_of(c(normal("x", N, T, D) + 9), DONE[..., 0]),
    "moments.merged_moments": lambda c: moments.merged_moments(
        moments.moments_of(c(normal("x", T, D) + 9)), moments.moments_of(c(normal("y", N, D)))
    ),
    "n_step.n_step_window": lambda c: n_step.n_step_window(
        c(positive("r", N, T)), DONE[..., 0], torch.full((N,), T), c(scalar(0.97))
    ),
    "n_step.n_step_targets": lambda c: n_step.n_step_targets(
        c(positive("r", N, T, 1)), DONE, n=20, gamma=c(scalar(0.97))
    ),
    "nonfinite.count_nonfinite": lambda c: nonfinite.count_nonfinite(c(log_probs("p"))),
    "nonfinite.first_nonfinite": lambda c: nonfinite.first_nonfinite(c(log_probs("p"))),
    "nonfinite.finite_rows": lambda c: nonfinite.finite_rows([c(log_probs("p"))]),
    "options.time_hazard": lambda c: options.time_hazard(
        torch.arange(300), hazard_min=c(scalar(3.0)), hazard_max=c(scalar(256.0)), steepness=c(scalar(0.7)), cap=0.9
    ),
    "options.option_segments": lambda c: options.option_segments(
        START, DONE[..., 0], c(positive("r", N, T)), c(scalar(0.97)), options.no_option(c(normal("like", N)))
    ),
    "options.no_option": lambda c: options.no_option(c(normal("like", N))),
    "options.smdp_target": lambda c: options.smdp_target(
        c(normal("r", N)), c(unit("d", N)), DONE[:, 0, 0], c(normal("v", N))
    ),
    "options.arrival_value": lambda c: options.arrival_value(
        c(normal("q", N, D)), torch.arange(N) % D, c(unit("beta", N)), MASK
    ),
    "options.masked_mean": lambda c: options.masked_mean(c(normal("x", N, T) + 9), c(unit("w", N, T))),
    "options.masked_standardize": lambda c: options.masked_standardize(c(normal("x", N, D) + 9), MASK),
    "polyak.polyak_update_": polyak_case,
    "pooling.masked_mean": lambda c: pooling.masked_mean(c(normal("x", N, D, 3)), MASK),
    "pooling.masked_max": lambda c: pooling.masked_max(c(normal("x", N, D, 3)), MASK),
    "pooling.masked_attention": lambda c: pooling.masked_attention(
        c(normal("query", N, 2, 3)), c(normal("keys", N, D, 2, 3)), c(normal("values", N, D, 2, 4)), MASK
    ),
    "ppo.normalized_advantage": lambda c: ppo.normalized_advantage(c(normal("x", N, D) + 9)),
    "ppo.clipped_surrogate": lambda c: ppo.clipped_surrogate(c(normal("ratio", N) / 5), c(normal("a", N)), -0.2, 0.18),
    "priority_tree.priority_weight": lambda c: priority_tree.priority_weight(
        c(positive("priority", 100)), c(scalar(0.7)), 1e-6
    ),
    "priority_tree.write_leaves_": lambda c: priority_tree.leaf_weights(tree(c)[0]),
    "priority_tree.refresh_nodes_": lambda c: tree(c)[1:],
    "priority_tree.importance_weight": lambda c: priority_tree.importance_weight(
        c(positive("weight", N)), c(scalar(0.25)), c(scalar(0.4))
    ),
    "risk.cvar": lambda c: risk.cvar(c(unit("taus", N, K)), c(scalar(0.3))),
    "risk.wang": lambda c: risk.wang(c(unit("taus", N, K)), c(scalar(-0.7))),
    "risk.power": lambda c: risk.power(c(unit("taus", N, K)), c(scalar(-0.7))),
    "risk.distort": lambda c: risk.distort(c(unit("taus", N, K)), c(unit("eta", N, 1)), "wang"),
    "risk.distorted_mass": lambda c: risk.distorted_mass(
        c(normal("p", N, K).softmax(-1).cumsum(-1)), c(scalar(0.3)), "power"
    ),
    "sac.weighted_mean": lambda c: sac.weighted_mean(c(normal("x", T) + 9), c(positive("w", T))),
    "sac.soft_target": lambda c: sac.soft_target(
        c(normal("r", N)), DONE[:, 0, 0], c(normal("v", N, 2)), c(normal("lp", N)), c(scalar(0.2)), c(scalar(0.97))
    ),
    "scan.reverse_linear_recurrence": lambda c: scan.reverse_linear_recurrence(
        c(scalar(0.97)), c(positive("x", N, T, 1))
    ),
    "scan.linear_recurrence": lambda c: scan.linear_recurrence(
        c(unit("decay", N, T, 1)), c(positive("x", N, T, 1)), c(normal("initial", N, 1))
    ),
    "scan.scan_in_place": in_place_case,
    "schedules.adaptive": lambda c: tuple(
        schedules.adaptive(c(scalar(1e-3)), c(scalar(kl)), c(scalar(0.01)), 1e-5, 1e-2) for kl in (0.1, 0.001, 0.01)
    ),
    "schedules.elapsed": lambda c: schedules.elapsed(torch.arange(300), c(scalar(256.0))),
    "schedules.linear": lambda c: schedules.linear(torch.arange(300), c(scalar(1.0)), c(scalar(0.1)), c(scalar(256.0))),
    "schedules.exponential": lambda c: schedules.exponential(torch.arange(300), c(scalar(1.0)), c(scalar(0.1)), 256),
    "selection.leftmost_k": lambda c: selection.leftmost_k(c(normal("key", N, D)), MASK, 2),
    "selection.rank_by_counting": lambda c: selection.rank_by_counting(c(normal("key", N, D)), MASK),
}  # fmt: skip

ELSEWHERE = {
    "of integers, flags, shapes or Python numbers alone": {
        "distributional.check_kappa", "distributional.return_bounds", "distributional.check_support",
        "distributional.midpoints", "elbo.linked", "exploration.ou_factors", "masked.effective_mask", "masked.of_rows",
        "masked.of_agents", "masked.mask_of_indices", "nonfinite.repaired_rows", "permutation.feistel_permutation",
        "permutation.random_permutation", "priority_tree.row_age", "risk.check_risk", "scan.describe",
        "scan.resolve_time_dim", "scan.to_rows", "scan.from_rows", "scan.needs_functional", "shuffle.shuffled_index",
        "windows.run_lengths", "missing.missing_rows", "missing.steps_without_successor", "valid.fitted_rows",
        "permutation.mix", "parts.divisor", "parts.longest_part", "parts.part_size", "parts.splits",
        "valid.spread", "atoms.fusable", "mlp.fusable", "implicit.fusable",
        "chain.runs_as_chain", "chain.chain_tiles", "resident.stays_on_chip",
    },
    "draws, tested by their frequencies": {
        "masked.gumbel_argmax", "elbo.temporal_mask", "priority_tree.draw_leaves", "priority_tree.uniform_rows",
    },
    "float32 by contract": {
        "atoms.fused_atom_means", "chain.fused_chain", "resident.resident_chain", "mlp.fused_mlp",
        "twice.graphed_gradients",
        "narrow.narrow_layer", "narrow.runs_as_narrow",
        "implicit.fused_implicit_mean", "priority_tree.leaf_weights",
        "priority_tree.node_values", "scan.log_scan",
    },
    "of parameters and moments, tested with the optimisers": {
        "adam.adam_step_", "adam.adam_steps_", "adam.bias_corrections", "adam.exact_copy_", "adam.widest_dtype",
        "adam.fused_adam_steps_", "adam.gradient_norms",
    },
    "recurrences, rounded at each step to the dtype of their weights, in test_memory_functions.py": {
        "gru.gru_step", "gru.gru_cell", "gru.gru_sequence", "lstm.lstm_step", "lstm.lstm_cell", "lstm.lstm_sequence",
        "linear.scan", "linear.rotations",
        "linear.min_gru_candidate", "linear.min_gru_step", "linear.min_gru_sequence", "linear.lru_step",
        "linear.min_gru_cell", "linear.min_gru_slopes", "linear.came_back", "linear.came_back_differentiable",
        "min_gru_layer.min_gru_layer", "rows.refuse_second_gradients", "rows.dense",
        "linear.lru_sequence", "rows.time_major", "rows.env_major", "rows.keeps_gates", "rows.add_bias",
        "rows.grad_or_none", "rows.takes_one_launch",
    },
    "of tensors that the caller has widened, in test_parts.py": {
        "parts.mean_of_all", "parts.sum_of_all", "parts.moments_of_all", "parts.joined_in_parts",
    },
    "float64 by contract, in test_ranks.py": {"ppo.advantage_summary", "ppo.merged_summary", "ppo.normalized_by"},
    "the rule itself": {
        "wide.wide_dtype", "wide.widened", "wide.compute_dtype", "wide.result_dtype", "wide.computed_wide",
        "wide.outside_autocast",
    },
}  # fmt: skip

NETWORKS = {"chain.chain", "members.members", "mlp.mlp", "implicit.implicit_mean"}
"""Layers of a network, which run in the dtype of their weights."""

FLOAT32_TREE = {"priority_tree.priority_weight", "priority_tree.write_leaves_", "priority_tree.refresh_nodes_",
                "priority_tree.importance_weight"}  # fmt: skip
SCHEDULES = {name for name in CASES if name.startswith("schedules.")} | {"elbo.beta_at", "icm.inverse_accuracy"}


def flat(result):
    return [part for value in result for part in flat(value)] if isinstance(result, tuple | list) else [result]


def assert_rounded_once(name, received, expected, *, networks=0.0):
    """Equal to float64 within float32's accuracy and one rounding to the dtype of the result."""
    received, expected = flat(received), flat(expected)
    assert len(received) == len(expected)
    for got, right in zip(received, expected, strict=True):
        if not got.is_floating_point():
            assert torch.equal(got, right), name
            continue
        finite = right.isfinite()
        assert torch.equal(got.isfinite(), finite), name
        size, eps = right.double()[finite].abs(), torch.finfo(got.dtype).eps
        error = (got.double() - right.double())[finite].abs()
        # what is below the normal range of float16 is rounded to its steps
        steps = 2.0**-25 if got.dtype == torch.float16 else 0.0
        allowed = size * eps / 2 + size.max().clamp_min(1e-3) * (4e-6 + networks) + steps
        assert (error <= allowed).all(), (name, error.max(), size.max())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_result_is_that_of_float64_rounded_once(name, precision):
    dtype = DTYPES[precision]
    received = CASES[name](lambda x: x.to(dtype))
    expected = CASES[name](lambda x: x.to(dtype).double())
    assert_rounded_once(name, received, expected, networks=0.02 if name in NETWORKS and dtype.itemsize == 2 else 0.0)


@pytest.mark.parametrize("name", sorted(set(CASES) - NETWORKS))
def test_autocast_changes_nothing_but_networks(name):
    plain = CASES[name](lambda x: x.float())
    with torch.autocast("cpu", torch.bfloat16):
        inside = CASES[name](lambda x: x.float())
    for a, b in zip(flat(plain), flat(inside), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class FloatsSeen(TorchDispatchMode):
    """The operations that compute floating-point numbers of some dtypes."""

    moves = ("_to_copy", "view", "expand", "slice", "select", "cat", "stack", "where", "gather", "index", "masked_fill",
             "clone", "copy", "detach", "alias", "unsqueeze", "squeeze", "transpose", "t.", "permute", "unbind",
             "split", "sort",
             "amax", "amin", "empty", "zeros", "full", "new_", "ones", "reshape", "unfold", "constant_pad",
             "narrow", "_local", "lift", "abs", "sign", "clamp", "lift_fresh", "as_strided")  # fmt: skip

    def __init__(self, *dtypes):
        super().__init__()
        self.dtypes, self.seen = dtypes, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        if not name.startswith(self.moves):
            floats = [x for x in flat(out) if isinstance(x, torch.Tensor) and x.dtype in self.dtypes]
            if floats:
                self.seen.add(name)
        return out


@pytest.mark.parametrize("name", sorted(set(CASES) - NETWORKS - FLOAT32_TREE - SCHEDULES))
def test_float64_stays_float64_throughout(name):
    with FloatsSeen(torch.float32, torch.bfloat16, torch.float16) as watch:
        result = CASES[name](lambda x: x.double())
    assert not watch.seen
    assert all(part.dtype == torch.float64 for part in flat(result) if part.is_floating_point())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(set(CASES) - NETWORKS - {"hybrid.sum_to"}))
def test_nothing_is_computed_in_half_precision(name, dtype):
    """One sum over dims is exempt: its kernel adds up in float32."""
    with FloatsSeen(torch.bfloat16, torch.float16) as watch:
        CASES[name](lambda x: x.to(dtype))
    assert not watch.seen


def test_every_public_function_has_a_case():
    public = set()
    for info in pkgutil.walk_packages(functional.__path__, "torchrl_perf.functional."):
        module = importlib.import_module(info.name)
        public |= {
            f"{info.name.rpartition('.')[2]}.{name}"
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        }
    elsewhere = set().union(*ELSEWHERE.values())
    assert public == set(CASES) | elsewhere, "add a new function to CASES, or to ELSEWHERE with its reason"
    assert not set(CASES) & elsewhere


class TestKnownValues:
    @pytest.mark.parametrize("gamma", [torch.tensor(0.97, dtype=torch.bfloat16), torch.tensor([0.97]).bfloat16()])
    @pytest.mark.parametrize("lmbda", [0.95, torch.tensor(0.95, dtype=torch.float64), torch.tensor(0.95)])
    def test_a_discount_of_bfloat16(self, gamma, lmbda):
        """``sum_(t < 200) (gamma lambda)^t`` with gamma = .96875, the bfloat16 next to .97."""
        zero = torch.zeros(1, 200, 1)
        no = zero.bool()
        right = sum((0.96875 * 0.95) ** t for t in range(200))
        assert right == pytest.approx(12.549, abs=1e-3)
        advantage, _ = advantages.generalized_advantage_estimate(gamma, lmbda, zero, zero, zero + 1, no)
        assert advantage[0, 0, 0].item() == pytest.approx(right, rel=1e-5)
        target = advantages.td_lambda_targets(gamma, lmbda, zero, zero + 1, no)
        assert target[0, 0, 0].item() == pytest.approx(right, rel=1e-5)

    def test_a_float64_discount_does_not_widen_values(self):
        zero = torch.zeros(1, 20, 1)
        discount = torch.tensor(0.97, dtype=torch.float64)
        advantage, _ = advantages.generalized_advantage_estimate(discount, 0.95, zero, zero, zero + 1, zero.bool())
        assert advantage.dtype == torch.float32

    def test_options_longer_than_half_precision_counts(self):
        """300 steps of reward 1: the 257th exponent is no bfloat16 number."""
        start = torch.zeros(1, 301, dtype=torch.bool)
        start[0, 0] = start[0, 300] = True
        reward = torch.ones(1, 301, dtype=torch.bfloat16)
        segments, _ = options.option_segments(start, start & False, reward, 0.999, options.no_option(reward[:, 0]))
        assert segments.returns[0, 300].item() == pytest.approx((1 - 0.999**300) / 0.001, rel=1e-5)

    @pytest.mark.parametrize("tau", [0.005, torch.tensor(0.005), torch.tensor(0.005, dtype=torch.float64)])
    @pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
    def test_a_target_of_other_dtype_than_its_source(self, tau, source):
        target = torch.zeros(3)
        polyak.polyak_update_([target], [torch.ones(3, dtype=source)], tau)
        assert torch.allclose(target, torch.full((3,), 0.005))

    def test_priorities_of_half_precision(self):
        weight, usable = priority_tree.priority_weight(torch.tensor([3.0, 0.0, -1.0, torch.nan]).half(), 0.5, 1e-6)
        assert weight.dtype == torch.float32
        assert usable.tolist() == [True, True, False, False]
        assert weight[0].item() == pytest.approx(3.000001**0.5, rel=1e-6)

    def test_uniform_numbers_of_float32_draw_from_a_tree(self):
        words, sums, _ = tree(lambda x: x)
        uniform = torch.rand(1000, generator=torch.Generator().manual_seed(0))
        for count in (1, 1000):
            drawn = priority_tree.draw_leaves(words, sums, uniform[:count])
            same = priority_tree.draw_leaves(words, sums, uniform[:count].double())
            assert all(torch.equal(a, b) for a, b in zip(drawn, same, strict=True))

    @pytest.mark.parametrize("precision", DTYPES)
    def test_a_temporal_mask_keeps_its_share(self, precision):
        torch.manual_seed(0)
        kept = elbo.temporal_mask(1_000_000, rate=0.999, dtype=DTYPES[precision]).double().sum().item()
        assert kept == pytest.approx(1000, abs=5 * 1000**0.5)


EQUAL = [(12_345.678, 4_096), (5.1, 7), (-0.1, 3), (1e-30, 100), (3e4, 2), (7.7, 1)]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("number", "count"), EQUAL)
class TestEqualNumbersStandardise:
    def test_to_zero(self, number, count, precision):
        values = torch.full((count,), number, dtype=DTYPES[precision])
        zero = torch.zeros_like(values)
        assert torch.equal(ppo.normalized_advantage(values), zero)
        assert torch.equal(options.masked_standardize(values, zero == 0), zero)
        assert torch.equal(components.standardized_components(values.unsqueeze(-1)), zero.unsqueeze(-1))

    def test_to_zero_under_a_mask(self, number, count, precision):
        """Masked elements differ, and one of them is NaN."""
        values = torch.full((2 * count + 1,), number, dtype=DTYPES[precision])
        values[::2] = torch.arange(count + 1).to(values.dtype)
        values[0] = torch.nan
        mask = torch.arange(2 * count + 1) % 2 == 1
        assert torch.equal(options.masked_standardize(values, mask), torch.zeros_like(values))


class TestStandardising:
    def test_unequal_numbers_are_not_equal(self):
        values = torch.tensor([5.1] * 6 + [5.2])
        for standardise in (ppo.normalized_advantage, lambda x: options.masked_standardize(x, x > 0)):
            assert torch.allclose(standardise(values), (values - values.mean()) / values.std(), atol=1e-4)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_bad_numbers_are_not_hidden(self, bad):
        values = torch.full((4,), bad)
        assert ppo.normalized_advantage(values).isnan().all()
        assert options.masked_standardize(values, values == values).isnan().all() or bad != bad
        assert components.standardized_components(values.unsqueeze(-1)).isnan().all()

    def test_nothing(self):
        empty = torch.zeros(0, 3)
        assert options.masked_standardize(empty, empty > 0).shape == (0, 3)
        assert torch.equal(options.masked_standardize(torch.ones(3), torch.zeros(3) > 0), torch.zeros(3))
