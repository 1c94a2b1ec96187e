"""TorchRL's PPO losses without their host reads and extra passes, for actions of one part or of several."""

import contextlib
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from tensordict.utils import NestedKey
from torch import Tensor, distributions, nn
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss
from torchrl.objectives.utils import distance_loss

from torchrl_perf.functional.hybrid import sum_to
from torchrl_perf.functional.ppo import clipped_surrogate, normalized_advantage
from torchrl_perf.modules.hybrid import HybridDistribution

UNSUPPORTED = ("normalize_advantage_exclude_dims", "advantage_norm", "delay_actor", "max_importance_ratio")
MAX_LOG_RATIO = 20.0
"""Ratios above exp(20), which only an action of no density under the old policy has, count as that."""


class _DevicePPO:
    """What the losses below have in common: everything but the objective of the policy."""

    UNSUPPORTED = UNSUPPORTED
    """Options of the parent that this loss does not have."""
    entropy_floor: float | None = None
    entropy_floor_coeff: float = 1.0

    def __init__(self, actor_network: nn.Module, critic_network: nn.Module | None = None, **kwargs: Any) -> None:
        parent = super().__init__.__qualname__.partition(".")[0]
        reduction = kwargs.get("reduction") or "mean"
        if reduction != "mean":
            raise ValueError(f"reduction: expected 'mean', received {reduction!r}. Remedy: torchrl's {parent}.")
        refused = {name: kwargs[name] for name in self.UNSUPPORTED if kwargs.get(name)}
        if refused:
            raise ValueError(f"Expected none of {self.UNSUPPORTED}, received {refused}. Remedy: torchrl's {parent}.")
        super().__init__(actor_network, critic_network, **kwargs)  # pyright: ignore[reportCallIssue]  (of the loss)
        loss = cast("Any", self)
        # a Python bool: asking the parent's clip_value buffer would be a host read at each call
        self._clips_value = loss.clip_value is not None and bool(loss.clip_value)

    def _acting(self, which: str) -> contextlib.AbstractContextManager[Any]:
        """The network holds its parameters: those of the loss, or its own."""
        loss = cast("Any", self)
        if not loss.functional:
            return contextlib.nullcontext()
        return getattr(loss, f"{which}_params").to_module(getattr(loss, which), preserve_module_state=False)

    def _get_entropy(self, dist: distributions.Distribution, adv_shape: torch.Size) -> Tensor:
        return self._part_entropies(dist)[0].unsqueeze(-1)

    def _part_entropies(self, dist: distributions.Distribution) -> tuple[Tensor, dict[NestedKey, Tensor]]:
        """Entropy ``[*]`` of the action, and of each part under TorchRL's name for it."""
        if not isinstance(dist, CompositeDistribution):
            return dist.entropy(), {}
        dims = len(dist.batch_shape)
        parts = {_entropy_name(key): sum_to(part.entropy(), dims) for key, part in dist.dists.items()}
        return HybridDistribution.joined(parts, dims), parts

    def _advantage(self, tensordict: TensorDictBase) -> Tensor:
        """``[*, 1]``, normalised if asked for."""
        loss = cast("Any", self)
        key = loss.tensor_keys.advantage
        advantage = tensordict.get(key, None)
        if advantage is None:
            raise KeyError(
                f"Expected {key!r} in the batch, received {_names(tensordict)}. Remedy: run GAETransform on the [N, T] "
                "batch first."
            )
        return normalized_advantage(advantage) if loss.normalize_advantage else advantage

    def _log_ratio(self, tensordict: TensorDictBase, advantage: Tensor) -> tuple[Tensor, distributions.Distribution]:
        """``[*, 1]`` log-probability of the stored action, all parts, less the stored one; and the distribution."""
        loss = cast("Any", self)
        with self._acting("actor_network"):
            dist = loss.actor_network.get_dist(tensordict)
        if isinstance(dist, CompositeDistribution):
            dims = len(dist.batch_shape)
            parts = {key: part.log_prob(tensordict.get(key)) for key, part in dist.dists.items()}
            log_prob = HybridDistribution.joined(parts, dims)
        else:
            log_prob = dist.log_prob(tensordict.get(loss.tensor_keys.action))
            dims = log_prob.ndim
        log_ratio = (log_prob - self._stored_log_prob(tensordict, dims)).unsqueeze(-1)
        if log_ratio.shape[:-1] != advantage.shape[:-1]:
            raise ValueError(
                f"advantage: expected {[*log_ratio.shape[:-1], 1]}, one for each log-probability, received "
                f"{list(advantage.shape)}. Remedy: log-probabilities shaped as the batch (joint=True of a HybridActor "
                "adds those of nodes), or an advantage for each agent."
            )
        return log_ratio, dist

    def _stored_log_prob(self, tensordict: TensorDictBase, dims: int) -> Tensor:
        """``[*]``: what the batch holds, one entry or one for each part."""
        key = cast("Any", self).tensor_keys.sample_log_prob
        keys = [key] if isinstance(key, str | tuple) else list(key)
        stored = {one: tensordict.get(one, None) for one in keys}
        if absent := [one for one, value in stored.items() if value is None]:
            raise KeyError(
                f"Expected {absent} in the batch, received {_names(tensordict)}. Remedy: an actor that returns "
                "log-probabilities, and set_keys(sample_log_prob=...) with their keys."
            )
        return HybridDistribution.joined(cast("dict[NestedKey, Tensor]", stored), dims)

    def _add_entropy(self, out: TensorDict, dist: distributions.Distribution) -> None:
        loss = cast("Any", self)
        entropy, parts = self._part_entropies(dist)
        mean = entropy.mean()
        out.set("entropy", mean.detach())
        weights = loss._entropy_coeff_map
        if weights is None:
            bonus = -loss.entropy_coeff * mean
            floor = self.entropy_floor
            out.set(
                "loss_entropy", bonus if floor is None else bonus + self.entropy_floor_coeff * (floor - mean).relu()
            )
            return
        if absent := [name for name in parts if name not in weights]:
            raise KeyError(
                f"entropy_coeff: expected a weight for each of {list(parts)}, received {list(weights)}. Remedy: add "
                f"{absent}, or give one number for all."
            )
        out.set("loss_entropy", -sum(weights[name] * part.mean() for name, part in parts.items()))

    def _add_critic(self, out: TensorDict, tensordict: TensorDictBase) -> None:
        loss_critic, value_clip_fraction, _ = self.loss_critic(tensordict)
        out.set("loss_critic", loss_critic.mean())
        if value_clip_fraction is not None:
            out.set("value_clip_fraction", value_clip_fraction)

    def _stored_dist(self, tensordict: TensorDictBase) -> distributions.Distribution:
        """The distribution that the stored parameters make; to be asked for before the actor writes new ones."""
        actor = cast("Any", self).actor_network
        needed = cast("list[NestedKey]", actor[-1].in_keys)
        if absent := [key for key in needed if tensordict.get(key, None) is None]:
            raise KeyError(
                f"Expected {absent}, the old policy's parameters, in the batch, received {_names(tensordict)}. Remedy: "
                "keep what the actor writes (exclude_keys of the collector)."
            )
        return actor.build_dist_from_params(tensordict)

    def loss_critic(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor | None, None]:
        """Value loss of each row times ``critic_coeff``, and the fraction of clipped values; overwrites state_value."""
        loss = cast("Any", self)
        keys = loss.tensor_keys
        if loss.separate_losses:
            tensordict = tensordict.detach()
        needed = [keys.value_target, keys.value] if self._clips_value else [keys.value_target]
        absent = [key for key in needed if tensordict.get(key, None) is None]
        if absent:
            raise KeyError(
                f"Expected {needed} in the batch, received {_names(tensordict)}. Remedy: run GAETransform on the "
                "[N, T] batch first, or clip_value=False where only the old value is missing."
            )
        old_value, target = tensordict.get(keys.value, None), tensordict.get(keys.value_target)
        with self._acting("critic_network"):
            value = loss.critic_network(tensordict).get(keys.value)
        error = distance_loss(target, value, loss_function=loss.loss_critic_type)
        clip_fraction = None
        if self._clips_value:
            change = value - old_value
            clipped = change.clamp(-loss.clip_value, loss.clip_value)
            other = distance_loss(target, old_value + clipped, loss_function=loss.loss_critic_type)
            error = torch.maximum(error, other)
            clip_fraction = (change != clipped).to(error.dtype).mean().detach()
        return loss.critic_coeff * error, clip_fraction, None


class DeviceClipPPOLoss(_DevicePPO, ClipPPOLoss):
    """``torchrl.objectives.ClipPPOLoss`` for policies whose entropy needs no sampling.

    The same constructor, keys and values, with three differences: nothing waits for the host (the parent reads whether
    the entropy is finite, and the value of ``clip_value``); a compiled version does not sample the entropy instead; the
    diagnostics ESS, max_ratio, mean_ratio and explained_variance, which need passes of their own, are left out.

    **Actions of several parts**, of a :class:`~torchrl_perf.modules.HybridActor` or a TorchRL actor with a
    ``CompositeDistribution``: log-probabilities and entropies of the parts are added, and one ratio is clipped. The
    parts are read at the keys of the distribution; the stored log-probability is one entry, or a list of them, one for
    each part. ``entropy_coeff`` may be a mapping from TorchRL's names of the parts' entropies, such as
    ``("action", "discrete_entropy")``, to weights.

    Keys read: those of actor and critic, action, sample_log_prob, advantage, value_target and, with ``clip_value``,
    state_value (names by ``set_keys``). Returns 0-d entries ``loss_objective``, ``loss_critic``, ``loss_entropy`` and,
    detached, ``entropy``, ``kl_approx``, ``clip_fraction``, ``value_clip_fraction``, ``kl``. The log-probability is
    shaped as the batch.

    Args:
        actor_network: a probabilistic TensorDict module.
        critic_network: a TensorDict module that writes ``state_value``; None for a policy loss alone.
        closed_form_kl: return ``kl``, the mean divergence of the new policy from the old, computed from the parameters
            that the actor wrote into the batch.
        entropy_floor: mean entropy in nats below which the shortfall, times ``entropy_floor_coeff``, is added to
            ``loss_entropy``; None for no floor. It needs an entropy bonus with one weight, which may be 0.
        entropy_floor_coeff: its weight.
        **kwargs: as for the parent; ``reduction`` has to be ``"mean"``, and the options in ``UNSUPPORTED`` unset.

    Raises:
        ValueError: at construction, for another reduction or an unsupported option, a floor without an entropy bonus;
            at a call, for an advantage that is not shaped as the log-probability.
        KeyError: when the batch has no advantage, log-probability or, where needed, parameters.
    """

    def __init__(
        self,
        actor_network: nn.Module,
        critic_network: nn.Module | None = None,
        *,
        closed_form_kl: bool = False,
        entropy_floor: float | None = None,
        entropy_floor_coeff: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, **kwargs)
        self.closed_form_kl = closed_form_kl
        self.entropy_floor, self.entropy_floor_coeff = entropy_floor, entropy_floor_coeff
        if entropy_floor is not None and (not self.entropy_bonus or self._entropy_coeff_map is not None):
            raise ValueError(
                f"entropy_floor: expected None without an entropy bonus of one weight, received {entropy_floor}. "
                "Remedy: entropy_bonus=True and one number for entropy_coeff."
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Losses and diagnostics of a minibatch ``[B]``."""
        tensordict = tensordict.copy()  # the networks write into it
        advantage = self._advantage(tensordict)
        old = self._stored_dist(tensordict) if self.closed_form_kl else None
        log_ratio, dist = self._log_ratio(tensordict, advantage)
        gain, clipped = clipped_surrogate(_finite(log_ratio), advantage, *self._clip_bounds)
        out = TensorDict({"loss_objective": -gain.mean(), "clip_fraction": clipped.to(gain.dtype).mean()})
        out.set("kl_approx", -log_ratio.detach().mean())
        if old is not None:
            out.set("kl", distributions.kl_divergence(old, dist).detach().mean())
        if self.entropy_bonus:
            self._add_entropy(out, dist)
        if self._has_critic:
            self._add_critic(out, tensordict)
        return out


class DeviceKLPENPPOLoss(_DevicePPO, KLPENPPOLoss):
    """``torchrl.objectives.KLPENPPOLoss``: ``r A - beta KL(old || new)``, without a host read (arXiv:1707.06347, 4).

    The same constructor and keys, and actions of several parts as in :class:`DeviceClipPPOLoss`. The divergence is
    closed form for every policy of this package (the parent samples it for a composite). The weight ``beta`` doubles
    where the mean divergence is above 1.5 ``dtarg`` and halves where it is below ``dtarg / 1.5``, in place and on the
    device, so that a captured graph honours it; the parent asks the host, and its gradient already has the new weight.

    Keys read: as for :class:`DeviceClipPPOLoss`, and the parameters that the actor wrote. Returns 0-d entries
    ``loss_objective``, ``loss_critic``, ``loss_entropy`` and, detached, ``kl``, ``kl_approx``, ``beta`` (the weight
    that was used), ``entropy``, ``value_clip_fraction``.

    Args:
        actor_network: a probabilistic TensorDict module.
        critic_network: a TensorDict module that writes ``state_value``; None for a policy loss alone.
        **kwargs: as for the parent; ``reduction`` has to be ``"mean"``, and the options in ``UNSUPPORTED`` unset.

    Raises:
        ValueError: at construction, for another reduction or an unsupported option.
        KeyError: when the batch has no advantage, log-probability or parameters.
    """

    beta: Tensor

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Losses and diagnostics of a minibatch ``[B]``; adapts ``beta``."""
        tensordict = tensordict.copy()  # the networks write into it
        advantage = self._advantage(tensordict)
        old = self._stored_dist(tensordict)
        log_ratio, dist = self._log_ratio(tensordict, advantage)
        kl = distributions.kl_divergence(old, dist)
        beta = self.beta.clone()  # it changes below, and the gradient is that of this one
        gain = (_finite(log_ratio).exp() * advantage).mean() - beta * kl.mean()
        out = TensorDict({"loss_objective": -gain, "kl": kl.detach().mean(), "beta": beta})
        out.set("kl_approx", -log_ratio.detach().mean())
        self._adapt(out.get("kl"))
        if self.entropy_bonus:
            self._add_entropy(out, dist)
        if self._has_critic:
            self._add_critic(out, tensordict)
        return out

    def _adapt(self, kl: Tensor) -> None:
        lower = torch.where(kl < self.dtarg / 1.5, self.decrement, 1.0)
        self.beta.mul_(torch.where(kl > self.dtarg * 1.5, self.increment, lower))

    def reset(self) -> None:
        """``beta`` is what it was at construction."""
        self.beta.fill_(self._beta_init)


def _finite(log_ratio: Tensor) -> Tensor:
    # exp of more than 88 is infinite, and its gradient NaN even where the ratio is clipped
    return log_ratio.clamp_max(MAX_LOG_RATIO)


def _entropy_name(key: NestedKey) -> NestedKey:
    return f"{key}_entropy" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_entropy")


def _names(tensordict: TensorDictBase) -> list[str]:
    return sorted(map(str, tensordict.keys(True, True)))
