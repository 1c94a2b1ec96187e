"""The losses of soft actor-critic on TensorDicts, in the few large kernels that they need."""

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import TensorSpec

from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.sac import actor_loss, critic_loss, soft_target, temperature_loss
from torchrl_perf.objectives.value_loss import checked_gamma

VALUE_KEY = "state_action_value"
LOSS_FUNCTIONS = ("l2", "smooth_l1")


def target_entropy(spec: TensorSpec) -> float:
    """Minus the number of action dims, the last dim of the spec whatever its batch dims are (arXiv:1812.05905)."""
    return -float(spec.shape[-1])


class DeviceSACLoss(nn.Module):
    """Soft actor-critic (arXiv:1812.05905): K critics with targets, one actor, a learnt temperature.

    The equations are those of ``torchrl.objectives.SACLoss`` (version 2). :meth:`forward` gives all losses from the
    same parameters, as the parent of the name does; :meth:`sample`, :meth:`critic_losses` and :meth:`actor_losses` are
    its parts, with which the critics can be updated before the actor. The actor runs once for states and next states
    together, and the K critics are one batched network. Nothing waits for the host.

    Keys read: the actor's and critic's ``in_keys``, at the root and under "next", ``action``, ("next", "reward") and
    ("next", "terminated") ``[B, 1]``; where present ``priority_weight [B]`` and ``steps_to_next_obs [B, 1]``, the steps
    of an n-step target: it is discounted by gamma to that power. Rewards ``[B, 1]``, flags bool.

    Args:
        actor: a probabilistic TensorDict module, whose distribution samples by reparametrisation.
        critic: a TensorDict module that reads observations and the action and writes ``state_action_value [B, K]``.
        gamma: discount factor.
        alpha: initial temperature.
        learn_alpha: adapt the temperature to ``entropy``, or keep it.
        entropy: the target entropy in nats; None is minus the number of action dims, read from the actor's spec.
        loss_function: of the critics, ``"l2"`` or ``"smooth_l1"`` (TorchRL's default).

    Attributes:
        log_alpha: 0-d, a parameter where it is learnt and a buffer where not.
        target_critic: the critic whose values the targets are made of; no gradient reaches it.

    Raises:
        ValueError: for a gamma outside of [0, 1], an unknown loss function, an alpha that is not positive, a critic
            without the action among its ``in_keys``, an actor without a distribution, or without a spec where the
            target entropy is read from it.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        *,
        gamma: float = 0.99,
        alpha: float = 1.0,
        learn_alpha: bool = True,
        entropy: float | None = None,
        loss_function: str = "l2",
    ) -> None:
        super().__init__()
        if loss_function not in LOSS_FUNCTIONS:
            raise ValueError(f"loss_function: expected one of {LOSS_FUNCTIONS}, received {loss_function!r}.")
        if not alpha > 0:
            raise ValueError(f"alpha: expected a positive temperature, received {alpha}. Remedy: a small one for none.")
        if not hasattr(actor, "get_dist"):
            raise ValueError(
                f"actor: expected a module with get_dist, such as DeviceActor or ProbabilisticActor, received "
                f"{type(actor).__name__}."
            )
        self.action_key = cast("list[NestedKey]", actor.dist_sample_keys)[0]
        if self.action_key not in cast("list[NestedKey]", critic.in_keys):
            raise ValueError(
                f"critic: expected {self.action_key!r}, the actor's action, among its in_keys, received "
                f"{critic.in_keys}. Remedy: set the critic's in_keys."
            )
        self.actor, self.critic = actor, critic
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self.gamma, self.loss_function = checked_gamma(gamma), loss_function
        self.target_entropy = self._entropy_of_spec() if entropy is None else float(entropy)
        device = next(critic.parameters()).device
        log_alpha = torch.tensor(math.log(alpha), device=device)
        if learn_alpha:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)
        self._pairs = self._target_pairs()

    def _entropy_of_spec(self) -> float:
        spec = cast("Any", self.actor).spec
        leaf = None if spec is None else spec[self.action_key]
        if leaf is None:
            raise ValueError("entropy: expected a number where the actor has no spec, received None. Remedy: set it.")
        return target_entropy(leaf)

    def _target_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        return list(self.target_critic.parameters()), list(self.critic.parameters())

    @property
    def learns_alpha(self) -> bool:
        """Whether the temperature is a parameter."""
        return isinstance(self.log_alpha, nn.Parameter)

    # -- parts --------------------------------------------------------------------------------------------------------

    def sample(self, td: TensorDictBase, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fresh actions for the states and the next states of the batch, in one pass of the actor.

        Args:
            td: the batch ``[B]``.
            noise: ``[2 B, D]`` standard normal numbers to draw the actions with, those of the states first; for a
                :class:`~torchrl_perf.modules.SquashedNormal` only. None draws fresh ones.

        Returns:
            Action ``[B, D]`` and log-probability ``[B]``, differentiable in the actor's parameters; next action and
            next log-probability, without a gradient.
        """
        rows = td.shape[0]
        keys = cast("list[NestedKey]", self.actor.in_keys)
        both = {key: torch.cat([td.get(key), td.get(("next", key))]) for key in keys}
        dist = cast("Any", self.actor).get_dist(TensorDict(both, [2 * rows], device=td.device))
        action, log_prob = scored_sample(dist) if noise is None else dist.rsample_and_log_prob(noise=noise)
        return action[:rows], log_prob[:rows], action[rows:].detach(), log_prob[rows:].detach()

    def values(self, critic: Any, td: TensorDictBase, action: Tensor, *, following: bool = False) -> Tensor:
        """``[B, K]`` values of ``action [B, D]`` in the batch's states, or with ``following`` its next states."""
        keys = [key for key in cast("list[NestedKey]", self.critic.in_keys) if key != self.action_key]
        inputs = {key: td.get(("next", key) if following else key) for key in keys}
        inputs[self.action_key] = action
        return critic(TensorDict(inputs, [td.shape[0]], device=td.device)).get(VALUE_KEY)

    def critic_losses(
        self, td: TensorDictBase, next_action: Tensor, next_log_prob: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss 0-d, the priority of each row ``[B]`` and the mean value 0-d, the last two detached."""
        with torch.no_grad():
            next_value = self.values(self.target_critic, td, next_action, following=True)
            steps = td.get("steps_to_next_obs", None)
            target = soft_target(
                td.get(("next", "reward")).squeeze(-1),
                td.get(("next", "terminated")).squeeze(-1),
                next_value,
                next_log_prob,
                self.log_alpha.exp(),
                self.gamma if steps is None else self.gamma ** steps.squeeze(-1),
            )
        value = self.values(self.critic, td, td.get(self.action_key))
        loss, priority = critic_loss(value, target, td.get("priority_weight", None), self.loss_function)
        # over the members first: the sums over the batch are then all of one length, and one kernel
        return loss, priority, value.detach().mean(-1).mean()

    def actor_losses(
        self, td: TensorDictBase, action: Tensor, log_prob: Tensor, *, detached: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The actor's and the temperature's loss, 0-d each, of a fresh action of each state.

        Args:
            td: the batch ``[B]``.
            action: ``[B, D]`` that carries a gradient.
            log_prob: ``[B]`` of it.
            detached: let no gradient reach the critic's parameters. Freezing them is the cheaper way outside of a
                compiled function, which cannot do that.
        """
        weights = td.get("priority_weight", None)
        critic = without_gradient(self.critic) if detached else self.critic
        value = self.values(critic, td, action)
        loss = actor_loss(log_prob, value, self.log_alpha.detach().exp(), weights)
        return loss, temperature_loss(self.log_alpha, log_prob, self.target_entropy, weights)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch ``[B]`` from the same parameters; writes ``td_error [B]`` into it.

        Returns:
            0-d ``loss_qvalue``, ``loss_actor``, ``loss_alpha`` and, detached, ``alpha`` and ``entropy``. The gradient
            of ``loss_actor`` does not reach the critics, so that the sum of the losses can be differentiated.
        """
        action, log_prob, next_action, next_log_prob = self.sample(tensordict)
        loss_qvalue, priority, _ = self.critic_losses(tensordict, next_action, next_log_prob)
        loss_actor, loss_alpha = self.actor_losses(tensordict, action, log_prob, detached=True)
        tensordict.set("td_error", priority)
        return TensorDict(
            {
                "loss_qvalue": loss_qvalue,
                "loss_actor": loss_actor,
                "loss_alpha": loss_alpha,
                "alpha": self.log_alpha.detach().exp(),
                "entropy": -log_prob.detach().mean(),
            }
        )

    def update_targets_(self, tau: float | Tensor) -> None:
        """Moves the target critics towards the critics by ``tau``, in one call."""
        polyak_update_(*self._pairs, tau)


class frozen:  # noqa: N801  (a context manager, used as a function)
    """Within it, no gradient is computed for the parameters of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._params = [param for param in module.parameters() if param.requires_grad]

    def __enter__(self) -> None:
        for param in self._params:
            param.requires_grad_(False)

    def __exit__(self, *exc: object) -> None:
        for param in self._params:
            param.requires_grad_(True)


def without_gradient(module: nn.Module) -> Callable[..., Any]:
    """The module as a function of its inputs alone: no gradient reaches its parameters."""
    params = {name: param.detach() for name, param in module.named_parameters()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, params, args, kwargs)

    return call


def scored_sample(dist: Distribution) -> tuple[Tensor, Tensor]:
    """Reparametrised actions ``[*, D]`` and their log-probabilities ``[*]``, at the bounds, too."""
    if hasattr(dist, "rsample_and_log_prob"):
        return cast("Any", dist).rsample_and_log_prob()
    action = dist.rsample()
    return action, dist.log_prob(action)
