"""Settings of a run that learns a latent dynamical system and chooses the most informative inputs."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchrl_perf.functional.losses.elbo import BetaSchedule
from torchrl_perf.systems.active_dynamics.latent_dynamics import DynamicsKind
from torchrl_perf.systems.active_dynamics.latent_maps import DecoderKind, EncoderKind, Likelihood
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share

FieldName = Literal[
    "limit_cycle",
    "double_limit_cycle",
    "van_der_pol",
    "duffing",
    "snowman",
    "multi_attractor",
    "limit_cycle_from_one_place",
    "double_limit_cycle_from_one_place",
    "van_der_pol_from_one_place",
    "duffing_from_one_place",
    "snowman_from_one_place",
    "multi_attractor_from_one_place",
]
FROM_ONE_PLACE = "_from_one_place"
Inputs = Literal["fisher_d", "fisher_a", "embedding", "disagreement", "rnd", "goal", "random"]


@dataclass(frozen=True)
class ActiveDynamicsConfig(RunConfig):
    """Every choice of a run on :class:`~torchrl_perf.envs.LatentField`.

    A sequential variational autoencoder is trained on windows of observations, while iCEM (arXiv:2008.06389) plans the
    inputs that are most informative about its dynamics. The best checkpoint is the one with the highest R^2 of
    predictions ``prediction_horizon`` steps ahead.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "active-dynamics"
    presets_in: ClassVar[str] = "systems.active_dynamics.config:ACTIVE_DYNAMICS_PRESETS"
    blueprint_in: ClassVar[str] = "systems.active_dynamics.blueprint:ACTIVE_DYNAMICS"
    evaluated_by: ClassVar[str] = "eval/r2"
    env_class: ClassVar[str] = "LatentField"
    work_of_step: ClassVar[int] = 18
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("observation", "observation_size", "latent_size", "history", "known_map", "goal"),
        *("encoder", "encoder_size", "decoder", "likelihood", "dynamics", "dynamics_size", "members"),
        *("centres", "centres_range"),
        *("inputs", "plan_horizon", "elites", "random_hold"),
    )

    env: FieldName = "limit_cycle"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which vector field to learn. Points begin all over the square again and again; or, "from one place", once and for
    all where the field keeps them, with inputs that are weak and channels that are known."""
    num_envs: int = 8
    """Number of points that move at once (N)."""
    num_steps: int = 25
    """Steps of each env in one iteration (T); at least a window."""
    total_steps: int = 20_000
    """Env steps of the whole run, over all envs; rounded up to whole iterations."""
    gamma: float = 0.99
    """Discount of the information along a plan."""
    precision: Literal["tf32", "ieee"] = "tf32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Precision of matrix products; models this small gain nothing from 16 bits."""
    best_metric: str = "prediction/r2"
    """Metric whose highest value marks the best checkpoint; a leading "-" asks for the lowest, "" keeps none."""

    observation: Literal["log_linear", "linear", "identity", "mlp"] = "log_linear"
    """How points are observed: what the means of the channels are. Counts have Poisson noise, the others Gaussian."""
    observation_size: int = 20
    """Channels of the observation; 2 with observation="identity"."""
    action_max: float = 0.5
    """Bound of each input."""
    process_noise: float = 0.01
    """Variance of the process noise per unit of time."""
    integrator: Literal["euler", "rk4"] = "euler"
    """How the true field is integrated."""
    substeps: int = 1
    """Steps of the integrator for each step of the env."""
    action_encoder: Literal["identity", "linear", "mlp"] = "identity"
    """What an input does, which is to be learnt, too: itself, or a linear map, or one that depends on the point; the
    model's own effect of inputs is linear, and the best of that kind."""
    start: tuple[float, ...] = (0.0, 0.0)
    """Middle of the square where points begin."""
    start_range: float = 1.5
    """Half the width of that square; small for points that all begin in one place."""
    region: float = 1.5
    """Half the width of the square on which predictions are judged, wherever points begin."""
    goal: tuple[float, ...] = ()
    """A point to be reached, whose distance is the env's reward; () for none."""
    goal_weight: float = 0.0
    """What the squared distance from the goal costs in a plan, in units of the information that it is planned for."""
    region_weight: float = 0.0
    """What the squared distance from the region costs in a plan: data from beyond it tell nothing that is asked for."""
    max_episode_steps: int = 250
    """Steps after which a point restarts at random; 0 is never."""
    extent: float = 0.0
    """Distance from the axes beyond which a point restarts, too, since planned inputs push it far out; 0 for the
    whole plane."""

    latent_size: int = 2
    """Numbers of the learned latent state."""
    encoder: EncoderKind = "gru"
    """A recurrent cell, or a perceptron that sees one observation."""
    encoder_size: int = 32
    """Width of the encoder."""
    decoder: DecoderKind = "log_linear"
    """How observations follow from the latent state."""
    known_map: bool = False
    """The channels are known: the decoder is the world's own map and not learnt, so that beliefs are in the world's
    coordinates and what is left to learn is how points move."""
    likelihood: Likelihood = "poisson"
    """Counts, or channels with normal noise."""
    dynamics: DynamicsKind = "rbf"
    """Model of the field: radial basis functions around centres on a grid, which know nothing beyond them, a
    perceptron, linear, or an ensemble of perceptrons or of radial functions."""
    dynamics_size: int = 32
    """Width of the perceptrons."""
    centres: int = 5
    """Centres of radial functions along each axis."""
    centres_range: float = 2.0
    """Half the width of the square that they cover."""
    members: int = 5
    """Members of the ensemble."""

    inputs: Inputs = "fisher_d"
    """What inputs are planned for: D- or A-optimal Fisher information by its diagonal, "embedding": D-optimal by the
    whole matrix, the input matrix included, disagreement of the ensemble, random network distillation; nearness to the
    goal alone; or random inputs."""
    input_cost: float = 0.0
    """What the square of a planned input costs, in units of the information that it is planned for."""
    random_steps: int = 4_000
    """Env steps at the start with random inputs, while the model knows nothing to plan with."""
    random_share: float = 0.0
    """Share of random inputs after that."""
    random_hold: int = 1
    """Steps for which each random input is held, of runs with random inputs alone."""
    plan_horizon: int = 10
    """Steps of a plan."""
    candidates: int = 32
    """Plans of the first round."""
    plan_rounds: int = 5
    """Rounds of sampling and refitting."""
    elites: int = 10
    """Best plans of a round, to which mean and deviation are fitted."""

    window: int = 20
    """Steps of the windows that are learnt from."""
    history: int = 1_000
    """Steps of each env that are kept; window learns only from the most recent steps."""
    minibatch_size: int = 16
    """Windows of one update."""
    updates: int = 10
    """Updates of one iteration."""
    learning_rate: float = 5e-3
    """Adam's step size."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient."""
    bound: Literal["predictive", "sampled"] = "sampled"
    """Whether predictions begin with beliefs, or with samples of them, which makes the learnt field flatter."""
    kl_horizon: int = 5
    """Most steps ahead for which predictions are compared with the beliefs."""
    kl_decay: float = 0.8
    """Weight of a step ahead in relation to the one before it."""
    samples: int = 5
    """Samples of each belief."""
    mask_rate: float = 0.2
    """Share of steps whose belief is replaced by the prediction from the step before."""
    beta: float = 1.0
    """Weight of the divergences."""
    beta_schedule: BetaSchedule = "linear"
    """How it gets there."""
    beta_warmup: int = 0
    """Updates without divergences at the start."""
    beta_anneal: int = 100
    """Updates of the ramp, or of a period."""
    prediction_horizon: int = 10
    """Steps ahead of the prediction that is reported."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        counts = ("observation_size", "latent_size", "encoder_size", "dynamics_size", "members", "plan_horizon")
        counts += (
            "random_hold",
            "candidates",
            "plan_rounds",
            "elites",
            "minibatch_size",
            "updates",
            "kl_horizon",
            "samples",
        )
        checks.each((*counts, "substeps", "beta_anneal", "prediction_horizon"), is_count, "a positive integer")
        checks.each(("window",), lambda value: value >= 2, "an integer of at least 2")
        checks.each(("centres",), lambda value: 2 <= value <= 100, "an integer from 2 to 100")
        checks.each(
            ("max_episode_steps", "beta_warmup", "random_steps"), lambda value: value >= 0, "0 or a positive integer"
        )
        checks.each(("action_max", "learning_rate", "max_grad_norm", "kl_decay"), is_positive, "a positive number")
        checks.each(("region", "centres_range"), is_positive, "a positive number")
        checks.each(("start",), lambda value: len(value) == 2, "two numbers")
        checks.each(("goal",), lambda value: len(value) in (0, 2), "two numbers, or none")
        self._check_extent(checks)
        checks.each(
            ("process_noise", "beta", "input_cost", "goal_weight", "region_weight", "start_range"),
            lambda value: value >= 0,
            "a number of at least 0",
        )
        checks.each(("mask_rate", "random_share"), is_share, "a number in [0, 1]")
        for name in ("num_steps", "history"):
            if checks.sound("window", name) and getattr(self, name) < self.window:
                problem = f"expected at least the window of {self.window} steps, received {getattr(self, name)}."
                checks.add(name, f"{name}: {problem} Remedy: a shorter window.")
        if checks.sound("prediction_horizon", "num_steps") and self.prediction_horizon >= self.num_steps:
            problem = f"expected fewer than num_steps = {self.num_steps}, received {self.prediction_horizon}."
            checks.add("prediction_horizon", f"prediction_horizon: {problem} Remedy: more num_steps.")
        if checks.sound("elites", "candidates") and self.elites > self.candidates:
            problem = f"expected at most the {self.candidates} candidates, received {self.elites}."
            checks.add("elites", f"elites: {problem} Remedy: more candidates.")
        self._check_parts(checks)

    def _check_extent(self, checks: Checks) -> None:
        """Points begin within the extent."""
        if checks.sound("extent", "start", "start_range") and self.extent:
            furthest = max(map(abs, self.start)) + self.start_range
            if self.extent <= furthest:
                problem = f"expected 0 or a number above {furthest:g}, where points begin, received {self.extent}."
                checks.add("extent", f"extent: {problem} Remedy: extent={furthest + 1:g}.")

    def _check_parts(self, checks: Checks) -> None:
        """Parts of the model that do not fit each other or the env."""
        ensemble = self.dynamics in ("ensemble", "rbf_ensemble")
        fisher = self.inputs in ("fisher_d", "fisher_a", "embedding")
        if checks.sound("inputs", "dynamics", "members"):
            if self.inputs == "disagreement" and (not ensemble or self.members < 2):
                problem = (
                    "'disagreement' expected dynamics='ensemble' or 'rbf_ensemble' of at least 2 members, received "
                    f"{self.dynamics!r}"
                )
                checks.add("inputs", f"inputs: {problem} with {self.members}. Remedy: dynamics='ensemble'.")
            if fisher and ensemble:
                problem = (
                    f"expected 'disagreement', 'rnd', 'goal' or 'random' with dynamics={self.dynamics!r}, received"
                )
                checks.add("inputs", f"inputs: {problem} {self.inputs!r}. Remedy: inputs='disagreement'.")
        self._check_goal(checks)
        counts = checks.sound("likelihood", "observation", "decoder") and self.likelihood == "poisson"
        if counts and (self.observation != "log_linear" or self.decoder == "linear"):
            problem = (
                "expected 'gaussian' unless observation='log_linear' and decoder is 'log_linear' or 'mlp', received"
            )
            checks.add("likelihood", f"likelihood: {problem} 'poisson'. Remedy: likelihood='gaussian'.")
        plane = checks.sound("observation", "observation_size") and self.observation == "identity"
        if plane and self.observation_size != 2:
            problem = f"expected 2 with observation='identity', received {self.observation_size}."
            checks.add("observation_size", f"observation_size: {problem} Remedy: observation_size=2.")

        self._check_known_map(checks)
        checks.idle(("random_hold",), "inputs", lambda inputs: inputs != "random")

    def _check_goal(self, checks: Checks) -> None:
        """A plan needs the goal in the model's coordinates."""
        if not checks.sound("inputs", "goal", "goal_weight", "region_weight", "known_map"):
            return
        planned = self.inputs == "goal" or self.goal_weight > 0
        if planned and not self.goal:
            problem = "expected a point with inputs='goal' or a goal_weight, received ()."
            checks.add("goal", f"goal: {problem} Remedy: goal=(1.0, 0.0), for example.")
        if (planned or self.region_weight > 0) and not self.known_map:
            problem = "expected True where plans lead to a goal or a region in the world's coordinates, received False."
            checks.add("known_map", f"known_map: {problem} Remedy: known_map=True.")
        if self.goal_weight > 0 and self.inputs in ("goal", "random"):
            problem = f"expected 0 with inputs={self.inputs!r}, which plan for no information, received"
            checks.add("goal_weight", f"goal_weight: {problem} {self.goal_weight}. Remedy: goal_weight=0.")

    def _check_known_map(self, checks: Checks) -> None:
        """The decoder can be the world's map."""
        if not checks.sound("known_map", "decoder", "observation", "latent_size") or not self.known_map:
            return
        wanted = {"log_linear": "log_linear", "linear": "linear", "identity": "linear"}.get(self.observation)
        if wanted is None:
            problem = (
                f"expected False with observation={self.observation!r}, which no decoder can equal, received True."
            )
            checks.add("known_map", f"known_map: {problem} Remedy: observation='linear'.")
        elif self.decoder != wanted:
            problem = f"expected {wanted!r} with known_map and observation={self.observation!r}, received"
            checks.add("decoder", f"decoder: {problem} {self.decoder!r}. Remedy: decoder={wanted!r}.")
        if self.latent_size != 2:
            problem = f"expected 2 with known_map, as the world has, received {self.latent_size}."
            checks.add("latent_size", f"latent_size: {problem} Remedy: latent_size=2.")

    @property
    def field(self) -> str:
        """Name of the vector field."""
        return self.env.removesuffix(FROM_ONE_PLACE)

    @property
    def updates_each_iteration(self) -> int:
        """Updates of one iteration."""
        return self.updates

    @property
    def experiences_per_iteration(self) -> int:
        """Steps that the updates of one iteration learn from, repeats counted."""
        return self.updates * self.minibatch_size * self.window


_CYCLE = ActiveDynamicsConfig(
    # Episodes are short and end well outside of where they begin, so that the data are not only attractors and the
    # states to which a planner pushes.
    max_episode_steps=50,
    extent=3.0,
    dynamics="mlp",
    inputs="embedding",
    history=2_500,
    bound="predictive",
)

# No start is ever drawn anew: what lies off the field's own ways is seen by those who push towards it. Beliefs follow
# from one observation through known channels, so that the field is all there is to learn.
_FROM_ONE_PLACE = ActiveDynamicsConfig(
    num_envs=8,
    num_steps=10,
    total_steps=1_440,
    observation="linear",
    likelihood="gaussian",
    decoder="linear",
    known_map=True,
    encoder="mlp",
    centres=7,
    max_episode_steps=0,
    start_range=0.1,
    inputs="embedding",
    random_steps=80,
    plan_horizon=12,
    plan_rounds=2,
    elites=8,
    # points that are pushed out of the region tell nothing of it, and the model knows nothing there
    region_weight=100.0,
    window=10,
    minibatch_size=32,
    learning_rate=1e-2,
    bound="predictive",
    samples=1,
    mask_rate=0.0,
    beta_schedule="constant",
    prediction_horizon=9,
)

_PLACES: dict[str, dict[str, Any]] = {
    "limit_cycle": {"start": (1.0, 0.0)},
    "double_limit_cycle": {"start": (1.0, 0.0)},
    "van_der_pol": {"start": (2.0, 0.0), "action_max": 1.0, "centres_range": 3.0},
    "duffing": {"start": (1.0, 0.0)},
    "snowman": {"start": (1.0, 1.0)},
    "multi_attractor": {"action_max": 1.0},
}
"""On a limit cycle or in a well of each field."""

ACTIVE_DYNAMICS_PRESETS: dict[str, ActiveDynamicsConfig] = {
    name: dataclasses.replace(_CYCLE, env=name) for name in _PLACES
} | {
    f"{name}{FROM_ONE_PLACE}": dataclasses.replace(_FROM_ONE_PLACE, env=f"{name}{FROM_ONE_PLACE}", **place)
    for name, place in _PLACES.items()
}
"""Settings by field."""
