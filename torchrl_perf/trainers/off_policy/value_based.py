"""What algorithms of discrete action values share: a network, its delayed copy, one optimiser, epsilon-greediness."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.functional.priority_tree import LEAST_PRIORITY
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.mlp import FusedMLP, hidden_layers
from torchrl_perf.modules.values.q_networks import DuelingMLP
from torchrl_perf.parallel import SharedGradients
from torchrl_perf.runtime.oom import parts_of
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share
from torchrl_perf.trainers.memory import head_inputs, make_trunk, refuse_memory, remembers
from torchrl_perf.trainers.networks import CONVOLUTION_SETTINGS, Activation, NetworkSettings
from torchrl_perf.trainers.normalization import make_normalization, normalized
from torchrl_perf.trainers.off_policy.algorithm import Algorithm, Setup, Update, with_steps
from torchrl_perf.trainers.off_policy.config import OffPolicyConfig
from torchrl_perf.trainers.off_policy.shard_weights import weight_of
from torchrl_perf.trainers.off_policy.slice_memory import (
    SLICE_MEMORY_SETTINGS,
    OwnFeatures,
    SliceMemorySettings,
    slice_memory_of,
)
from torchrl_perf.trainers.optim.optimization import adam_of
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.spaces import Inputs, single_choice


@dataclass(frozen=True)
class ValueConfig(SliceMemorySettings, NetworkSettings, OffPolicyConfig):
    """A run that learns a value for each discrete action and acts on the greatest, or at random now and then.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed_by_checkpoint,
        *("hidden_size", "hidden_sizes", "activation", "layer_norm"),
        *CONVOLUTION_SETTINGS,
        "dueling",
        *SLICE_MEMORY_SETTINGS,
    )

    double: bool = True
    """Let the online network choose the next action that the target network values (arXiv:1509.06461)."""
    dueling: bool = False
    """Learn the state's value and the actions' advantages apart (arXiv:1511.06581)."""
    learning_rate: float = 1e-3
    """Adam's step size at the start."""
    anneal_learning_rate: bool = False
    """Lower the learning rate linearly to 0 over the run."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient."""
    tau: float = 1.0
    """Share of the online network that goes into the target network at each of its updates; 1 copies it."""
    target_interval: int = 100
    """Updates between two updates of the target network."""
    eps_start: float = 1.0
    """Probability of a random action at the start."""
    eps_end: float = 0.05
    """Probability of a random action after eps_frames."""
    eps_frames: int = 50_000
    """Frames in which that probability falls, linearly; those before learning_starts count."""
    hidden_size: int = 64
    """Width of the network's hidden layers, where hidden_sizes are not given."""
    activation: Activation = "relu"
    """Activation of the hidden layers."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("hidden_size", "target_interval", "eps_frames"), is_count, "a positive integer")
        checks.each(("learning_rate", "max_grad_norm"), is_positive, "a positive number")
        checks.each(("eps_start", "eps_end"), is_share, "a number in [0, 1]")
        checks.each(("tau",), lambda value: 0 < value <= 1, "a number in (0, 1]")


class ValueRows(NamedTuple):
    """What a loss of action values says of rows ``[b]``."""

    loss: Tensor
    """0-d, with a gradient in the online network."""
    td_error: Tensor
    """``[b]``, errors or losses of the rows, whose size is their priority; detached."""
    q_value: Tensor
    """Mean value of the actions taken, 0-d, detached."""


class ValueLoss(Protocol):
    """A loss of an online network against its delayed copy, such as ``QuantileDQNLoss`` and ``DeviceC51Loss``."""

    @property
    def target_network(self) -> nn.Module:
        """The delayed copy, without gradients."""
        ...

    def losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of :class:`ValueRows` for a sample ``[b]``."""
        ...


class ValueAlgorithm(Algorithm):
    """Learns a value for each action by temporal differences, and acts epsilon-greedily on the values.

    An algorithm writes :meth:`make_policy` and :meth:`make_loss`.

    Args:
        config: every choice of the run.
        policy: an :class:`EpsilonGreedy` on a network of your own; by default a collector's, or :meth:`make_policy`.
        make_policy: in place of :meth:`make_policy`, such as a system's, whose networks are its own.

    Attributes:
        greedy: the :class:`EpsilonGreedy` of the policy: the policy itself, or what acts on its memory.
        loss: what is minimised, with the target network.
        q_network: the online network of action values.
        target_network: its delayed copy.
        optimizer: Adam of the online network.
    """

    statistics = ("loss", "td_error", "q_value", "grad_norm")
    losses = ("loss",)
    metric_names = ("train/epsilon", "train/learning_rate")

    def __init__(
        self,
        config: Any,
        *,
        policy: EpsilonGreedy | None = None,
        make_policy: Callable[[EnvBase, Any], EpsilonGreedy] | None = None,
    ) -> None:
        self.config = config
        self._given_policy, self._make_policy = policy, make_policy

    # -- what an algorithm writes -------------------------------------------------------------------------------------

    @abstractmethod
    def make_policy(self, env: EnvBase) -> nn.Module:
        """The policy for an env, of a network as the config has it: an :class:`EpsilonGreedy`, or one on a memory."""

    @abstractmethod
    def make_loss(self, network: nn.Module, policy: EpsilonGreedy) -> ValueLoss:
        """The loss of a network, and the network's delayed copy; the policy has the keys that are read."""

    # -- what the trainer asks for ------------------------------------------------------------------------------------

    def build(self, setup: Setup) -> nn.Module:
        """The online network, its target, the optimiser; the policy is epsilon-greedy on the online network."""
        given = self._given_policy if self._given_policy is not None else setup.collecting
        refuse_recurrent(setup.owner, {"policy": given}, env=setup.env)
        if remembers(self.config):
            refuse_memory(self.config, {"policy": given}, setup.env)
        policy = given or self._default_policy(cast("EnvBase", setup.specs))
        greedy = cast("Any", policy)[-1] if remembers(self.config) else policy
        if not isinstance(greedy, EpsilonGreedy):
            raise ValueError(
                f"policy: expected an EpsilonGreedy, whose network is trained, received {type(policy).__name__}. "
                "Remedy: EpsilonGreedy(network, spec=action_spec), the same in the collector and here."
            )
        config, self.policy, self.greedy, self.setup = self.config, policy, greedy, setup
        self.q_network = setup.acceleration.module(cast("nn.Module", greedy.network))
        self.loss = self.make_loss(self.q_network, greedy)
        self.target_network = self.loss.target_network
        named, self._target = dict(self.q_network.named_parameters()), list(self.target_network.parameters())
        self.slices = slice_memory_of(policy, config, both=config.double)
        if self.slices is not None:
            setup.acceleration.policy(self.slices.online)
            self.slices.delay(self.target_network)
            named |= {f"memory.{name}": parameter for name, parameter in self.slices.online.named_parameters()}
            self._target += self.slices.delayed.parameters()
            self.excluded_keys = self.slices.written
        self._online = list(named.values())
        self.optimizer = adam_of(config, self._online, setup.acceleration)
        self._shared = SharedGradients(self._online, ranks=setup.ranks, broadcast=False, compile=setup.compiled)
        self.parameter_names = list(named)
        self._losses_fn = setup.compiled(self.sample_losses)
        self._conclude_fn = setup.compiled(self._conclude)
        self._shared_conclude_fn = setup.compiled(self._shared_conclude)
        self._move_target_fn = setup.compiled(self._move_target)
        return policy

    def parts(self) -> dict[str, Stateful]:
        """Policy with its schedule, target network and target memory, optimiser."""
        delayed: dict[str, Stateful] = {} if self.slices is None else {"target_memory": self.slices.delayed}
        return {"policy": self.policy, "target_network": self.target_network, **delayed, "optimizer": self.optimizer}

    def schedule(self) -> Mapping[str, Tensor]:
        """Epsilon of the next collection, learning rate of this iteration's updates."""
        config, rate = self.config, self.optimizer.learning_rate
        self.greedy.step(config.batch_size)
        if config.anneal_learning_rate:
            rate.copy_(config.learning_rate * (1.0 - self.setup.progress()))
        return {"train/epsilon": self.greedy.epsilon, "train/learning_rate": rate}

    def update(self, sample: TensorDictBase, number: int) -> Update:
        """One step of Adam on the temporal differences of ``sample [B]``, then the target network."""
        attempt = functools.partial(self._gradients, sample)
        rows = self.setup.micro.run(attempt, len(sample), undo=self.optimizer.zero_grad)
        if self.setup.ranks.several:
            rows, flat = self._agreed(rows, weight_of(sample, self.setup.ranks))
            step = self._shared_conclude_fn(*rows, flat)
        else:
            step = self._conclude_fn(*rows, self.optimizer.grad_norm())
        self.optimizer.step(step.grad_scale, step.skip)
        self._move_target_fn()
        return Update(
            priority=step.priority,
            statistics=step.statistics,
            losses=rows.loss.view(1),
            grad_norms=self.optimizer.grad_norms,
            taken=step.taken,
            fault=step.fault,
        )

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        rows = with_steps(rows) if self.slices is None else self.slices.probed(rows)
        self.sample_losses(rows).loss.backward()

    # -- one update ---------------------------------------------------------------------------------------------------

    def sample_losses(self, sample: TensorDictBase) -> ValueRows:
        """The loss of a sample ``[b]``, and what is told of its rows; with a memory of slices ``[b]``."""
        return ValueRows(*self.loss.losses(sample if self.slices is None else self.slices.read(sample)))

    def _default_policy(self, env: EnvBase) -> nn.Module:
        return self.make_policy(env) if self._make_policy is None else self._make_policy(env, self.config)

    def _gradients(self, sample: TensorDictBase, parts: int) -> ValueRows:
        """Gradients of ``sample [B]`` in micro-batches, and its :class:`ValueRows` without a gradient."""
        self.optimizer.zero_grad()
        if parts == 1:
            rows = self._losses_fn(sample)
            self.optimizer.scaled(rows.loss).backward()
            return rows._replace(loss=rows.loss.detach())
        found: list[ValueRows] = []
        for part in parts_of(sample, parts, sample.get("priority_weight", None)):
            rows = self._losses_fn(part.batch)
            loss = rows.loss * part.weight
            self.optimizer.scaled(loss).backward()
            found.append(ValueRows(loss.detach(), rows.td_error, rows.q_value * part.share))
        losses, td_errors, q_values = zip(*found, strict=True)
        return ValueRows(torch.stack(losses).sum(), torch.cat(td_errors), torch.stack(q_values).sum())

    def _agreed(self, rows: ValueRows, weight: Tensor | None) -> tuple[ValueRows, Tensor]:
        """Makes loss, mean value and gradients those of all ranks; and all gradients in one tensor."""
        grads = [param.grad for param in self._online]
        found = self._shared.reduced(grads, rows.loss, rows.q_value, weight=weight)
        self._shared.put_back(found)
        loss, q_value = found.values
        # the priorities are those of this rank's rows
        return rows._replace(loss=loss, q_value=q_value), found.flat

    def _shared_conclude(self, loss: Tensor, td_error: Tensor, q_value: Tensor, flat: Tensor) -> "_Step":
        """:meth:`_conclude` with gradients that lie one after the other."""
        return self._conclude(loss, td_error, q_value, self.optimizer.flat_norm(flat, self._shared.ends))

    def _conclude(self, loss: Tensor, td_error: Tensor, q_value: Tensor, grad_norm: Tensor) -> "_Step":
        """Whether to step and by how much, and what is told of the update."""
        taken = loss.isfinite() & grad_norm.isfinite()
        fault = self.optimizer.is_fault(loss, grad_norm)
        statistics = {"loss": loss, "td_error": td_error.abs().mean(), "q_value": q_value, "grad_norm": grad_norm}
        self.setup.count(statistics, taken, fault)
        grad_scale = (grad_norm / self.config.max_grad_norm).clamp_min(1.0)
        errors = td_error.abs() if self.slices is None else self.slices.priority(td_error.abs())
        priority = errors + LEAST_PRIORITY if self.config.sampler == "prioritized" else None
        return _Step(grad_scale, (~taken).to(torch.float32), priority, statistics, taken, fault)

    @torch.no_grad()
    def _move_target(self) -> None:
        """Moves the target network by tau every ``target_interval`` updates, decided on the device."""
        due = (self.setup.updates % self.config.target_interval == 0).to(torch.float32)
        for target, online in zip(self._target, self._online, strict=True):
            target.lerp_(online, due * self.config.tau)


class _Step(NamedTuple):
    """What the optimiser is told, and what the trainer is."""

    grad_scale: Tensor
    skip: Tensor
    priority: Tensor | None
    statistics: dict[str, Tensor]
    taken: Tensor
    fault: Tensor


def epsilon_greedy(env: EnvBase, config: ValueConfig, make_network: Callable[..., nn.Module]) -> Any:
    """Epsilon-greedy on a network, an :class:`EpsilonGreedy`: writes ``action``.

    It reads what :func:`~torchrl_perf.trainers.spaces.observation_inputs` finds. A network of distributions reads
    features of a trunk where that is more than one vector, or where ``hidden_sizes`` are given; the last of these is
    the width of its own layers. Where the config asks for a memory, the policy is a sequence of encoder, memory and
    the :class:`EpsilonGreedy` on its features.

    Args:
        env: gives sizes and device.
        config: gives width, activation, precision and the schedule.
        make_network: :class:`FusedMLP`, :class:`DuelingMLP`, or what is called with the number of features, the number
            of actions, ``hidden_size``, ``activation``, ``precision``, ``device`` and, where there is one, ``trunk``.

    Raises:
        ValueError: for continuous actions, several of them at once, and an env without an observation to read.
    """
    spec, inputs = single_choice(env), head_inputs(env, config)
    place: dict[str, Any] = {"precision": config.precision, "device": env.device}
    options = {"activation": config.activation, **place}
    choices = int(cast("Any", spec.space).n)
    if make_network in (FusedMLP, DuelingMLP):
        network = make_network(inputs.size, choices, **options, **config.layers)
        if remembers(config):
            network = nn.Sequential(OwnFeatures(inputs.size), network)
        else:
            network = inputs.network(normalized(network, inputs, config, env.device), **place)
    elif len(inputs.keys) == 1 and not inputs.parts and config.hidden_sizes is None:
        network = make_network(inputs.size, choices, hidden_size=config.hidden_size, **options)
        layer = OwnFeatures(inputs.size) if remembers(config) else make_normalization(inputs, config, env.device)
        if layer is not None:
            network.trunk = layer  # the network is called by several methods, which all begin there
    else:
        trunk, features, width = _trunk(inputs, config, place)
        network = make_network(features, choices, hidden_size=width, trunk=trunk, **options)
    greedy = EpsilonGreedy(
        network,
        spec=spec,
        in_keys=inputs.keys,
        eps_start=config.eps_start,
        eps_end=config.eps_end,
        decay_frames=config.eps_frames,
        write_values=False,
    )
    trunk = make_trunk(env, config)
    return TensorDictSequential(*trunk, greedy) if trunk else greedy


def _trunk(inputs: Inputs, config: ValueConfig, place: dict[str, Any]) -> tuple[nn.Module, int, int]:
    """A trunk of all hidden layers but the last, its number of features, and the width of the last.

    Raises:
        ValueError: for no hidden layer, which a network of distributions needs.
    """
    if not (config.hidden_sizes is None or config.hidden_sizes):
        raise ValueError(
            f"hidden_sizes: expected one width at least for {config.algorithm}, received none. Remedy: hidden_sizes="
            f"({config.hidden_size},)."
        )
    *hidden, width = (config.hidden_size,) if config.hidden_sizes is None else config.hidden_sizes
    layers = hidden_layers([inputs.size, *hidden], config.activation, device=place["device"])
    body = MixedSequential(*layers, precision=config.precision) if layers else nn.Identity()
    features = [inputs.size, *hidden][-1]
    if remembers(config):
        return nn.Sequential(OwnFeatures(inputs.size), body), features, width
    body = normalized(body, inputs, config, place["device"])
    return inputs.network(body, **place), features, width
