"""Distributions in each precision: draws, their log-probabilities, and the interface of torch's classes."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, InteractionType
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, MaskedCategorical, TanhNormal

from torchrl_perf.modules import (
    BoundedNormal,
    DeviceActor,
    DeviceMaskedCategorical,
    DiagonalNormal,
    GumbelCategorical,
    HybridDistribution,
    IndependentCategoricals,
    OptionController,
    OptionNormal,
    OptionSet,
    SquashedNormal,
    SquashedNormalHead,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
HALF = DTYPES[:2]
DRAWS = 1_000_000
LOGITS = torch.tensor([0.0, -1.3, 2.1, 0.7, -3.3, 1.1, 0.01, -0.4])
MASK = torch.tensor([True, True, False, True, True, False, True, True])


def eps(dtype):
    return torch.finfo(dtype).eps


def assert_drawn(sample, probs):
    """A chi-square test of choices against probabilities; impossible ones are never drawn."""
    counts = torch.bincount(sample.reshape(-1), minlength=len(probs)).double()
    probs = probs.double()
    assert counts[probs == 0].sum() == 0
    expected = (probs * counts.sum())[probs > 0]
    statistic = ((counts[probs > 0] - expected).square() / expected).sum()
    freedom = max(len(expected) - 1, 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)


def exact(logits, mask=None):
    wide = logits.double()
    return (wide if mask is None else wide.masked_fill(~mask, -torch.inf)).log_softmax(-1)


CATEGORICALS = {
    "logits": (GumbelCategorical, None),
    "probs": (lambda x: GumbelCategorical(probs=x.double().softmax(-1)), None),
    "masked": (lambda x: DeviceMaskedCategorical(x, MASK), MASK),
    "masked probs": (lambda x: DeviceMaskedCategorical(probs=x.double().softmax(-1), mask=MASK), MASK),
    "masked by the lowest number": (
        lambda x: GumbelCategorical(x.masked_fill(~MASK, torch.finfo(x.dtype).min)),
        MASK,
    ),
    "hybrid": (
        lambda x: HybridDistribution(
            TensorDict({"a": {"logits": x, "mask": MASK}}, []), {"a": DeviceMaskedCategorical}
        ).dists["a"],
        MASK,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CATEGORICALS)
def test_choices_have_the_probabilities_that_are_stored(name, dtype):
    torch.manual_seed(0)
    make, mask = CATEGORICALS[name]
    dist = make(LOGITS.to(dtype))
    right = exact(LOGITS.to(dtype), mask)
    assert_drawn(dist.sample((DRAWS,)), right.exp())
    stored = dist.log_prob(torch.arange(len(LOGITS)))
    possible = stored > -1e4
    assert torch.equal(possible, right > -torch.inf)
    error = (stored.double() - right)[possible].abs()
    assert (error <= right[possible].abs() * eps(stored.dtype) / 2 + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_equal_choices(dtype):
    torch.manual_seed(1)
    logits = torch.zeros(1_000, dtype=dtype)
    draws = torch.cat([GumbelCategorical(logits).sample((12_000,)), DeviceMaskedCategorical(logits).sample((12_000,))])
    assert_drawn(draws, torch.full((1_000,), 1e-3))


@pytest.mark.parametrize("dtype", HALF)
def test_a_policy_under_autocast(dtype):
    torch.manual_seed(2)
    network = nn.Linear(1, 300)
    nn.init.zeros_(network.weight)
    actor = DeviceActor(network, distribution_class=GumbelCategorical, param_keys=["logits"])
    td = TensorDict({"observation": torch.ones(30_000, 1)}, [30_000])
    with torch.autocast("cpu", dtype), set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        td = actor(td)
    right = exact(network.bias.detach().to(dtype))
    assert_drawn(td["action"], right.exp())
    stored = td["action_log_prob"].double()
    assert (stored - right[td["action"]]).abs().max() <= right.abs().max() * eps(dtype) / 2 + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_options_are_chosen_with_the_probabilities_that_are_written(dtype):
    torch.manual_seed(3)
    selector = nn.Linear(1, 200).to(dtype)
    nn.init.zeros_(selector.weight)
    rows = 30_000
    td = TensorDict({"observation": torch.ones(rows, 1, dtype=dtype)}, [rows])
    names = [f"option {number}" for number in range(200)]
    controller = OptionController(selector, OptionSet(names), example=td[:2], temperature=0.5)
    for key in ("option", "option_age"):
        td.set(key, torch.zeros(rows, dtype=torch.int64))
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        td = controller(td)
    right = (selector.bias.detach().double() / 0.5).log_softmax(-1)
    assert_drawn(td["active_option"], right.exp())
    assert (td["option_log_prob"].double() - right[td["active_option"]]).abs().max() < 1e-5


class TestEdges:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", ["logits", "probs", "mask"])
    def test_impossible_actions_have_finite_gradients(self, kind, dtype):
        zero = torch.tensor([1.0, 0.0, 3.0], dtype=dtype, requires_grad=True)
        if kind == "probs":
            dist = GumbelCategorical(probs=zero)
        elif kind == "logits":
            dist = GumbelCategorical(zero.masked_fill(torch.tensor([False, True, False]), -torch.inf))
        else:
            dist = DeviceMaskedCategorical(zero, torch.tensor([True, False, True]))
        assert dist.log_prob(torch.tensor(1)) == -torch.inf
        assert dist.probs[1] == 0
        entropy = dist.entropy()
        p = dist.probs.double()[[0, 2]]
        assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=3 * eps(dtype) + 1e-6)
        (entropy + dist.log_prob(torch.tensor(2)) + kl_divergence(dist, dist)).backward()
        assert zero.grad.isfinite().all()
        assert not (dist.sample((10_000,)) == 1).any()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_extreme_uniform_numbers(self, dtype, monkeypatch):
        """A draw of exactly 0, and the one next to 1, take neither NaN nor an impossible action."""
        for number in (0.0, 1 - 2**-24):
            monkeypatch.setattr(
                torch, "rand", lambda shape, dtype, device, value=number: torch.full(shape, value, dtype=dtype)
            )
            dist = DeviceMaskedCategorical(torch.zeros(4, dtype=dtype), torch.tensor([False, True, False, False]))
            assert dist.sample() == 1
            assert GumbelCategorical(torch.zeros(4, dtype=dtype)).sample() == 0

    @pytest.mark.parametrize("dtype", HALF)
    def test_rounding_makes_no_ties(self, dtype):
        """Two logits that differ, next to a normaliser that rounds them to one number in 16 bits."""
        logits = torch.zeros(1_000, dtype=dtype)
        logits[700] = 2**-9
        for dist in (GumbelCategorical(logits), DeviceMaskedCategorical(logits)):
            assert dist.mode == dist.mean == dist.deterministic_sample == 700

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_results_have_the_dtype_of_the_logits(self, dtype):
        for dist in (GumbelCategorical(LOGITS.to(dtype)), DeviceMaskedCategorical(LOGITS.to(dtype), MASK)):
            results = (
                dist.logits,
                dist.probs,
                dist.log_prob(torch.tensor(0)),
                dist.entropy(),
                kl_divergence(dist, dist),
            )
            assert {result.dtype for result in results} == {dtype}

    def test_a_mask_that_is_not_bool_is_refused(self):
        for mask in (MASK.to(torch.uint8), MASK.float(), MASK.long()):
            with pytest.raises(ValueError, match="mask: expected bool"):
                DeviceMaskedCategorical(LOGITS, mask)

    def test_logits_and_probs_are_one_or_the_other(self):
        for kind in (GumbelCategorical, DeviceMaskedCategorical):
            with pytest.raises(ValueError, match="received both"):
                kind(logits=LOGITS, probs=LOGITS.softmax(-1))
            with pytest.raises(ValueError, match="received neither"):
                kind()


BATCH = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(4))


class TestCategoricalIsTorchs:
    @pytest.mark.parametrize("arguments", [{"logits": BATCH}, {"probs": BATCH.exp()}])
    def test_attributes(self, arguments):
        own, other = GumbelCategorical(**arguments), Categorical(**arguments)
        for name in ("batch_shape", "event_shape", "param_shape", "mode"):
            received, expected = getattr(own, name), getattr(other, name)
            assert torch.equal(received, expected) if isinstance(expected, torch.Tensor) else received == expected
        for name in ("logits", "probs"):
            torch.testing.assert_close(getattr(own, name), getattr(other, name))
        torch.testing.assert_close(own.entropy(), other.entropy())
        assert torch.equal(own.enumerate_support(), other.enumerate_support())
        assert own.sample((2,)).shape == own.sample(torch.Size([2])).shape == other.sample((2,)).shape

    @pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1), (3, 4), (7, 3, 4), (7, 1, 1)])
    @pytest.mark.parametrize("masked", [False, True])
    def test_values_broadcast(self, shape, masked):
        value = torch.randint(5, shape)
        own = DeviceMaskedCategorical(BATCH) if masked else GumbelCategorical(BATCH)
        torch.testing.assert_close(own.log_prob(value), Categorical(logits=BATCH).log_prob(value))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [(3, 4), (2, 3, 4)])
    def test_expand(self, rows, dtype):
        valid = torch.tensor([[True], [False], [True]])
        logits, mask = BATCH.to(dtype), BATCH > -1
        for dist in (
            GumbelCategorical(logits),
            GumbelCategorical(probs=logits.exp()),
            DeviceMaskedCategorical(logits, mask, valid),
        ):
            wide = dist.expand(rows)
            assert type(wide) is type(dist)
            assert wide.batch_shape == rows
            value = dist.sample()
            assert torch.equal(wide.log_prob(value), dist.log_prob(value).expand(rows))
            assert torch.equal(wide.entropy(), dist.entropy().expand(rows))
            assert torch.equal(wide.probs, dist.probs.expand(*rows, 5))
            assert wide.sample((6,)).shape == (6, *rows)
            assert wide.expand((9, *rows)).batch_shape == (9, *rows)

    def test_divergences_from_and_to_torchs(self):
        own, other = GumbelCategorical(BATCH), Categorical(logits=BATCH.flip(-1))
        right = kl_divergence(Categorical(logits=BATCH), other)
        torch.testing.assert_close(kl_divergence(own, other), right)
        torch.testing.assert_close(kl_divergence(other, own), kl_divergence(other, Categorical(logits=BATCH)))
        torch.testing.assert_close(kl_divergence(own, GumbelCategorical(BATCH.flip(-1))), right)

    def test_validation_is_asked_for(self):
        with pytest.raises(ValueError, match="constraint"):
            GumbelCategorical(BATCH * torch.nan, validate_args=True)
        with pytest.raises(ValueError, match="support"):
            GumbelCategorical(BATCH, validate_args=True).log_prob(torch.tensor(5))

    @pytest.mark.parametrize("arguments", [{"logits": BATCH}, {"probs": BATCH.exp()}])
    def test_torchrls_masked_categorical(self, arguments):
        mask = BATCH > -0.8
        mask[..., 0] = True
        own, other = DeviceMaskedCategorical(**arguments, mask=mask), MaskedCategorical(**arguments, mask=mask)
        value = other.sample()
        torch.testing.assert_close(own.log_prob(value), other.log_prob(value))
        torch.testing.assert_close(own.entropy(), other.entropy())
        assert torch.equal(own.mode, other.mode)

    def test_torchrls_indices(self):
        logits, indices = BATCH[0], torch.tensor([[0, 2], [1, 4], [3, 9], [2, 9]])
        own = DeviceMaskedCategorical(logits, indices=indices, padding_value=9)
        mask = torch.zeros(4, 5, dtype=torch.bool)
        for row, column in ((0, 0), (0, 2), (1, 1), (1, 4), (2, 3), (3, 2)):
            mask[row, column] = True
        torch.testing.assert_close(own.logits, DeviceMaskedCategorical(logits, mask).logits)
        other = MaskedCategorical(logits, indices=indices, padding_value=9)
        value = torch.tensor([2, 4, 3, 2])
        torch.testing.assert_close(own.log_prob(value), other.log_prob(value))

    def test_a_mask_of_more_rows_than_the_logits(self):
        mask = torch.tensor([[True, True, False, True, False], [False, True, True, False, False]])
        dist = DeviceMaskedCategorical(BATCH[0, 0], mask)
        assert dist.batch_shape == (2,)
        assert dist.sample((3,)).shape == (3, 2)

    def test_probabilities_that_the_mask_leaves_nothing_of(self):
        probs = torch.tensor([[0.0, 0.0, 1.0]], requires_grad=True)
        dist = DeviceMaskedCategorical(probs=probs, mask=torch.tensor([[True, True, False]]))
        assert dist.sample().tolist() == [0]
        assert dist.log_prob(torch.tensor([0])).tolist() == [0.0]

    def test_copies(self):
        dist = copy.deepcopy(GumbelCategorical(BATCH))
        assert torch.equal(dist.logits, GumbelCategorical(BATCH).logits)


LOC, SCALE = BATCH[0], BATCH[1].exp()
LOW, HIGH = torch.tensor([-1.0, -2.0, 0.0, -0.3, -5.0]), torch.tensor([1.0, 0.5, 2.0, 0.3, 9.0])
NORMALS = {
    "squashed": lambda c, **o: SquashedNormal(c(LOC), c(SCALE), **o),
    "squashed in bounds": lambda c, **o: SquashedNormal(c(LOC), c(SCALE), c(LOW), c(HIGH), **o),
    "bounded": lambda c, **o: BoundedNormal(c(LOC), c(SCALE), c(LOW), c(HIGH), **o),
    "diagonal": lambda c, **o: DiagonalNormal(c(LOC), c(SCALE), **o),
    "option": lambda c, **o: OptionNormal(c(LOC), c(SCALE), c(LOW), c(HIGH), c((HIGH - LOW) * 2), **o),
}


@pytest.mark.parametrize("name", NORMALS)
class TestNormals:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scores_are_those_of_float64(self, name, dtype):
        dist = NORMALS[name](lambda x: x.to(dtype))
        right = NORMALS[name](lambda x: x.to(dtype).double())
        value = right._squash(right.loc * 0.7) if name != "diagonal" else right.loc * 0.7
        value = value.to(dtype)
        received, expected = dist.log_prob(value), right.log_prob(value.double())
        assert received.dtype == dtype
        assert (received - expected).abs().max() <= expected.abs().max() * eps(dtype) + 1e-4
        for method in ("entropy", "deterministic_sample", "mode"):
            if name.startswith("squashed") and method == "entropy":
                continue
            a, b = (getattr(d, method) for d in (dist, right))
            a, b = (a(), b()) if callable(a) else (a, b)
            assert a.dtype == dtype
            assert (a - b).abs().max() <= b.abs().max() * eps(dtype) + 1e-5
        assert kl_divergence(dist, dist).abs().max() <= 1e-6

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_draws_are_those_of_float32_rounded(self, name, dtype):
        dist = NORMALS[name](lambda x: x.to(dtype))
        right = NORMALS[name](lambda x: x.to(dtype).to(torch.promote_types(dtype, torch.float32)))
        torch.manual_seed(5)
        received = dist.sample((50,))
        torch.manual_seed(5)
        expected = right.sample((50,))
        assert received.dtype == dtype
        assert torch.equal(received, expected.to(dtype))
        if name != "diagonal":
            torch.manual_seed(5)
            action, log_prob = dist.rsample_and_log_prob((50,))
            torch.manual_seed(5)
            assert torch.equal(action, received)
            scored = right.rsample_and_log_prob((50,))[1]
            assert log_prob.dtype == dtype
            assert torch.equal(log_prob, scored.to(dtype))

    def test_interface(self, name):
        dist = NORMALS[name](lambda x: x)
        assert dist.batch_shape == (4,)
        assert dist.event_shape == (5,)
        value = dist.sample()
        for rows in ((4,), (3, 4)):
            wide = dist.expand(rows)
            assert type(wide) is type(dist)
            assert wide.batch_shape == rows
            torch.testing.assert_close(wide.log_prob(value), dist.log_prob(value).expand(rows))
            assert wide.sample((2,)).shape == (2, *rows, 5)
        assert dist.log_prob(value[0]).shape == (4,)
        assert dist.log_prob(dist.sample((7,))).shape == (7, 4)
        assert dist.sample([2, 3]).shape == (2, 3, 4, 5)

    def test_validation_is_asked_for(self, name):
        with pytest.raises(ValueError, match="constraint"):
            NORMALS[name](lambda x: x - 100, validate_args=True)
        dist = NORMALS[name](lambda x: x, validate_args=True)
        with pytest.raises(ValueError, match="support"):
            dist.expand((2, 4)).log_prob(torch.full((5,), torch.nan))

    def test_rows_that_do_not_exist(self, name):
        if name.startswith("squashed"):
            return
        valid = torch.tensor([True, False, True, False])
        dist = NORMALS[name](lambda x: x.bfloat16(), valid=valid).expand((3, 4))
        value = dist.sample()
        for result in (dist.log_prob(value), dist.entropy(), kl_divergence(dist, dist)):
            assert (result[:, ~valid] == 0).all()
            assert result.isfinite().all()


class TestNormalArguments:
    def test_parameters_broadcast(self):
        assert SquashedNormal(LOC, 0.5).scale.shape == LOC.shape
        assert SquashedNormal(LOC, torch.ones_like).scale.shape == LOC.shape
        assert SquashedNormal(LOC[0], SCALE).batch_shape == (4,)
        assert SquashedNormal(LOC[0], SCALE[0], LOW.expand(3, 5), HIGH).batch_shape == (3,)
        assert BoundedNormal(LOC[0], SCALE, valid=torch.tensor([True, False, True, True])).entropy().shape == (4,)
        assert DiagonalNormal(LOC, 0.5).sample().shape == LOC.shape
        with pytest.raises(ValueError, match="broadcast"):
            SquashedNormal(LOC, torch.ones(3))
        with pytest.raises(ValueError, match="loc: expected"):
            SquashedNormal(torch.ones(3, dtype=torch.int64), 0.5)
        with pytest.raises(ValueError, match="low < high"):
            SquashedNormal(LOC, SCALE, 5.0)

    @pytest.mark.parametrize("options", [{}, {"tanh_loc": True}, {"tanh_loc": True, "upscale": 2.0}])
    def test_torchrls_tanh_normal(self, options):
        own = SquashedNormal(loc=LOC, scale=SCALE, low=LOW, high=HIGH, **options)
        other = TanhNormal(loc=LOC, scale=SCALE, low=LOW, high=HIGH, **options)
        value = own._squash(own.loc * 0.5)
        torch.testing.assert_close(own.loc, other.loc)
        torch.testing.assert_close(own.log_prob(value), other.log_prob(value), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own.deterministic_sample, other._t(other.root_dist.mean), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("options", [{}, {"tanh_loc": True}, {"tanh_loc": True, "upscale": 2.0}])
    def test_torchrls_independent_normal(self, options):
        """TorchRL's squashes the mean in ``update`` alone, not when it is made; its documentation says always."""
        own, other = DiagonalNormal(LOC, SCALE, **options), IndependentNormal(LOC, SCALE, **options)
        other.update(LOC, SCALE)
        value = own.sample((3,))
        torch.testing.assert_close(own.log_prob(value), other.log_prob(value))
        torch.testing.assert_close(own.entropy(), other.entropy())
        torch.testing.assert_close(own.variance, other.variance)
        torch.testing.assert_close(own.stddev, other.stddev)

    def test_divergence_between_other_bounds_is_no_number(self):
        """The squashed normals' divergence is that of the normals only within the same bounds."""
        with pytest.raises(ValueError, match="same bounds"):
            kl_divergence(SquashedNormal(LOC, SCALE), SquashedNormal(LOC, SCALE, -2.0, 2.0))
        low = LOW.expand(4, 5).clone()
        low[1] -= 1
        divergence = kl_divergence(SquashedNormal(LOC, SCALE, LOW, HIGH), SquashedNormal(LOC, SCALE, low, HIGH))
        assert divergence.isnan().tolist() == [False, True, False, False]

    @pytest.mark.parametrize("dtype", HALF)
    def test_actions_stored_in_half_precision_at_the_bounds(self, dtype):
        """A saturated action counts as the nearest one inside, a rounding step of its own dtype away."""
        wide = SquashedNormal(torch.full((1, 2), 4.0), torch.full((1, 2), 0.5))
        action = wide.sample((1000,))
        assert (action.to(dtype) == 1).any()
        stored = wide.log_prob(action.to(dtype))
        assert stored.isfinite().all()
        assert stored.min() > wide.log_prob(torch.full((1, 2), 1 - 2 * eps(dtype))).min() - 10

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_head(self, dtype):
        head = SquashedNormalHead(LOW, HIGH)
        loc, scale, low, high = head(torch.cat([LOC, SCALE], -1).to(dtype))
        assert loc.dtype == scale.dtype == dtype
        right = head(torch.cat([LOC, SCALE], -1).to(dtype).double())[1]
        assert ((scale - right).abs() <= right * (eps(dtype) + 1e-6)).all()
        dist = SquashedNormal(loc, scale, low, high)
        sample = dist.sample((1000,))
        assert ((sample >= LOW) & (sample <= HIGH)).all()

    def test_an_actor_passes_further_arguments_to_its_distribution(self):
        network = nn.Sequential(nn.Linear(3, 4), SplitInTwo())
        options = {"low": -2.0, "high": 3.0}
        actor = DeviceActor(
            network, distribution_class=SquashedNormal, param_keys=["loc", "scale"], distribution_kwargs=options
        )
        td = TensorDict({"observation": torch.randn(500, 3) * 9}, [500])
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            with set_exploration_type(kind), torch.no_grad():
                action = actor(td.clone())["action"]
            assert (action < -1).any()
            assert ((action >= -2) & (action <= 3)).all()

    def test_joint_log_probability_of_half_precision_parts(self):
        params = TensorDict({"a": {"logits": LOGITS.half()}, "b": {"loc": LOC[0].half(), "scale": SCALE[0].half()}}, [])
        dist = HybridDistribution(params, {"a": GumbelCategorical, "b": DiagonalNormal})
        assert isinstance(dist, CompositeDistribution)
        sample = dist.sample()
        right = Categorical(logits=LOGITS.half().double()).log_prob(sample["a"])
        normal = Independent(Normal(LOC[0].half().double(), SCALE[0].half().double()), 1)
        right = right + normal.log_prob(sample["b"].double())
        assert (dist.joint_log_prob(sample) - right).abs() <= 3 * right.abs() * eps(torch.float16)


class SplitInTwo(nn.Module):
    def forward(self, x):
        loc, raw = x.chunk(2, -1)
        return loc, raw.exp()


def test_mean_of_choices_under_torchrls_exploration_type():
    actor = DeviceActor(nn.Linear(3, 4), distribution_class=GumbelCategorical, param_keys=["logits"])
    td = TensorDict({"observation": torch.randn(5, 3)}, [5])
    with set_exploration_type(InteractionType.MEAN), torch.no_grad():
        out = actor(td)
    assert torch.equal(out["action"], out["logits"].argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
class TestSeveralChoices:
    """``IndependentCategoricals``: what is drawn and said of it is that of each choice alone, in float32 at least."""

    def test_draws(self, dtype):
        logits = (torch.cat([LOGITS, LOGITS[:3].flip(0)]) + 4).to(dtype)
        sample = IndependentCategoricals(logits, [8, 3]).sample((DRAWS // 4,))
        assert_drawn(sample[:, 0], exact(logits[:8]).exp())
        assert_drawn(sample[:, 1], exact(logits[8:]).exp())

    def test_numbers(self, dtype):
        logits = torch.randn(5, 300).to(dtype)
        dist, parts = IndependentCategoricals(logits, [3] * 100), exact(logits.view(5, 100, 3))
        value = dist.sample((4,))
        wanted = parts.expand(4, 5, 100, 3).gather(-1, value.unsqueeze(-1)).sum((-2, -1))
        got = dist.log_prob(value)
        assert got.dtype == dist.entropy().dtype == dist.logits.dtype == dtype
        # of a hundred terms, which are rounded once, when they are added
        torch.testing.assert_close(got.double(), wanted, rtol=max(eps(dtype), 1e-6), atol=0)
        torch.testing.assert_close(
            dist.entropy().double(), -(parts.exp() * parts).sum((-2, -1)), rtol=max(eps(dtype), 1e-6), atol=0
        )
        assert dist.log_prob(value[0, 0]).shape == (5,) and dist.expand((2, 5)).log_prob(value[:2]).shape == (2, 5)

    def test_interaction_types(self, dtype):
        dist = IndependentCategoricals(torch.randn(5, 7).to(dtype), [3, 4])
        assert torch.equal(dist.mean, dist.mode) and torch.equal(dist.mode, dist.deterministic_sample)
        assert dist.mode.shape == (5, 2) and dist.mode.dtype == torch.int64


def test_median_of_a_normal():
    dist = DiagonalNormal(torch.randn(3, 2), torch.rand(3, 2))
    assert torch.equal(dist.median, dist.loc)
