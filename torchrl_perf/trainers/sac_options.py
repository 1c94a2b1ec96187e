"""Soft actor-critic below a policy over options, with every step of the loop on the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_perf import envs
from torchrl_perf.functional.masked import (
    gumbel_argmax,
    masked_entropy,
    masked_expectation,
    masked_kl,
    masked_log_softmax,
)
from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.metrics import DeviceMetrics, OptionUsage
from torchrl_perf.modules import EnsembleQ, MixedSequential
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.option_actor import OptionActor, OptionConditioned, OptionNormalHead, OptionPolicy
from torchrl_perf.modules.option_set import (
    ACTIVE_KEY,
    AGE_KEY,
    AVAILABLE_KEY,
    LOG_PROB_KEY,
    OPTION_KEY,
    START_KEY,
    OptionSet,
)
from torchrl_perf.modules.options import OptionController
from torchrl_perf.objectives.options import OptionLoss
from torchrl_perf.objectives.sac import VALUE_KEY, DeviceSACLoss
from torchrl_perf.replay import OptionReplay
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share
from torchrl_perf.trainers.networks import NETWORK_SETTINGS
from torchrl_perf.trainers.normalization import NORMALIZATION_SETTINGS
from torchrl_perf.trainers.off_policy.actor_critic import ActorCritic, Pass, Passes, actor_layers
from torchrl_perf.trainers.off_policy.algorithm import Setup, Update
from torchrl_perf.trainers.off_policy.slice_memory import SLICE_MEMORY_SETTINGS
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.sac import (
    Draw,
    SACConfig,
    SACPasses,
    keep_temperature,
    make_sac_loss,
    sac_target_share,
    temperature_groups,
)
from torchrl_perf.trainers.spaces import continuous_action, vector_observation
from torchrl_perf.transforms import OptionSegments, OptionState

_OF_RETURNS = ("option_clip", "option_capacity")
_MEANS_OF_CHOICE = ("option_entropy", "option_value", "option_kl")
LEAST_ENTROPY_COEFF = 1e-6
"""In place of a weight of 0, with which the choice is the best option."""
OF_ACTOR = "actor_option"  # of a sample, the options that the actor learns below, where they are others
CHOICES = "choices"  # below it an update's sample holds the choices of options to learn from


@dataclass(frozen=True)
class SACOptionsConfig(SACConfig):
    """Every choice of a run of SAC (arXiv:1812.05905) below a policy over options (Sutton, Precup and Singh, 1999).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "sac-options"
    presets_in: ClassVar[str] = "trainers.sac_options:SAC_OPTIONS_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:SAC_OPTIONS"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*SACConfig.fixed_by_checkpoint, "option_capacity")
    not_taken: ClassVar[tuple[str, ...]] = (*NETWORK_SETTINGS, *SLICE_MEMORY_SETTINGS)
    not_normalized: ClassVar[tuple[str, ...]] = NORMALIZATION_SETTINGS  # choices are drawn from a memory of their own

    env: str = "Ferry"
    """The package's task that has options, Ferry; any name beside env= and options=."""
    num_steps: int = 10
    """Steps of each env in one iteration (T)."""
    learning_starts: int = 5_000
    """Frames collected with random options and the actor's first actions before the first update."""
    option_learning: Literal["returns", "critic"] = "returns"
    """What the choice of an option learns from: the returns of the choices that were made, weighed by their advantage;
    or, at every state of a sample, what the critics say of all options that may begin there."""
    option_relabel: float = 0.0
    """Share of a sample's rows that are learnt from as steps of another option, drawn among those that may begin in
    their state and, for the critics, whose range holds their action."""
    option_interrupt: bool = False
    """option_learning="critic": whether an option ends, from its minimum duration on, where the choice likes another
    one better that may begin there; not while it explores, but in what is learnt."""
    option_learning_rate: float = 3e-3
    """Adam's step size for the policy over options and its values."""
    option_temperature: float = 1.0
    """What the logits of the choice of an option are divided by."""
    option_entropy_coeff: float = 0.01
    """Weight of the entropy of that choice, beside standardised advantages, or beside values in units of the reward
    where the choice learns from the critics."""
    option_clip: float = 0.2
    """option_learning="returns": clipping range of the ratio to the probability with which an option was chosen."""
    option_capacity: int = 2_000
    """option_learning="returns": choices of options that are kept to learn from; at least num_envs * num_steps."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("option_learning_rate", "option_temperature"), is_positive, "a positive number")
        checks.each(("option_entropy_coeff",), lambda value: value >= 0, "a number of at least 0")
        checks.each(("option_relabel",), is_share, "a number in [0, 1]")
        if self.option_interrupt is True and self.option_learning == "returns":
            problem = "expected False with option_learning='returns', whose choice knows no values, received True."
            checks.add("option_interrupt", f"option_interrupt: {problem} Remedy: False, or option_learning='critic'.")
        checks.each(("option_clip",), lambda value: 0 < value < 1, "a number in (0, 1)")
        checks.each(("option_capacity",), is_count, "a positive integer")
        checks.idle(_OF_RETURNS, "option_learning", lambda learning: learning == "critic")
        sound = self.keeps_choices and checks.sound("num_envs", "num_steps", "option_capacity")
        if sound and self.option_capacity < self.batch_size:
            checks.add(
                "option_capacity",
                f"option_capacity: expected at least num_envs * num_steps = {self.batch_size}, the choices that one "
                f"iteration may make, received {self.option_capacity}. Remedy: a larger one.",
            )

    @property
    def keeps_choices(self) -> bool:
        """Whether choices of options are kept to learn from."""
        return self.option_learning == "returns"


SAC_OPTIONS_PRESETS: dict[str, SACOptionsConfig] = {
    "Ferry": SACOptionsConfig(
        total_steps=24_000,
        capacity=50_000,
        updates_per_iteration=8,
        learning_starts=480,
        gamma=0.97,
        actor_learning_rate=3e-3,
        critic_learning_rate=3e-3,
        initial_temperature=0.1,
        learn_temperature=False,
        tau=0.01,
        hidden_size=32,
    ),
}
"""Settings for each task, by env name."""


class OptionNetworks:
    """Networks that are told which option runs, and those that choose the options, on ``observation``.

    Args:
        config: gives widths, activation, precision and the temperature of the choice.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def actor(self, observation: TensorSpec, action: TensorSpec, options: OptionSet) -> OptionActor:
        """An actor that is told the option."""
        layers = self.layers(observation.shape[-1] + options.num_options, 2 * action.shape[-1])
        network = MixedSequential(*layers, precision=self.config.precision).to(action.device)
        return OptionActor(network, options, spec=action)

    def critic(self, observation: TensorSpec, action: TensorSpec, options: OptionSet) -> TensorDictModule:
        """Critics that are told the option."""
        config, count = self.config, options.num_options
        net = EnsembleQ(
            config.num_critics,
            observation.shape[-1] + action.shape[-1] + count,
            hidden_sizes=(config.hidden_size, config.hidden_size),
            activation=config.activation,
            precision=config.precision,
            device=cast("Any", action.device),
        )
        return TensorDictModule(OptionConditioned(net, count), ["observation", "action", ACTIVE_KEY], [VALUE_KEY])

    def choice(self, specs: Any, options: OptionSet, device: torch.device) -> nn.Module:
        """A number for each option, logits of the choice or values, from ``observation``."""
        layers = self.layers(vector_observation(specs).shape[-1], options.num_options)
        return MixedSequential(*layers, precision=self.config.precision).to(device)

    def controller(self, selector: nn.Module, options: OptionSet, example: TensorDictBase) -> OptionController:
        """The policy over the options, on logits of :meth:`choice`."""
        config = self.config
        given = {"temperature": config.option_temperature, "interrupts": config.option_interrupt}
        return OptionController(selector, options, example=example, **given)

    def layers(self, in_features: int, out_features: int) -> list[nn.Module]:
        """The layers of an actor or a choice."""
        return actor_layers(in_features, out_features, self.config)


class OptionPasses(Passes):
    """Those of soft actor-critic, and with the actor's the loss of the policy over options.

    The choice of an option is learnt as an action that lasts, from its discounted reward, duration and true end
    (:class:`OptionLoss`); a sample has choices below ``"choices"``. Or it is learnt from the critics, which know the
    value of each option, since their targets are those of intra-option learning (Sutton, Precup and Singh, 1999): then
    the choice is to be soft actor-critic's, ``p(o) = softmax(U(s, o) / c)`` over the options that may begin there,
    where ``U`` is the value of the actor's fresh action below the option, its entropy included (arXiv:1910.07207), and
    the loss is ``KL(p || pi)``. Each sample then teaches the choice in all its states, without the noise of returns.
    The divergence the other way round, soft actor-critic's own loss, has the same optimum but the factor ``pi(o)`` in
    its gradient: an option that was once thought little of is not found again when its value has been learnt.

    Args:
        sac: the passes of actor and critics.
        loss: with ``loss.option``.
        algorithm: gives the actor's optimiser and the parameters of the choice.
    """

    def __init__(self, sac: SACPasses, algorithm: "SACOptions") -> None:
        self.sac, self.loss = sac, algorithm.loss
        self._optimizer, self.controller = algorithm.actor_optimizer, algorithm.controller
        self._read = {*algorithm.loss.actor.in_keys, *algorithm.loss.critic.in_keys} - {ACTIVE_KEY, "action"}
        self._from_critic = algorithm.learns_from_critic
        self._coeff = max(algorithm.config.option_entropy_coeff, LEAST_ENTROPY_COEFF)
        part = self._critic_part if self._from_critic else self._option_part
        self._option_loss = Differentiable(self.loss, part, algorithm.option_params)

    def noise(self, sample: TensorDictBase) -> Tensor | None:
        """The noise of the actor's draws."""
        return self.sac.noise(sample)

    def context(self, sample: TensorDictBase, noise: Tensor | None, *, to_actor: bool = True) -> Draw:
        """Actions for states and next states."""
        return self.sac.context(_for_actor(sample), noise, to_actor=to_actor)

    def critic(self, sample: TensorDictBase, context: Draw, weight: float | Tensor = 1.0) -> Pass:
        """The critics' errors, below the option of the next state."""
        return self.sac.critic(sample, context, weight)

    def actor(self, sample: TensorDictBase, context: Draw, weight: float | Tensor = 1.0) -> Pass:
        """The losses of actor, temperature and controller."""
        below = self.sac.actor(_for_actor(sample), context, weight)
        learnt = (sample, self.option_values(sample)) if self._from_critic else sample.get(CHOICES)
        (loss,), row, pull = self._option_loss.pullback(learnt)
        gradients, _ = pull([self._optimizer.cotangent(loss) * weight])
        means = dict(zip(_MEANS_OF_CHOICE, row, strict=False))
        losses = {**below.losses, "loss_option": loss}
        return Pass(losses, {**below.means, **means}, below.gradients + gradients)

    @torch.no_grad()
    def option_values(self, sample: TensorDictBase) -> Tensor:
        """``[B, O]``: what the critics say of each option in the states ``[B]``, of one fresh action below each."""
        rows, controller = self.rows(sample), self.controller
        count = controller.num_options
        several = {key: rows.get(key).repeat_interleave(count, 0) for key in self._read}
        option = torch.arange(count, device=controller.fallback.device).repeat(len(rows))
        every = TensorDict({**several, ACTIVE_KEY: option}, len(option), device=option.device)
        action, log_prob = self.loss.sample_states(every)
        value = self.loss.values(self.loss.critic, every, action).amin(-1) - self.loss.alpha * log_prob
        return value.view(len(rows), count)

    def _critic_part(self, context: tuple[TensorDictBase, Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        (sample, values), controller = context, self.controller
        rows = self.rows(sample)
        candidates = controller.candidates(rows, controller.available(rows))
        log_probs = controller.log_probs(rows, candidates)
        wanted = masked_log_softmax(values / self._coeff, candidates)
        means = masked_entropy(log_probs), masked_expectation(log_probs, values)
        return (masked_kl(wanted, log_probs).mean(),), tuple(row.detach().mean() for row in means)

    def _option_part(self, choices: TensorDictBase) -> tuple[tuple[Tensor, ...], ...]:
        losses = cast("OptionLoss", self.loss.option)(choices.copy())
        total = losses["loss_option_policy"] + losses["loss_option_value"] + losses["loss_option_entropy"]
        return (total,), tuple(losses[name] for name in ("option_entropy", "option_value", "option_kl"))


def _any_of(allowed: Tensor) -> Tensor:
    """An index for each row of ``[*, O]``, all that are allowed with equal chances."""
    return gumbel_argmax(torch.where(allowed, 0.0, -torch.inf))


def _for_actor(sample: TensorDictBase) -> TensorDictBase:
    """A sample as the actor learns from it."""
    option = sample.get(OF_ACTOR, None)
    return sample if option is None else sample.copy().set(ACTIVE_KEY, option)


class SACOptions(ActorCritic):
    """SAC whose actor and critics are told which option runs, and a policy that chooses the options.

    Actor, critics and controller learn in the same update. The option of a next state is drawn from the present
    controller, so that the critics' targets weigh going on and ending as intra-option learning does. Where an update is
    split for want of memory, advantages of the choices are standardised within each part.

    Args:
        config: every choice of the run.
        options: names and rules; by default those of ``policy``, or what ``find_options`` gives.
        policy: an :class:`OptionPolicy` of your own.
        option_value: maps what the controller reads to values of the options ``[*, O]``, or of the state ``[*, 1]``.
        critic: a TensorDict module that reads observations, action and "active_option".
        networks: makes those that are not given.
        find_options: gives the options of an env; by default those of the package's task that the config names.
        usage: gives arguments of the :class:`OptionUsage` by name.
        anneals_choice: whether the temperature of the choice follows the controller's schedule.

    Attributes:
        controller: the policy over options.
        usage: share of the steps that each option runs.
        learns_from_critic: whether the choice is learnt from the critics; there are no segments and choices then.
        segments: makes choices of the steps of a batch.
        choices: those that have ended, to learn from.

    Raises:
        ValueError: for a policy of another kind; at :meth:`build`, for parts that do not fit each other.
    """

    config: SACOptionsConfig
    loss: DeviceSACLoss
    reads_vector = True
    actor_losses = ("loss_actor", "loss_alpha", "loss_option")
    actor_means = ("alpha", "entropy", *_MEANS_OF_CHOICE)
    metric_names = ("option/max_usage", "option/num_used", "option/duration", "option/choice_rate")
    excluded_keys = (*OptionNormalHead.param_keys, "action_log_prob")
    carried = (OPTION_KEY, AGE_KEY)
    fills_at_random = False

    def __init__(
        self,
        config: SACOptionsConfig,
        *,
        options: OptionSet | None = None,
        policy: OptionPolicy | None = None,
        option_value: nn.Module | None = None,
        critic: nn.Module | None = None,
        networks: OptionNetworks | None = None,
        find_options: Callable[[EnvBase | None], OptionSet] | None = None,
        usage: Callable[[OptionSet], Mapping[str, Any]] = lambda options: {},
        anneals_choice: bool = False,
    ) -> None:
        if policy is not None and not isinstance(policy, OptionPolicy):
            raise ValueError(
                f"policy: expected an OptionPolicy, received {type(policy).__name__}. Remedy: OptionPolicy(controller, "
                "actor), the same in the collector and here."
            )
        self._policy, self._option_value = policy, option_value
        self._options = options if policy is None else policy.controller.options
        self._find_options = find_options or (lambda env: task_options(config.env))
        self.networks = networks or OptionNetworks(config)
        self._usage, self._anneals_choice = usage, anneals_choice
        self.learns_from_critic = config.option_learning == "critic"
        if self.learns_from_critic:
            if option_value is not None:
                raise ValueError(
                    "option_value: expected None with option_learning='critic', which reads the values off the critics,"
                    f" received {type(option_value).__name__}. Remedy: option_learning='returns'."
                )
            self.actor_means = tuple(name for name in self.actor_means if name != "option_kl")
        super().__init__(config, actor=None if policy is None else policy.actor, critic=critic)

    # -- construction -------------------------------------------------------------------------------------------------

    @property
    def options(self) -> OptionSet:
        """Names and rules of the options; known once there is an env."""
        assert self._options is not None
        return self._options

    def fitted(self, env: EnvBase) -> EnvBase:
        """The env with the state of the options."""
        return TransformedEnv(env, OptionState(self._options_of(env).num_options))

    def watch(self, metrics: DeviceMetrics, env: EnvBase | None) -> None:
        """Makes the shares of the steps that each option runs."""
        options = self._options_of(env)
        self.usage = OptionUsage(metrics, options.names, **self._usage(options))

    def summarise(self, row: dict[str, float]) -> dict[str, float]:
        """Adds how the options are used, and warns where they have collapsed; :class:`OptionUsage` has the limits."""
        return row | self.usage.check(row)

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> OptionActor:
        """An actor that is told the option."""
        return self.networks.actor(observation, action, self.options)

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> TensorDictModule:
        """Critics that are told the option."""
        return self.networks.critic(observation, action, self.options)

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> DeviceSACLoss:
        """The losses of soft actor-critic and, as ``loss.option``, that of the controller."""
        config, setup = self.config, self.setup
        loss = make_sac_loss(actor, critic, config, setup)
        if self._policy is None:
            example = cast("EnvBase", setup.env).fake_tensordict
            selector = self.networks.choice(setup.specs, self.options, setup.device)
            self.controller = self.networks.controller(selector, self.options, example())
        else:
            self.controller = self._policy.controller
        if self.learns_from_critic:
            loss.option = nn.ModuleDict({"actor_network": self.controller})  # at the place of the other loss's
            return loss
        loss.option = OptionLoss(
            self.controller,
            self._option_value or self.networks.choice(setup.specs, self.options, setup.device),
            clip=config.option_clip,
            entropy_coeff=config.option_entropy_coeff,
        )
        return loss

    def make_passes(self) -> OptionPasses:
        """The equations of soft actor-critic, and of the choice of options."""
        return OptionPasses(SACPasses(self.loss, self.critic_optimizer, self.actor_optimizer), self)

    def actor_groups(self) -> list[dict[str, Any]]:
        """Actor, temperature where it is learnt, and the policy over options with its values."""
        temperature = temperature_groups(self.loss, self.config)
        options = {"params": self.option_params, "lr": self.config.option_learning_rate}
        return [*super().actor_groups(), *temperature, options]

    @property
    def option_params(self) -> list[nn.Parameter]:
        """Parameters of the policy over options and of its values."""
        if self.learns_from_critic:
            return list(self.controller.parameters())
        option = cast("OptionLoss", self.loss.option)
        return [*option.controller.parameters(), *option.value.parameters()]

    def actor_of(self, policy: nn.Module) -> nn.Module:
        """The policy's actor."""
        return cast("OptionPolicy", policy).actor

    def policy_of(self, actor: nn.Module) -> OptionPolicy:
        """The controller and the actor; the given policy where there is one."""
        return self._policy or OptionPolicy(self.controller, actor)

    def build(self, setup: Setup) -> nn.Module:
        """Networks, losses and optimisers."""
        given = {"policy": self._policy, "option_value": self._option_value}
        refuse_recurrent(setup.owner, given, env=setup.env, own_state=self.carried)
        self.networks.config = self.config  # of several ranks, that of this rank's part
        policy = super().build(setup)
        self._following_option = setup.compiled(self.controller.following_option)
        self._relabelled = setup.compiled(self.relabelled)
        if self.config.option_relabel:
            low, high = action_bounds(continuous_action(setup.specs))
            middle, half = (high + low) / 2, (high - low) / 2
            parts = torch.tensor(self.options.action_ranges, dtype=low.dtype, device=low.device)
            self._ranges = middle + half * parts[:, :1], middle + half * parts[:, 1:]
        return policy

    def connect(self, collector: Any) -> None:
        """Makes the memory of the choices, which are of the form of a batch's."""
        if self.learns_from_critic:
            return
        config, example = self.config, collector.batch
        keys = [key for key in self.controller.in_keys if key not in (OPTION_KEY, AGE_KEY)]
        self.segments = OptionSegments(example, gamma=config.gamma, keys=None if self._policy else keys)
        rows = self.segments(example)
        self.segments.restart()
        self.choices = OptionReplay(rows, capacity=config.option_capacity, batch_size=config.minibatch_size)

    def _options_of(self, env: EnvBase | None) -> OptionSet:
        if self._options is None:
            self._options = self._find_options(env)
        return self._options

    # -- the loop -----------------------------------------------------------------------------------------------------

    def schedule(self) -> Mapping[str, Tensor]:
        """Step sizes, and the temperature of the choice of an option, where they change."""
        if self._anneals_choice:
            self.controller.step(self.config.batch_size)
        return super().schedule()

    def keep(self, batch: TensorDictBase) -> TensorDictBase:
        """Keeps the options that ended, and counts those that run; the transitions without what only choices need."""
        if not self.learns_from_critic:
            self.choices.extend(self.segments(batch))
        self.usage.update(batch.get(ACTIVE_KEY), batch.get(START_KEY))
        return batch.exclude(START_KEY, LOG_PROB_KEY, AVAILABLE_KEY)

    def experience(self) -> dict[str, Stateful]:
        """The options that run, and those that have ended."""
        if self.learns_from_critic:
            return {"option_usage": self.usage}
        return {"option_segments": self.segments, "option_choices": self.choices, "option_usage": self.usage}

    def update(self, sample: TensorDictBase, number: int) -> Update:
        """One step of critics, actor, temperature, controller and targets from ``sample [B]`` and as many choices."""
        if self.config.option_relabel:
            option, of_actor = self._relabelled(sample)
            sample.set(ACTIVE_KEY, option).set(("next", OPTION_KEY), option).set(OF_ACTOR, of_actor)
        sample.set(("next", ACTIVE_KEY), self._following_option(sample))
        if not self.learns_from_critic:
            sample.set(CHOICES, self.setup.repaired(self.choices.sample(len(sample))))
        return super().update(sample, number)

    @torch.no_grad()
    def relabelled(self, sample: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Options int64 ``[B]`` to learn from a sample's steps as, see ``option_relabel``: the critics and the actor.

        What an action brings is the same below every option that allows it, so that one step teaches the value of each
        (Sutton, Precup and Singh, 1999); without that, options that are hardly ever chosen are hardly ever learnt. The
        actor learns from its own actions: it may be asked for one below any option that may begin.
        """
        option, action = sample.get(ACTIVE_KEY), sample.get("action").unsqueeze(-2)
        low, high = self._ranges
        available = self.controller.available(sample)
        fits = ((action >= low) & (action <= high)).all(-1) & available
        chance = torch.rand(option.shape, dtype=torch.float32, device=option.device)
        # equal chances of those that fit
        found = [
            torch.where((chance < self.config.option_relabel) & which.any(-1), _any_of(which), option)
            for which in (fits, available)
        ]
        return found[0], found[1]

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        self.controller.write_following(rows)
        if not self.learns_from_critic:
            rows.set(CHOICES, self.setup.repaired(self.choices.sample(len(rows))))
        super().probe(rows)

    def target_share(self) -> float | Tensor:
        """``tau`` at each ``target_interval``-th update."""
        return sac_target_share(self.config, self.setup)

    def after_load(self) -> None:
        """A temperature that is not learnt stays that of the settings."""
        keep_temperature(self.loss, self.config)


class SACOptionsTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on :class:`SACOptions`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs] and an :class:`OptionState` transform; by default the package's
            task that the config names.
        collector: a collector that acts with the trainer's policy; by default a :class:`DeviceCollector` of the env.
        options: names and rules; by default those of the task.
        policy: an :class:`OptionPolicy` of your own; by default one on perceptrons. Where only a collector is given,
            its policy.
        option_value: maps what the controller reads to values of the options ``[*, O]``, or of the state ``[*, 1]``;
            by default a network of ``observation``.
        critic: a TensorDict module that reads observations, action and "active_option".

    Raises:
        ValueError: at construction, for actions that are not continuous and bounded, a task without options, or parts
            that do not fit each other.
    """

    def __init__(
        self,
        config: SACOptionsConfig,
        *,
        env: EnvBase | None = None,
        collector: BaseCollector | None = None,
        options: OptionSet | None = None,
        policy: OptionPolicy | None = None,
        option_value: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        policy = policy if policy is not None else getattr(collector, "policy", None)
        parts: dict[str, Any] = {"options": options, "policy": policy, "option_value": option_value, "critic": critic}
        super().__init__(config, SACOptions(config, **parts), env=env, collector=collector)


def task_options(name: str) -> OptionSet:
    """The options of one of the package's tasks.

    Raises:
        ValueError: for a task that has none.
    """
    if name != "Ferry":
        raise ValueError(
            f"env: expected a task that has options, Ferry, received {name!r}. Remedy: that one, or a trainer made "
            "with env= and options=."
        )
    ferry = envs.Ferry
    return OptionSet(ferry.option_names, termination=ferry.termination, action_range=ferry.option_ranges)
