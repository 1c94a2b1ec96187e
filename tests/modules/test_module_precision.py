"""Modules converted to each precision: they run, and give what float64 gives with the same rounded parameters."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf import modules
from torchrl_perf.functional.losses.risk import Risk
from torchrl_perf.modules import (
    ICM,
    LRU,
    CategoricalMLP,
    ComponentValues,
    ConvLayer,
    ConvNet,
    ConvQMap,
    DeterministicActor,
    DeviceActor,
    DeviceGRU,
    DeviceLSTM,
    DiscountedReturnNormalization,
    DuelingMLP,
    EmpiricalNormalization,
    EnsembleHybridQ,
    EnsembleMLP,
    EnsembleQ,
    EpsilonGreedy,
    FusedMLP,
    GaussianNoise,
    GumbelCategorical,
    HybridActor,
    ICEMPlanner,
    ICEMSettings,
    ImplicitQuantileCritic,
    ImplicitQuantileMLP,
    MinGRU,
    MixedSequential,
    NodeEncoder,
    NoisyLinear,
    NormalizedCritic,
    OptionActor,
    OptionController,
    OptionSet,
    OUNoise,
    QuantileMLP,
    SetEncoder,
    SquashedNormalHead,
    TimeHazard,
    WindowEncoder,
    hybrid_features,
)
from torchrl_perf.systems import active_dynamics
from torchrl_perf.systems.active_dynamics import (
    BeliefFilter,
    InformationReward,
    LatentDecoder,
    LatentDynamics,
    ObservationEncoder,
    SeqVAE,
    UniformInputs,
)

B, IN, D = 6, 4, 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SPEC = Bounded(-torch.ones(D), torch.ones(D), shape=(D,))
HYBRID = Composite(act=Categorical(3), push=Bounded(-1.0, 1.0, shape=(2,)), free=Unbounded(shape=(2,)))
LAYERS = (ConvLayer(4, 3),)


def floats(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def td(c, **entries):
    values = {"observation": floats(B, IN)} | entries
    return TensorDict({key: c(x) if x.is_floating_point() else x for key, x in values.items()}, [B])


def acts(net, batch):
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        return tuple(value for _, value in sorted(net(batch).items(True, True), key=str) if value.is_floating_point())


def options():
    names = OptionSet(["a", "b"], termination=TimeHazard(2, hazard_max=9.0, steepness=0.5))
    return OptionController(nn.Linear(IN, 2), names, example=td(lambda x: x.float()), temperature=0.7)


def with_options(c):
    return td(c, option=torch.arange(B) % 2, option_age=torch.arange(B), active_option=torch.arange(B) % 2)


def vae():
    return SeqVAE(ObservationEncoder(IN, D, D), LatentDynamics(D, D, kind="mlp"), LatentDecoder(IN, D))


def transitions(c):
    return td(c, action=floats(B, D)).set("next", td(c, observation=floats(B, IN) + 1))


def planes(c):
    return c(floats(2, 3, 8, 8))


def nodes(c):
    return c(floats(B, 5, 3)), torch.arange(5) < 3 + torch.arange(B).unsqueeze(-1) % 3, c(floats(B, 2))


def normalization():
    layer = EmpiricalNormalization(IN)
    layer.update(floats(50, IN) * 30 + 100)
    return layer


def reward_normalization():
    layer = DiscountedReturnNormalization(B, gamma=0.9)
    layer.update(floats(B, 7, 1), torch.zeros(B, 7, 1, dtype=torch.bool))
    return layer


def memory(kind):
    """A module on a step and on a sequence with a reset."""

    def remembered(net, c):
        begins = torch.arange(B).unsqueeze(-1) % 3 == 0
        step = net(td(c, is_init=begins))
        batch = TensorDict({"observation": c(floats(2, 5, IN)), "is_init": begins[:5].expand(2, 5, 1)}, [2, 5])
        batch.names = [None, "time"]
        return step["features"], step["next", net.state_keys[0]], net(batch)["features"]

    return lambda: kind(IN, D, in_key="observation", out_key="features"), remembered


CASES = {
    **{kind.__name__: memory(kind) for kind in (DeviceGRU, DeviceLSTM, MinGRU, LRU)},
    "ICM": (lambda: ICM(IN, spec=SPEC), lambda net, c: net(transitions(c))["next", "intrinsic_reward"]),
    "BeliefFilter": (
        lambda: BeliefFilter(ObservationEncoder(IN, D, D, hidden_size=8)),
        lambda net, c: net(td(c, hidden=floats(B, 8), previous_action=floats(B, D)))["belief"],
    ),
    "CategoricalMLP": (lambda: CategoricalMLP(IN, D, dueling=True), lambda net, c: net(c(floats(B, IN)))),
    "CategoricalMLP risk": (
        lambda: CategoricalMLP(IN, D, risk=Risk("cvar", 0.3)),
        lambda net, c: (net(c(floats(B, IN))), net.log_probs(c(floats(B, IN)))),
    ),
    "ComponentValues": (lambda: ComponentValues(IN, ["a", "b"]), lambda net, c: net(c(floats(B, IN)))),
    "ConvNet": (lambda: ConvNet((3, 8, 8), layers=LAYERS, out_features=9), lambda net, c: net(planes(c))),
    "ConvNet bytes": (
        lambda: ConvNet((3, 8, 8), layers=LAYERS, out_features=9),
        lambda net, c: net((floats(2, 3, 8, 8).sigmoid() * 255).to(torch.uint8)),
    ),
    "ConvNet mixed": (
        lambda: ConvNet((3, 8, 8), layers=LAYERS, out_features=9, precision="bf16"),
        lambda net, c: net(planes(c)),
    ),
    "ConvQMap": (lambda: ConvQMap(3, hidden_size=8, dueling=True), lambda net, c: net(planes(c))),
    "EmpiricalNormalization": (normalization, lambda net, c: net(c(floats(B, IN) + 100))),
    "DiscountedReturnNormalization": (reward_normalization, lambda net, c: net(c(floats(B, 1)))),
    "NormalizedCritic": (
        lambda: NormalizedCritic(normalization(), EnsembleQ(2, IN + D)),
        lambda net, c: net(c(floats(B, IN) + 100), c(floats(B, D))),
    ),
    "DeterministicActor": (
        lambda: DeterministicActor(nn.Linear(IN, D), spec=SPEC, squash="atan"),
        lambda net, c: net(td(c))["action"],
    ),
    "DeviceActor": (
        lambda: DeviceActor(nn.Linear(IN, D), distribution_class=GumbelCategorical, param_keys=["logits"]),
        lambda net, c: acts(net, td(c)),
    ),
    "DuelingMLP": (lambda: DuelingMLP(IN, D), lambda net, c: net(c(floats(B, IN)))),
    "EnsembleHybridQ": (lambda: EnsembleHybridQ(2, IN + D, 3), lambda net, c: net(c(floats(B, IN)), c(floats(B, D)))),
    "EnsembleMLP": (lambda: EnsembleMLP(2, IN, D), lambda net, c: net(c(floats(B, IN)))),
    "EnsembleQ": (lambda: EnsembleQ(2, IN + D), lambda net, c: net(c(floats(B, IN)), c(floats(B, D)))),
    "FusedMLP": (lambda: FusedMLP(IN, D), lambda net, c: net(c(floats(B, IN)))),
    "FusedMLP mixed": (lambda: FusedMLP(IN, D, precision="bf16"), lambda net, c: net(c(floats(B, IN)))),
    "HybridActor": (
        lambda: HybridActor(nn.Linear(IN, hybrid_features(HYBRID)), spec=HYBRID),
        lambda net, c: acts(net, td(c)),
    ),
    "ImplicitQuantileCritic": (
        lambda: ImplicitQuantileCritic(IN, D, taus="midpoints"),
        lambda net, c: (net(c(floats(B, IN)), c(floats(B, D))), net.sample(c(floats(B, IN)), c(floats(B, D)))[0]),
    ),
    "ImplicitQuantileMLP": (
        lambda: ImplicitQuantileMLP(IN, D, taus="midpoints", dueling=True),
        lambda net, c: (net(c(floats(B, IN))), net.sample(c(floats(B, IN)))[0]),
    ),
    "ImplicitQuantileMLP mixed": (
        lambda: ImplicitQuantileMLP(IN, D, taus="midpoints", risk=Risk("wang", -0.5), precision="bf16"),
        lambda net, c: net(c(floats(B, IN))),
    ),
    "InformationReward": (
        lambda: InformationReward(LatentDynamics(2, 2), "embedding"),
        lambda net, c: (net.observe(c(floats(B, 2))), net(c(floats(2, 3, 5, 2)), c(floats(2, 3, 4, 2))))[1],
    ),
    "LatentDecoder": (lambda: LatentDecoder(IN, D), lambda net, c: net(c(floats(B, D)))),
    "LatentDynamics": (
        lambda: LatentDynamics(D, D, kind="ensemble"),
        lambda net, c: net(c(floats(B, D)), c(floats(B, D))),
    ),
    "MixedSequential": (
        lambda: MixedSequential(nn.Linear(IN, 8), nn.Tanh(), NoisyLinear(8, D), precision="bf16"),
        lambda net, c: net.eval()(c(floats(B, IN))),
    ),
    "NodeEncoder": (
        lambda: NodeEncoder(3, 2, width=16, num_heads=2, num_layers=2, groups=4),
        lambda net, c: net(*nodes(c)),
    ),
    "NodeEncoder mixed": (
        lambda: NodeEncoder(3, 2, width=16, num_heads=2, num_layers=2, groups=4, precision="bf16"),
        lambda net, c: net(*nodes(c)),
    ),
    "WindowEncoder": (
        lambda: WindowEncoder(2, 1, IN - 2, width=8, num_layers=1, num_heads=2),
        lambda net, c: net(c(floats(B, IN))),
    ),
    "NoisyLinear": (lambda: NoisyLinear(IN, D), lambda net, c: net.eval()(c(floats(B, IN)))),
    "ObservationEncoder": (
        lambda: ObservationEncoder(IN, D, kind="mlp", counts=True),
        lambda net, c: net(c(floats(B, IN).abs()))[:2],
    ),
    "OptionActor": (
        lambda: OptionActor(nn.Linear(IN + 2, 2 * D), OptionSet(["a", "b"], action_range=[0.5, 1.0]), spec=SPEC),
        lambda net, c: acts(net, with_options(c)),
    ),
    "OptionController": (
        options,
        lambda net, c: (
            net.log_probs(with_options(c), net.available(with_options(c))),
            net.termination_prob(with_options(c)),
        ),
    ),
    "QuantileMLP": (
        lambda: QuantileMLP(IN, D, num_quantiles=50, risk=Risk("power", -0.5)),
        lambda net, c: (net(c(floats(B, IN))), net.means(c(floats(B, IN)))),
    ),
    "SeqVAE": (
        vae,
        lambda net, c: net.encode(c(floats(2, 5, IN)), c(floats(2, 5, D)), torch.zeros(2, 5, dtype=torch.bool))[:2],
    ),
    "SetEncoder": (
        lambda: SetEncoder(IN, 3, pool="attention"),
        lambda net, c: net(c(floats(B, IN)), c(floats(B, 5, 3)), nodes(c)[1]),
    ),
    "SquashedNormalHead": (
        lambda: SquashedNormalHead(-torch.ones(D), torch.ones(D)),
        lambda net, c: net(c(floats(B, 2 * D))),
    ),
}
ELSEWHERE = {
    "distributions, in test_distribution_precision.py": {
        "GumbelCategorical", "DeviceMaskedCategorical", "SquashedNormal", "BoundedNormal", "DiagonalNormal",
        "OptionNormal", "HybridDistribution", "IndependentCategoricals",
    },
    "draws, below": {"GaussianNoise", "OUNoise", "UniformInputs", "ICEMPlanner", "EpsilonGreedy"},
    "no numbers of their own": {
        "ConvLayer", "ICEMSettings", "OptionSet", "OptionChoice", "hybrid_features", "OptionConditioned",
        "OptionPolicy", "FilteredPolicy", "TimeHazard", "JoinedInputs",
    },
}  # fmt: skip


def flat(result):
    return [part for value in result for part in flat(value)] if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_converted_module_gives_what_float64_gives(name, precision):
    dtype = DTYPES[precision]
    mixed = "mixed" in name or name == "MixedSequential"
    if mixed and precision == "fp16":
        pytest.skip("weights of one 16-bit kind and products of another")
    make, run = CASES[name]
    torch.manual_seed(0)
    net = make().to(dtype)
    exact = copy.deepcopy(net).double()
    for part in exact.modules():
        if getattr(part, "precision", None) in ("bf16", "fp16"):
            part.precision = "tf32"
    with torch.no_grad():
        received = flat(run(net, lambda x: x.to(dtype)))
        expected = flat(run(exact, lambda x: x.to(dtype).double()))
    # the log-probability of an action near its bound feels the rounding of the action
    allowed = (32 if name in ("HybridActor", "OptionActor") else 8) * max(
        torch.finfo(dtype).eps, 2.0**-7 if mixed else 0.0, 1e-6 if precision == "fp64" else 0.0
    )
    for got, right in zip(received, expected, strict=True):
        assert got.shape == right.shape
        assert got.dtype == dtype or got.dtype == torch.promote_types(dtype, torch.float32)
        finite = right.isfinite()
        assert torch.equal(got.isfinite(), finite)
        error, size = (got.double() - right)[finite].abs(), right[finite].abs()
        assert error.max() <= allowed * size.max().clamp_min(0.3), (name, error.max(), size.max())


@pytest.mark.parametrize("name", CASES)
def test_under_autocast(name):
    """Only matrix products are rounded: results are right to 8 bits."""
    make, run = CASES[name]
    torch.manual_seed(0)
    net = make()
    with torch.no_grad():
        expected = flat(run(copy.deepcopy(net), lambda x: x.float()))
        with torch.autocast("cpu", torch.bfloat16):
            received = flat(run(net, lambda x: x.float()))
    for got, right in zip(received, expected, strict=True):
        finite = right.isfinite()
        assert torch.equal(got.isfinite(), finite)
        assert (got - right)[finite].abs().max() <= 0.06 * right[finite].abs().max().clamp_min(0.3)


def test_every_module_has_a_case():
    named = {name.split()[0] for name in CASES}
    of_systems = [
        value for value in vars(active_dynamics).values() if isinstance(value, type) and issubclass(value, nn.Module)
    ]
    public = set(modules.__all__) | {module.__name__ for module in of_systems}
    assert public - {"MultiStepELBOLoss", "PredictiveELBOLoss"} == named | set().union(*ELSEWHERE.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestConstantsKeep32Bits:
    def test_of_distributional_networks(self, dtype):
        net = QuantileMLP(IN, D, num_quantiles=50)
        levels = net.taus.clone()
        net.to(dtype)
        assert torch.equal(net.taus, levels)
        assert net.edges.dtype == torch.float32
        support = CategoricalMLP(IN, D, num_atoms=51, v_min=-3.0, v_max=7.0)
        atoms = support.support.clone()
        assert torch.equal(support.to(dtype).support, atoms)
        embedding = ImplicitQuantileMLP(IN, D).to(dtype).implicit.embedding
        assert embedding.frequencies[63].item() == pytest.approx(63 * torch.pi, rel=1e-6)
        assert all(parameter.dtype == dtype for parameter in embedding.parameters())
        assert net.double().taus.dtype == torch.float64

    def test_of_a_process(self, dtype):
        noise = OUNoise(_policy(dtype), spec=SPEC)
        assert noise.to(dtype).state.dtype == torch.float32


def _policy(dtype, rows=0):
    shape = (rows, D) if rows else (D,)
    spec = Bounded(-torch.ones(shape), torch.ones(shape), shape=shape)
    return DeterministicActor(nn.Linear(IN, D), spec=spec).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
class TestDraws:
    rows = 40_000

    def batch(self, dtype):
        return TensorDict({"observation": torch.zeros(self.rows, IN, dtype=dtype)}, [self.rows])

    def test_gaussian_noise(self, dtype):
        torch.manual_seed(0)
        noise = GaussianNoise(_policy(dtype, self.rows), sigma_start=0.05).to(dtype)
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            action = noise(self.batch(dtype))["action"]
        middle = noise.policy(self.batch(dtype))["action"]
        assert action.dtype == dtype
        spread = (action.double() - middle.double()).std(0)
        assert ((spread / 0.05 - 1).abs() < 0.02).all()

    def test_a_process_keeps_its_variance(self, dtype):
        """theta = .004: a step of -theta x is less than half of the last bit of a bfloat16 number."""
        torch.manual_seed(0)
        spec = Bounded(-torch.ones(200, D), torch.ones(200, D), shape=(200, D))
        policy = TensorDictModule(lambda x: x[..., :D] * 0, in_keys=["observation"], out_keys=["action"])
        noise = OUNoise(policy, spec=spec, sigma_start=0.01, theta=0.004, keys={"is_init": None}).to(dtype)
        noise.state.normal_(std=(1 / 0.008) ** 0.5)
        batch = TensorDict({"observation": torch.zeros(200, IN, dtype=dtype)}, [200])
        with set_exploration_type(ExplorationType.RANDOM):
            for _ in range(500):
                action = noise(batch)["action"]
        assert action.dtype == (torch.promote_types(dtype, noise.low.dtype))
        assert noise.state.square().mean().item() == pytest.approx(1 / 0.008, rel=0.2)

    def test_noisy_layers(self, dtype):
        torch.manual_seed(0)
        for kind in ("shared", "per_row"):
            net = NoisyLinear(2, 300, sigma=1.0, noise=kind).to(dtype)
            with torch.no_grad():
                net.weight_mu.zero_()
                net.bias_mu.zero_()
                net.weight_sigma.zero_()
                net.bias_sigma.fill_(1)
                out = torch.cat([net(torch.ones(2, 2, dtype=dtype)) for _ in range(60)]).double()
            # sign(x) sqrt(|x|): E|y|^2 = E|x| and E|y|^4 = 1
            assert out.square().mean().item() == pytest.approx((2 / torch.pi) ** 0.5, rel=0.05)
            assert out.pow(4).mean().item() == pytest.approx(1, rel=0.1)

    def test_initial_weights_are_not_a_few_numbers(self, dtype):
        torch.manual_seed(0)
        weight = NoisyLinear(1, 100_000, dtype=dtype).weight_mu.detach().double()
        assert weight.abs().min() < 2e-4
        assert len(weight.unique()) > 1_500

    def test_uniform_inputs(self, dtype):
        torch.manual_seed(0)
        spec = Bounded(torch.zeros(1), torch.ones(1), shape=(1,), dtype=torch.float32)
        action = UniformInputs(spec).to(dtype)(self.batch(dtype))["action"]
        assert action.dtype == dtype
        below = (action < 2**-9).double().mean().item()
        assert below == pytest.approx(2**-9, rel=0.5)
        assert action.double().mean().item() == pytest.approx(0.5, abs=0.01)

    def test_a_planner(self, dtype):
        """Its plans go where the metric is greatest, in the dtype of the actions."""
        torch.manual_seed(0)
        spec = Bounded(-torch.ones(1), torch.ones(1), shape=(1,))
        goal = 0.62
        planner = ICEMPlanner(
            lambda state, action: state + action,
            lambda states, actions: -(actions - goal).square().sum(-1),
            spec=spec,
            settings=ICEMSettings(horizon=3, candidates=60, iterations=12, execute="mean"),
        ).to(dtype)
        batch = TensorDict({"latent": torch.zeros(4, 1, dtype=dtype)}, [4])
        for key, value in planner.make_state().specs.items():
            batch.set(key, value.expand(4, *value.shape).zero().to(dtype))
        out = planner(batch)
        assert out["action"].dtype == out["next", "plan"].dtype == dtype
        assert (out["action"].double() - goal).abs().mean() < 0.05
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(1)
            drawn = planner.draw(2)
        torch.manual_seed(1)
        assert torch.equal(drawn, planner.draw(2))

    def test_epsilon_greedy(self, dtype):
        torch.manual_seed(0)
        net = EpsilonGreedy(nn.Linear(IN, 300), spec=Categorical(300), eps_start=1.0).to(dtype)
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            action = net(self.batch(dtype))["action"]
        counts = torch.bincount(action, minlength=300).double()
        expected = self.rows / 300
        assert ((counts - expected).square() / expected).sum() < 299 + 5 * (2 * 299) ** 0.5
