"""Soft actor-critic below a policy over options, with every step of the loop on the device."""

from typing import Any, ClassVar, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_perf import envs
from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.metrics import OptionUsage
from torchrl_perf.modules import EnsembleQ, MixedSequential
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
from torchrl_perf.replay import DeviceReplayBuffer, OptionReplay
from torchrl_perf.trainers.off_policy_actor_critic import Row, Step, actor_layers
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.sac import Draw, SACTrainer
from torchrl_perf.trainers.sac_options_config import SACOptionsConfig
from torchrl_perf.trainers.spaces import vector_observation
from torchrl_perf.transforms import OptionSegments, OptionState

CHOICES = "choices"  # below it an update's sample holds the choices of options to learn from


class SACOptionsTrainer(SACTrainer):
    """SAC whose actor and critics are told which option runs, and a policy that chooses the options.

    The choice of an option is learnt as an action that lasts, from its discounted reward, duration and true end
    (:class:`OptionLoss`), with the actor and in the same update. The option of a next state is drawn from the present
    controller, so that the critics' targets weigh going on and ending as intra-option learning does. Where an update is
    split for want of memory, advantages of the choices are standardised within each part.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs] and an :class:`OptionState` transform; by default the package's
            task that the config names.
        collector: a collector that acts with the trainer's policy; by default a :class:`DeviceCollector` of the env.
        options: names and rules; by default those of the task.
        policy: an :class:`OptionPolicy` of your own; by default :meth:`make_controller` and :meth:`make_actor`. Where
            only a collector is given, its policy.
        option_value: maps what the controller reads to values of the options ``[*, O]``, or of the state ``[*, 1]``;
            by default a network of ``observation``.
        critic: a TensorDict module that reads observations, action and "active_option".

    Attributes:
        loss: actor, critics, target critics, temperature; ``loss.option`` is the loss of the controller.
        usage: share of the steps that each option runs.

    Raises:
        ValueError: at construction, for actions that are not continuous and bounded, a task without options, or parts
            that do not fit each other.
    """

    statistics: ClassVar[tuple[str, ...]] = (
        *SACTrainer.statistics[:3],
        "loss_option",
        *SACTrainer.statistics[3:5],
        "option_entropy",
        "option_value",
        "option_kl",
        *SACTrainer.statistics[5:],
    )
    losses: ClassVar[tuple[str, ...]] = (*SACTrainer.losses, "loss_option")
    config: SACOptionsConfig
    excluded_keys = (*OptionNormalHead.param_keys, "action_log_prob")

    carried = (OPTION_KEY, AGE_KEY)
    fills_at_random = False

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
        if policy is not None and not isinstance(policy, OptionPolicy):
            raise ValueError(
                f"policy: expected an OptionPolicy, received {type(policy).__name__}. Remedy: OptionPolicy(controller, "
                "actor), the same in the collector and here."
            )
        self._policy, self._option_value = policy, option_value
        self._options = options if policy is None else policy.controller.options
        actor = None if policy is None else policy.actor
        parts = {"policy": policy, "option_value": option_value}
        refuse_recurrent(type(self).__name__, parts, env=env, own_state=self.carried)
        super().__init__(config, env=env, collector=collector, actor=actor, critic=critic)

    # -- construction -------------------------------------------------------------------------------------------------

    @property
    def options(self) -> OptionSet:
        """Names and rules of the options."""
        if self._options is None:
            self._options = task_options(self.config.env)
        return self._options

    def make_env(self) -> EnvBase:
        """The package's task that the config names, with the state of the options."""
        return TransformedEnv(super().make_env(), OptionState(self.options.num_options))

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> OptionActor:
        """An actor that is told the option."""
        size = observation.shape[-1] + self.options.num_options
        layers = actor_layers(size, 2 * action.shape[-1], self.config)
        network = MixedSequential(*layers, precision=self.config.precision).to(action.device)
        return OptionActor(network, self.options, spec=action)

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> TensorDictModule:
        """Critics that are told the option."""
        config, count = self.config, self.options.num_options
        net = EnsembleQ(
            config.num_critics,
            observation.shape[-1] + action.shape[-1] + count,
            hidden_sizes=(config.hidden_size, config.hidden_size),
            activation=config.activation,
            precision=config.precision,
            device=cast("Any", action.device),
        )
        return TensorDictModule(OptionConditioned(net, count), ["observation", "action", ACTIVE_KEY], [VALUE_KEY])

    def make_option_network(self) -> nn.Module:
        """A number for each option, logits of the choice or values, from ``observation``."""
        specs = cast("Any", self.env if self.env is not None else self._specs)
        size = vector_observation(specs).shape[-1]
        layers = actor_layers(size, self.options.num_options, self.config)
        return MixedSequential(*layers, precision=self.config.precision).to(self.device)

    def make_controller(self) -> OptionController:
        """A policy over the options that reads ``observation``."""
        return OptionController(
            self.make_option_network(),
            self.options,
            example=cast("EnvBase", self.env).fake_tensordict(),
            temperature=self.config.option_temperature,
        )

    def actor_of(self, policy: nn.Module) -> nn.Module:
        """The policy's actor."""
        return cast("OptionPolicy", policy).actor

    def policy_of(self, actor: nn.Module) -> OptionPolicy:
        """The controller and the actor; the given policy where there is one."""
        return self._policy or OptionPolicy(self.controller, actor)

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> DeviceSACLoss:
        """The losses of soft actor-critic and, as ``loss.option``, that of the controller."""
        config = self.config
        loss = super().make_loss(actor, critic)
        self.controller = self.make_controller() if self._policy is None else self._policy.controller
        loss.option = OptionLoss(
            self.controller,
            self._option_value or self.make_option_network(),
            clip=config.option_clip,
            entropy_coeff=config.option_entropy_coeff,
        )
        return loss

    def build(self) -> nn.Module:
        """See the parent."""
        policy = super().build()
        self._following_option = self.compiled(self.controller.following_option)
        return policy

    def _make_optimizers(self) -> None:
        super()._make_optimizers()
        self._option_loss = Differentiable(self.loss, self._option_part, self._option_params)

    @property
    def _option_params(self) -> list[nn.Parameter]:
        option = cast("OptionLoss", self.loss.option)
        return [*option.controller.parameters(), *option.value.parameters()]

    def actor_groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Actor, temperature where it is learnt, and the policy over options with its values."""
        return [*super().actor_groups(), (self._option_params, self.config.option_learning_rate)]

    def _make_state(self) -> None:
        super()._make_state()
        self.usage = OptionUsage(self.metrics, self.options.names)

    def _make_buffer(self) -> DeviceReplayBuffer:
        config, example = self.config, self.collector.batch
        keys = [key for key in self.controller.in_keys if key not in (OPTION_KEY, AGE_KEY)]
        self.segments = OptionSegments(example, gamma=config.gamma, keys=None if self._policy else keys)
        rows = self.segments(example)
        self.segments.restart()
        self.choices = OptionReplay(rows, capacity=config.option_capacity, batch_size=config.minibatch_size)
        return super()._make_buffer()

    def experience(self) -> dict[str, Stateful]:
        """The options that run, and those that have ended."""
        return {"option_segments": self.segments, "option_choices": self.choices, "option_usage": self.usage}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def store(self, batch: TensorDictBase) -> None:
        """Writes the transitions, and the options that ended, to their buffers."""
        self.choices.extend(self.segments(batch))
        self.usage.update(batch.get(ACTIVE_KEY), batch.get(START_KEY))
        super().store(batch.exclude(START_KEY, LOG_PROB_KEY, AVAILABLE_KEY))

    def summarise(self, row: dict[str, float]) -> dict[str, float]:
        """Adds how the options are used to a row, and warns where they have collapsed; see :class:`OptionUsage`."""
        return row | self.usage.check(row)

    def update(self, sample: TensorDictBase) -> None:
        """One step of critics, actor, temperature, controller and targets from ``sample [B]`` and as many choices."""
        sample.set(("next", ACTIVE_KEY), self._following_option(sample))
        super().update(sample.set(CHOICES, self._draw_choices(len(sample))))

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        self.controller.write_following(rows)
        super().probe(rows.set(CHOICES, self._draw_choices(len(rows))))

    def _draw_choices(self, rows: int) -> TensorDictBase:
        choices = self.choices.sample(rows)
        return choices[self.guard.repair(choices)[1]] if self.guard.repairs else choices

    # -- parts of an update -------------------------------------------------------------------------------------------

    def actor_gradients(self, sample: TensorDictBase, context: Draw, weight: float | Tensor = 1.0) -> Step:
        """Loss of actor, temperature and controller, statistics, and the gradients of the loss times ``weight``."""
        total, (actor, temperature, *others), grads = super().actor_gradients(sample, context, weight)
        (loss,), row, pull = self._option_loss.pullback(sample.get(CHOICES))
        option_grads, _ = pull([self.actor_optimizer.cotangent(loss) * weight])
        return total + loss, (actor, temperature, loss, *others, *row), grads + option_grads

    def _option_part(self, choices: TensorDictBase) -> tuple[Row, Row]:
        losses = cast("OptionLoss", self.loss.option)(choices.copy())
        total = losses["loss_option_policy"] + losses["loss_option_value"] + losses["loss_option_entropy"]
        return (total,), tuple(losses[name] for name in ("option_entropy", "option_value", "option_kl"))


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
