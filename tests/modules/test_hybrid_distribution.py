"""Hybrid distributions: densities that integrate to 1, Monte-Carlo against closed form, nodes, TorchRL's interface."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torchrl.modules.distributions.utils import has_analytic_entropy, has_analytic_kl

from torchrl_perf.modules import (
    BoundedNormal,
    DeviceMaskedCategorical,
    DiagonalNormal,
    GumbelCategorical,
    HybridDistribution,
    SquashedNormal,
)
from torchrl_perf.runtime import no_host_sync

F64 = torch.float64
KEYS = {"choice": "kind", "bounded": ("deep", "er", "push"), "free": ("deep", "shift")}
CLASSES = {
    KEYS["choice"]: DeviceMaskedCategorical,
    KEYS["bounded"]: BoundedNormal,
    KEYS["free"]: DiagonalNormal,
}


def make_params(*shape, seed=0, mask=True, valid=None):
    """Parameters of three parts, their keys nested each in its own way."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*shape, *size, generator=generator, dtype=F64)

    td = TensorDict({}, shape[:1])
    choice = {"logits": normal(4)}
    if mask:
        choice["mask"] = torch.tensor([True, False, True, True]).expand(*shape, 4)
    bounded = {"loc": normal(2), "scale": normal(2).exp(), "low": torch.full((*shape, 2), -0.5, dtype=F64)}
    bounded["high"] = torch.full((*shape, 2), 1.5, dtype=F64)
    free = {"loc": normal(3), "scale": normal(3).exp()}
    for key, part in zip(KEYS.values(), (choice, bounded, free), strict=True):
        if valid is not None:
            part["valid"] = valid
        for name, value in part.items():
            td.set((*((key,) if isinstance(key, str) else key), name), value)
    return td


def make_dist(*shape, **options):
    return HybridDistribution(make_params(*shape, **options), CLASSES)


def test_joint_values_are_the_sums_of_torchs():
    p, q = make_dist(6), make_dist(6, seed=1)
    sample = p.sample()
    expected_log_prob, expected_kl = 0.0, 0.0
    allowed = torch.tensor([0, 2, 3])
    cats = [Categorical(logits=d.dists[KEYS["choice"]].logits[:, allowed]) for d in (p, q)]
    position = torch.tensor([0, 0, 1, 2])[sample[KEYS["choice"]]]
    expected_log_prob += cats[0].log_prob(position)
    expected_kl += kl_divergence(*cats)
    frees = [Independent(Normal(d.dists[KEYS["free"]].loc, d.dists[KEYS["free"]].scale), 1) for d in (p, q)]
    expected_log_prob += frees[0].log_prob(sample[KEYS["free"]])
    expected_kl += kl_divergence(*frees)
    pushes = [d.dists[KEYS["bounded"]] for d in (p, q)]
    expected_log_prob += SquashedNormal(pushes[0].loc, pushes[0].scale, -0.5, 1.5).log_prob(sample[KEYS["bounded"]])
    expected_kl += kl_divergence(*(Independent(Normal(d.loc, d.scale), 1) for d in pushes))
    torch.testing.assert_close(p.joint_log_prob(sample), expected_log_prob)
    torch.testing.assert_close(p.joint_kl(q), expected_kl)
    torch.testing.assert_close(kl_divergence(p, q), expected_kl)
    assert (kl_divergence(p, p) == 0).all()
    torch.testing.assert_close(p.joint_entropy(), sum(part.entropy() for part in p.dists.values()))


def test_the_density_integrates_to_one():
    """Over two choices and one bounded component, in the action's own units."""
    n = 20_001
    edges = torch.linspace(-0.5, 1.5, n + 1, dtype=F64)
    action = (edges[1:] + edges[:-1]) / 2
    total = 0.0
    for choice in range(2):
        params = TensorDict({"c": {"logits": torch.tensor([[0.3, -1.0]], dtype=F64).expand(n, 2)}}, [n])
        ones = torch.ones(n, 1, dtype=F64)
        params["x"] = TensorDict({"loc": 0.4 * ones, "scale": 0.8 * ones, "low": -0.5 * ones, "high": 1.5 * ones}, [n])
        dist = HybridDistribution(params, {"c": DeviceMaskedCategorical, "x": BoundedNormal})
        sample = TensorDict({"c": torch.full((n,), choice), "x": action.unsqueeze(-1)}, [n])
        total += dist.joint_log_prob(sample).exp().sum().item() * 2.0 / n
    assert total == pytest.approx(1.0, abs=1e-5)


def test_monte_carlo_against_closed_form():
    p, q = make_dist(1), make_dist(1, seed=1)
    sample = p.sample((100_000,))
    log_p = p.joint_log_prob(sample)
    assert log_p.shape == (100_000, 1)
    spread = log_p.std() / math.sqrt(100_000)
    assert -log_p.mean().item() == pytest.approx(p.joint_entropy().item(), abs=5 * spread.item())
    ratio = log_p - q.joint_log_prob(sample)
    error = 5 * ratio.std().item() / math.sqrt(100_000)
    assert ratio.mean().item() == pytest.approx(p.joint_kl(q).item(), abs=error)


def test_reference_entropy():
    dist = BoundedNormal(torch.zeros(1, 1), torch.full((1, 1), 0.5), 0.0, 0.5)
    assert dist.entropy().item() == pytest.approx(-0.886, abs=5e-4)
    assert DiagonalNormal(torch.zeros(1, 1), torch.ones(1, 1)).entropy().item() == pytest.approx(1.419, abs=5e-4)


@pytest.mark.parametrize("nodes", [(), (5,), (2, 3)])
def test_missing_nodes_count_nothing_and_act_neutrally(nodes):
    shape = (4, *nodes)
    valid = torch.rand(shape) < 0.5
    p, q = make_dist(*shape, valid=valid), make_dist(*shape, seed=1, valid=valid)
    full, other = make_dist(*shape), make_dist(*shape, seed=1)
    sample = p.sample()
    assert (sample[KEYS["choice"]][~valid] == 0).all()
    assert (sample[KEYS["bounded"]][~valid] == 0.5).all()  # the middle of [-.5, 1.5]
    assert (sample[KEYS["free"]][~valid] == 0).all()
    assert (p.deterministic_sample[KEYS["bounded"]][~valid] == 0.5).all()
    keep = valid.double()

    def summed(values):
        return sum((value * keep).flatten(1).sum(-1) if nodes else value * keep for value in values)

    # what the missing rows say, were they looked at, is finite here
    torch.testing.assert_close(p.joint_log_prob(sample), summed(full.part_log_probs(sample.clone()).values()))
    torch.testing.assert_close(p.joint_entropy(), summed(full.part_entropies().values()))
    kl = [kl_divergence(part, other.dists[key]) for key, part in full.dists.items()]
    torch.testing.assert_close(p.joint_kl(q), summed(kl))


def test_nothing_of_a_missing_node_reaches_the_others():
    valid = torch.tensor([[True, False, True]])
    params = make_params(1, 3, valid=valid).apply(
        lambda x: x.clone().index_fill_(1, torch.tensor([1]), torch.nan) if x.is_floating_point() else x
    )
    for name in ("low", "high"):  # a bound is a constant
        params[(*KEYS["bounded"], name)] = make_params(1, 3)[(*KEYS["bounded"], name)]
    for leaf in params.values(True, True):
        if leaf.is_floating_point():
            leaf.requires_grad_()
    dist = HybridDistribution(params, CLASSES)
    sample = dist.sample()
    sample[KEYS["free"]][:, 1] = torch.nan
    value = dist.joint_log_prob(sample) + dist.joint_entropy() + dist.joint_kl(make_dist(1, 3, seed=1, valid=valid))
    assert value.isfinite().all()
    value.sum().backward()
    for key, leaf in params.items(True, True):
        if leaf.is_floating_point() and key[-1] not in ("low", "high"):
            assert leaf.grad.isfinite().all(), key
            assert (leaf.grad[:, 1] == 0).all(), key


def test_a_row_without_choices_is_defined():
    logits = torch.randn(2, 3, requires_grad=True)
    dist = DeviceMaskedCategorical(logits, torch.tensor([[False] * 3, [False, True, True]]))
    assert dist.sample()[0] == 0
    assert dist.mode[0] == 0
    assert dist.log_prob(torch.tensor([0, 1]))[0] == 0
    assert dist.entropy()[0] == 0
    dist.entropy().sum().backward()
    assert (logits.grad[0] == 0).all()


def test_choices_that_are_not_allowed_are_never_drawn():
    logits = torch.tensor([0.0, 9.0, 1.0, -1.0])
    dist = DeviceMaskedCategorical(logits, torch.tensor([True, False, True, True]))
    draws = dist.sample((30_000,))
    counts = torch.bincount(draws, minlength=4).double()
    expected = 30_000 * dist.logits.exp().double()
    assert counts[1] == 0
    kept = [0, 2, 3]
    assert ((counts - expected)[kept].square() / expected[kept]).sum() < 13.8  # 2 degrees of freedom, p = 0.001
    assert dist.log_prob(torch.tensor(1)) == -torch.inf


def test_torchrl_finds_the_closed_forms():
    p, q = make_dist(3), make_dist(3, seed=1)
    assert has_analytic_kl(p, q)
    for part in p.dists.values():
        assert has_analytic_entropy(part)
    assert has_analytic_kl(SquashedNormal(torch.zeros(1, 2), torch.ones(1, 2)), p.dists[KEYS["bounded"]])


def test_names_of_log_probabilities_are_torchrls():
    dist = make_dist(3)
    sample = dist.sample()
    log_probs = dist.log_prob(sample.clone())
    assert set(log_probs.keys(True, True)) == {
        "kind_log_prob",
        ("deep", "er", "push_log_prob"),
        ("deep", "shift_log_prob"),
    }
    assert set(dist.entropy().keys(True, True)) == {
        "kind_entropy",
        ("deep", "er", "push_entropy"),
        ("deep", "shift_entropy"),
    }
    total = sum(value for value in log_probs.values(True, True))
    torch.testing.assert_close(total, dist.joint_log_prob(sample))


def test_gumbel_categoricals_diverge_without_a_host_read():
    p, q = (GumbelCategorical(torch.randn(5, 3, dtype=F64)) for _ in range(2))
    with no_host_sync():
        kl = kl_divergence(p, q)
    torch.testing.assert_close(kl, kl_divergence(Categorical(logits=p.logits), Categorical(logits=q.logits)))


def test_no_host_read(device):
    params = make_params(4, 3, valid=torch.rand(4, 3) < 0.5).to(device)
    other = make_params(4, 3, seed=1, valid=params[KEYS["choice"], "valid"]).to(device)
    with no_host_sync(device):
        dist = HybridDistribution(params, CLASSES)
        sample = dist.rsample()
        dist.joint_log_prob(sample), dist.joint_entropy(), dist.joint_kl(HybridDistribution(other, CLASSES))
        _ = dist.deterministic_sample


def test_expand():
    for part in make_dist(2, valid=torch.tensor([True, False])).dists.values():
        wide = part.expand((5, 2))
        assert wide.sample().shape[:2] == (5, 2)
        torch.testing.assert_close(wide.entropy(), part.entropy().expand(5, 2))


def test_other_parts_are_refused():
    p = make_dist(2)
    q = HybridDistribution.of_parts({"kind": p.dists["kind"]}, p.batch_shape)
    with pytest.raises(ValueError, match=r"expected the parts .*received \['kind'\]"):
        p.joint_kl(q)
