"""TorchRL's PPO losses without their host reads and extra passes, for actions of one part or of several."""

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, ProbabilisticTensorDictModule, dispatch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, distributions, nn
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss
from torchrl.objectives.utils import distance_loss

from torchrl_perf.functional.losses.ppo import clipped_surrogate, normalized_advantage
from torchrl_perf.functional.rows.valid import (
    explained_variance,
    finite_where_absent,
    fitted_rows,
    kept,
    reduced,
    valid_mean,
)
from torchrl_perf.modules.hybrid import HybridDistribution
from torchrl_perf.objectives.action_distributions import divergence, entropies
from torchrl_perf.runtime.precision import widened

UNSUPPORTED = ("advantage_norm", "delay_actor", "max_importance_ratio")
REDUCTIONS = ("mean", "sum", "none")
CRITIC_LOSSES = ("l1", "l2", "smooth_l1")
MAX_LOG_RATIO = 20.0
"""Ratios above exp(20), which only an action of no density under the old policy has, count as that."""


class _DevicePPO:
    """What the losses below have in common: everything but the objective of the policy."""

    UNSUPPORTED = UNSUPPORTED
    """Options of the parent that this loss does not have."""
    entropy_floor: float | None = None
    entropy_floor_coeff: float = 1.0

    def __init__(
        self,
        actor_network: nn.Module | None = None,
        critic_network: nn.Module | None = None,
        *,
        valid_key: NestedKey | None = None,
        log_explained_variance: bool = False,
        **kwargs: Any,
    ) -> None:
        self._check_arguments(kwargs)
        options = {"log_explained_variance": log_explained_variance, **kwargs}
        super().__init__(actor_network, critic_network, **options)  # pyright: ignore[reportCallIssue]  (of the loss)
        loss = cast("Any", self)
        self._given_valid_key = None if valid_key is None else cast("NestedKey", unravel_key(valid_key))
        self._actor_valid_key = _valid_key_of(loss.actor_network)
        # a Python bool: asking the parent's clip_value buffer would be a host read at each call
        self._clips_value = loss.clip_value is not None and bool(loss.clip_value)

    def _check_arguments(self, given: Mapping[str, Any]) -> None:
        """Refuses what the parent would swallow unread, and what this loss does not have."""
        parent = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__.startswith("torchrl."))
        known: set[str] = {"critic_coef", "entropy_coef"}  # which the parent refuses with its own words
        for kind in type(self).__mro__:
            known |= set(inspect.signature(cast("Any", kind).__init__).parameters)
        if unknown := sorted(set(given) - known):
            raise TypeError(f"expected arguments of torchrl's {parent}, received {unknown}. Remedy: help({parent}).")
        refused = {name: given[name] for name in self.UNSUPPORTED if given.get(name) not in (None, False)}
        if refused:
            raise ValueError(f"Expected none of {self.UNSUPPORTED}, received {refused}. Remedy: torchrl's {parent}.")
        for name, values in (("reduction", REDUCTIONS), ("loss_critic_type", CRITIC_LOSSES)):
            if given.get(name) is not None and given[name] not in values:
                raise ValueError(f"{name}: expected one of {values}, received {given[name]!r}.")

    @property
    def valid_key(self) -> NestedKey | None:
        """The flag of the rows that count: the one given, else the one that the actor reads."""
        return self._actor_valid_key if self._given_valid_key is None else self._given_valid_key

    @property
    def valid_keys(self) -> list[NestedKey]:
        """All flags that :meth:`valid_rows` looks for."""
        own = [key for key in (self._given_valid_key, self._actor_valid_key) if key is not None]
        return [*own, *cast("Any", self)._loss_mask_keys()]

    def _acting(self, which: str) -> contextlib.AbstractContextManager[Any]:
        """The network holds its parameters: those of the loss, or its own."""
        loss = cast("Any", self)
        if not loss.functional:
            return contextlib.nullcontext()
        return getattr(loss, f"{which}_params").to_module(getattr(loss, which), preserve_module_state=False)

    # -- what is read -------------------------------------------------------------------------------------------------

    def _advantage(self, tensordict: TensorDictBase) -> Tensor:
        """``[*, 1]``, as the batch has it; estimated from a batch of transitions that has none."""
        loss = cast("Any", self)
        key = loss.tensor_keys.advantage
        if tensordict.get(key, None) is None:
            if loss.critic_network is None or tensordict.get(("next", loss.tensor_keys.reward), None) is None:
                raise KeyError(
                    f"Expected {key!r} in the batch, received {_names(tensordict)}. Remedy: run GAETransform on the "
                    "[N, T] batch first."
                )
            params, target = loss._cached_critic_network_params_detached, loss.target_critic_network_params
            loss.value_estimator(tensordict, params=params, target_params=target)
        advantage = widened(cast("Tensor", tensordict.get(key)))
        if advantage.ndim == 0 or advantage.shape[-1] != 1:
            raise ValueError(
                f"advantage: expected {[*tensordict.batch_size, 1]}, one for each log-probability, received "
                f"{list(advantage.shape)}. Remedy: advantage.unsqueeze(-1) where the last dim is missing, or one "
                "number for each row: ComponentAdvantage adds components of a reward."
            )
        return advantage

    def valid_rows(self, tensordict: TensorDictBase, rows: torch.Size) -> Tensor | None:
        """The rows that count, or None for all: our flag, and the masks that TorchRL's losses honour.

        Args:
            tensordict: the batch.
            rows: its shape ``[*]``, that of the log-probabilities.

        Returns:
            bool ``[*]``.

        Raises:
            KeyError: if the batch lacks the flag that ``valid_key`` names.
            ValueError: for a flag of another dtype or shape.
        """
        loss = cast("Any", self)
        given, of_actor = self._given_valid_key, self._actor_valid_key
        flags = {key: tensordict.get(key, None) for key in loss._loss_mask_keys()}
        if given is not None:
            flags[given] = tensordict.get(given, None)
            if flags[given] is None:
                raise KeyError(
                    f"valid_key: expected {given!r} in the batch, received {_names(tensordict)}. Remedy: keep it in "
                    "the batch, or valid_key=None where all rows count."
                )
        elif of_actor is not None:
            flag = tensordict.get(of_actor, None)
            of_nodes = flag is not None and flag.ndim > len(rows) and flag.shape[len(rows) :] != (1,)
            flags[of_actor] = None if of_nodes else flag  # nodes of one action, which the distribution leaves out
        valid = None
        for key, flag in flags.items():
            if flag is not None:
                fitted = fitted_rows(flag, rows, key)
                valid = fitted if valid is None else valid & fitted
        return valid

    def _clean(self, tensordict: TensorDictBase, valid: Tensor | None, *, parameters: bool) -> None:
        """Makes what the networks and distributions read finite in rows that do not count."""
        if valid is None:
            return
        loss = cast("Any", self)
        actions = loss.tensor_keys.action
        read = [*loss.actor_network.in_keys, *([actions] if isinstance(actions, str | tuple) else actions)]
        read += loss.critic_network.in_keys if loss._has_critic else []
        fills = dict.fromkeys(read, 0.0)
        if parameters:
            fills |= dict.fromkeys(loss.actor_network[-1].in_keys, 1.0)  # a scale of 0 is no scale
        for key, fill in fills.items():
            value = tensordict.get(key, None)
            leaves = value.items(True, True) if isinstance(value, TensorDictBase) else [((), value)]
            for name, leaf in list(leaves):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[: valid.ndim] == valid.shape:
                    path = (*_path(key), *_path(name))
                    tensordict.set(path, finite_where_absent(leaf, valid, fill))

    def _normalized(self, advantage: Tensor, valid: Tensor | None) -> Tensor:
        """``[*, 1]``, normalised over the rows that count if that was asked for, 0 in the others."""
        loss = cast("Any", self)
        if not loss.normalize_advantage:
            return kept(advantage, valid)
        return normalized_advantage(advantage, valid, loss.normalize_advantage_exclude_dims)

    def _log_ratio(
        self, tensordict: TensorDictBase, advantage: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, distributions.Distribution]:
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
        if (*log_prob.shape, 1) != advantage.shape:
            raise ValueError(
                f"advantage: expected {[*log_prob.shape, 1]}, one for each log-probability, received "
                f"{list(advantage.shape)}. Remedy: log-probabilities shaped as the batch (joint=True of a HybridActor "
                "adds those of nodes), or an advantage for each agent."
            )
        log_ratio = widened(log_prob) - widened(self._stored_log_prob(tensordict, log_prob.shape))
        return kept(log_ratio.unsqueeze(-1), valid), dist

    def _stored_log_prob(self, tensordict: TensorDictBase, rows: torch.Size) -> Tensor:
        """``[*]``: what the batch holds, one entry or one for each part."""
        key = cast("Any", self).tensor_keys.sample_log_prob
        keys = [key] if isinstance(key, str | tuple) else list(key)
        stored = {one: tensordict.get(one, None) for one in keys}
        if absent := [one for one, value in stored.items() if value is None]:
            raise KeyError(
                f"Expected {absent} in the batch, received {_names(tensordict)}. Remedy: an actor that returns "
                "log-probabilities, and set_keys(sample_log_prob=...) with their keys."
            )
        for one, value in cast("dict[NestedKey, Tensor]", stored).items():
            # the log-probabilities of a part's nodes are added; those of a single entry are joint already
            fits = value.shape[: len(rows)] == rows and (len(keys) > 1 or value.shape[len(rows) :] in ((), (1,)))
            if not fits or value.requires_grad:
                raise ValueError(
                    f"{one!r}: expected {list(rows)}, one log-probability for each row, without a gradient, received "
                    f"{list(value.shape)}, requires_grad={value.requires_grad}. Remedy: what the actor wrote when the "
                    "action was taken, detached."
                )
        return HybridDistribution.joined(cast("dict[NestedKey, Tensor]", stored), len(rows))

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

    # -- what is returned ---------------------------------------------------------------------------------------------

    def _reduced(self, values: Tensor, valid: Tensor | None) -> Tensor:
        """Loss ``[*, 1]`` of each row, reduced: 0-d, or ``[*]``."""
        values = reduced(values, valid, cast("Any", self).reduction)
        return values.squeeze(-1) if values.ndim else values

    def _add_entropy(self, out: TensorDict, dist: distributions.Distribution, valid: Tensor | None) -> None:
        loss = cast("Any", self)
        entropy, parts = entropies(dist, loss.samples_mc_entropy)
        entropy = widened(entropy)
        mean = valid_mean(entropy, valid)
        out.set("entropy", mean.detach())
        weights = loss._entropy_coeff_map
        if weights is not None:
            bonus = -sum(
                weight * self._reduced(part.unsqueeze(-1), valid) for weight, part in _weighted(weights, parts)
            )
        elif loss.reduction == "mean":
            bonus = -loss.entropy_coeff * mean
            floor = self.entropy_floor
            bonus = bonus if floor is None else bonus + self.entropy_floor_coeff * (floor - mean).relu()
        else:
            bonus = -loss.entropy_coeff * self._reduced(entropy.unsqueeze(-1), valid)
        out.set("loss_entropy", bonus)

    def _add_critic(self, out: TensorDict, tensordict: TensorDictBase, valid: Tensor | None) -> None:
        loss_critic, clip_fraction, explained = self._critic_rows(tensordict, valid)
        rows = None if valid is None else fitted_rows(valid, loss_critic.shape[:-1])
        out.set("loss_critic", self._reduced(loss_critic, rows))
        if clip_fraction is not None:
            out.set("value_clip_fraction", clip_fraction)
        if explained is not None:
            out.set("explained_variance", explained)

    def loss_critic(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Value loss of each row times ``critic_coeff``, fraction of clipped values, explained variance.

        Overwrites state_value. The last two are None where ``clip_value`` and ``log_explained_variance`` are off.
        """
        target = tensordict.get(cast("Any", self).tensor_keys.value_target, None)
        valid = None if target is None else self.valid_rows(tensordict, target.shape[:-1])
        return self._critic_rows(tensordict, valid)

    def _critic_rows(
        self, tensordict: TensorDictBase, valid: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
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
        old_value, target = tensordict.get(keys.value, None), widened(tensordict.get(keys.value_target))
        with self._acting("critic_network"):
            value = widened(loss.critic_network(tensordict).get(keys.value))
        shapes = [list(one.shape) for one in (value, target, *((old_value,) if self._clips_value else ()))]
        if shapes.count(shapes[0]) != len(shapes):
            raise ValueError(
                f"value_target: expected {shapes[0]}, the shape of the critic's values, here and in the old values, "
                f"received {shapes[1:]}. Remedy: unsqueeze(-1) where the last dim is missing."
            )
        valid = None if valid is None else fitted_rows(valid, value.shape[:-1])
        target = kept(target, valid)
        error = distance_loss(target, value, loss_function=loss.loss_critic_type)
        clip_fraction = None
        if self._clips_value:
            old_value = kept(widened(cast("Tensor", old_value)), valid)
            change = value - old_value
            clipped = change.clamp(-loss.clip_value, loss.clip_value)
            other = distance_loss(target, old_value + clipped, loss_function=loss.loss_critic_type)
            error = torch.maximum(error, other)
            clip_fraction = valid_mean((change != clipped).to(error.dtype), valid).detach()
        explained = None
        if loss.log_explained_variance:
            explained = explained_variance(target.detach(), value.detach(), valid).squeeze(-1)
        return (loss.critic_coeff * error if loss._has_critic else error), clip_fraction, explained

    def _set_out_keys(self, *keys: str) -> None:
        loss = cast("Any", self)
        optional = {"entropy": loss.entropy_bonus, "loss_entropy": loss.entropy_bonus, "loss_critic": loss._has_critic}
        optional["value_clip_fraction"] = loss._has_critic and self._clips_value
        optional["explained_variance"] = loss._has_critic and loss.log_explained_variance
        loss._out_keys = [key for key in keys if optional.get(key, True)]


class DeviceClipPPOLoss(_DevicePPO, ClipPPOLoss):
    """``torchrl.objectives.ClipPPOLoss`` without host waits.

    The same constructor, keys, reductions and values, with three differences: nothing waits for the host (the parent
    reads whether the entropy is finite, and the value of ``clip_value``); a compiled version does not sample the
    entropy where it is closed form; the diagnostics ESS, max_ratio and mean_ratio, and explained_variance, which need
    passes of their own, are computed where ``ratio_statistics`` and ``log_explained_variance`` ask for them.

    **Distributions without a closed-form entropy** (``TanhNormal``, :class:`~torchrl_perf.modules.SquashedNormal`, or
    such a part of a composite) have it estimated from ``samples_mc_entropy`` draws, reparametrised where possible.

    **Actions of several parts**, of a :class:`~torchrl_perf.modules.HybridActor` or a TorchRL actor with a
    ``CompositeDistribution``: log-probabilities and entropies of the parts are added, and one ratio is clipped. The
    parts are read at the keys of the distribution; the stored log-probability is one entry, or a list of them, one for
    each part. ``entropy_coeff`` may be a mapping from TorchRL's names of the parts' entropies, such as
    ``("action", "discrete_entropy")``, to weights.

    **Rows that do not count**, such as agents that are absent: those where ``valid_key`` is False, and where the masks
    are that TorchRL's losses honour (``loss_mask_key``, such as ``("collector", "mask")``), reach no loss, statistic,
    normalisation or gradient, whatever stands in them; without any row that counts all of them are 0.

    **Without an advantage** in the batch, one is estimated from the transitions in it by the value estimator, as in the
    parent: TorchRL's ``GAE`` by default, or ``make_value_estimator(GAETransform(...))``.

    Keys read: those of actor and critic, action, sample_log_prob, advantage, value_target and, with ``clip_value``,
    state_value (names by ``set_keys``). Returns ``loss_objective``, ``loss_critic``, ``loss_entropy``, 0-d or ``[*]``
    for ``reduction="none"``, and, detached and 0-d, ``entropy``, ``kl_approx``, ``clip_fraction``,
    ``value_clip_fraction``, ``kl``. The log-probability is shaped as the batch ``[*]``, the advantage as ``[*, 1]``,
    value_target and state_value as the critic's values.

    Args:
        actor_network: a probabilistic TensorDict module.
        critic_network: a TensorDict module that writes ``state_value``; None for a policy loss alone.
        closed_form_kl: return ``kl``, the mean divergence of the new policy from the old, computed from the parameters
            that the actor wrote into the batch; sampled once where it has no closed form.
        entropy_floor: mean entropy in nats below which the shortfall, times ``entropy_floor_coeff``, is added to
            ``loss_entropy``; None for no floor. It needs an entropy bonus with one weight, which may be 0.
        entropy_floor_coeff: its weight.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the rows that count; by default the flag that the actor reads,
            if it has one (``valid_key`` of a :class:`~torchrl_perf.modules.DeviceActor`).
        log_explained_variance: return ``explained_variance`` of the critic over the rows that count, 0-d.
        ratio_statistics: return ``ESS``, ``max_ratio`` and ``mean_ratio``.
        **kwargs: as for the parent, the options in ``UNSUPPORTED`` unset.

    Raises:
        TypeError: at construction, for an argument that the parent does not have.
        ValueError: at construction, for an unsupported option or value, a floor without an entropy bonus; at a call,
            for an advantage that is not shaped as the log-probability, values that are not shaped as their targets.
        KeyError: when the batch has no advantage, log-probability or, where needed, parameters.
    """

    def __init__(
        self,
        actor_network: nn.Module | None = None,
        critic_network: nn.Module | None = None,
        *,
        closed_form_kl: bool = False,
        entropy_floor: float | None = None,
        entropy_floor_coeff: float = 1.0,
        ratio_statistics: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, **kwargs)
        self.closed_form_kl, self.ratio_statistics = closed_form_kl, ratio_statistics
        self.entropy_floor, self.entropy_floor_coeff = entropy_floor, entropy_floor_coeff
        single = self.entropy_bonus and self._entropy_coeff_map is None and self.reduction == "mean"
        if entropy_floor is not None and not single:
            raise ValueError(
                f"entropy_floor: expected None without an entropy bonus of one weight and reduction 'mean', received "
                f"{entropy_floor}. Remedy: entropy_bonus=True, one number for entropy_coeff, reduction='mean'."
            )
        critic = ("loss_critic", "value_clip_fraction", "explained_variance")
        extra = (*(("kl",) if closed_form_kl else ()), *(("ESS",) if ratio_statistics else ()))
        ratios = ("max_ratio", "mean_ratio") if ratio_statistics else ()
        self._set_out_keys(
            "loss_objective", "clip_fraction", "entropy", "loss_entropy", *critic, *extra, "kl_approx", *ratios
        )

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Losses and diagnostics of a minibatch ``[B]``."""
        tensordict = tensordict.copy()  # the networks write into it
        advantage = self._advantage(tensordict)
        valid = self.valid_rows(tensordict, advantage.shape[:-1])
        self._clean(tensordict, valid, parameters=self.closed_form_kl)
        advantage = self._normalized(advantage, valid)
        old = self._stored_dist(tensordict) if self.closed_form_kl else None
        log_ratio, dist = self._log_ratio(tensordict, advantage, valid)
        gain, clipped = clipped_surrogate(_finite(log_ratio), advantage, *self._clip_bounds)
        out = TensorDict({"loss_objective": self._reduced(-gain, valid)})
        out.set("clip_fraction", valid_mean(clipped.to(gain.dtype), valid))
        out.set("kl_approx", -valid_mean(log_ratio.detach(), valid))
        if old is not None:
            out.set("kl", valid_mean(divergence(old, dist, 1), valid).detach())
        if self.ratio_statistics:
            out.update(_ratio_statistics(log_ratio.detach(), valid))
        if self.entropy_bonus:
            self._add_entropy(out, dist, valid)
        if self._has_critic:
            self._add_critic(out, tensordict, valid)
        return out


class DeviceKLPENPPOLoss(_DevicePPO, KLPENPPOLoss):
    """``torchrl.objectives.KLPENPPOLoss``: ``r A - beta KL(old || new)``, without a host read (arXiv:1707.06347, 4).

    The same constructor and keys; distributions, actions of several parts, rows that do not count and the value
    estimator as in :class:`DeviceClipPPOLoss`. The divergence is closed form for every policy of this package (the
    parent samples it for a composite), and estimated from ``samples_mc_kl`` draws of the old policy otherwise. The
    weight ``beta`` is multiplied by ``increment`` where the mean divergence is above 1.5 ``dtarg`` and by
    ``decrement`` where it is below ``dtarg / 1.5``, in place and on the device, so that a captured graph honours it;
    the parent asks the host, and its gradient already has the new weight.

    Keys read: as for :class:`DeviceClipPPOLoss`, and the parameters that the actor wrote. Returns ``loss_objective``,
    ``loss_critic``, ``loss_entropy``, 0-d or ``[*]`` for ``reduction="none"``, and, detached and 0-d, ``kl``,
    ``kl_approx``, ``beta`` (the weight that was used), ``entropy``, ``value_clip_fraction``.

    Args:
        actor_network: a probabilistic TensorDict module.
        critic_network: a TensorDict module that writes ``state_value``; None for a policy loss alone.
        **kwargs: as for the parent, the options in ``UNSUPPORTED`` unset; ``valid_key`` and ``log_explained_variance``
            as for :class:`DeviceClipPPOLoss`.

    Raises:
        TypeError: at construction, for an argument that the parent does not have.
        ValueError: at construction, for an unsupported option or value; at a call, for shapes as in
            :class:`DeviceClipPPOLoss`.
        KeyError: when the batch has no advantage, log-probability or parameters.
    """

    beta: Tensor

    def __init__(
        self, actor_network: nn.Module | None = None, critic_network: nn.Module | None = None, **kwargs: Any
    ) -> None:
        super().__init__(actor_network, critic_network, **kwargs)
        critic = ("loss_critic", "value_clip_fraction", "explained_variance")
        self._set_out_keys("loss_objective", "kl", "entropy", "loss_entropy", *critic, "kl_approx", "beta")

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Losses and diagnostics of a minibatch ``[B]``; adapts ``beta``."""
        tensordict = tensordict.copy()  # the networks write into it
        advantage = self._advantage(tensordict)
        valid = self.valid_rows(tensordict, advantage.shape[:-1])
        self._clean(tensordict, valid, parameters=True)
        advantage = self._normalized(advantage, valid)
        old = self._stored_dist(tensordict)
        log_ratio, dist = self._log_ratio(tensordict, advantage, valid)
        kl = kept(widened(divergence(old, dist, self.samples_mc_kl)), valid)
        mean_kl = valid_mean(kl, valid)
        beta = self.beta.clone()  # it changes below, and the gradient is that of this one
        gain = _finite(log_ratio).exp() * advantage
        if self.reduction == "mean":
            objective = beta * mean_kl - valid_mean(gain, valid)
        else:
            objective = self._reduced(beta * kl.unsqueeze(-1) - gain, valid)
        out = TensorDict({"loss_objective": objective, "kl": mean_kl.detach(), "beta": beta})
        out.set("kl_approx", -valid_mean(log_ratio.detach(), valid))
        self._adapt(out.get("kl"), valid)
        if self.entropy_bonus:
            self._add_entropy(out, dist, valid)
        if self._has_critic:
            self._add_critic(out, tensordict, valid)
        return out

    def _adapt(self, kl: Tensor, valid: Tensor | None) -> None:
        lower = torch.where(kl < self.dtarg / 1.5, self.decrement, 1.0)
        factor = torch.where(kl > self.dtarg * 1.5, self.increment, lower)
        # rows that do not count say nothing about the policy
        self.beta.mul_(factor if valid is None else torch.where(valid.any(), factor, 1.0))

    def reset(self) -> None:
        """``beta`` is what it was at construction."""
        self.beta.fill_(self._beta_init)


def _valid_key_of(actor: nn.Module) -> NestedKey | None:
    """The key of the flag that an actor hands to its distribution, or keeps for its nodes; None without one."""
    for module in actor.modules():
        key = getattr(module, "valid_key", None)
        if key is not None:
            return cast("NestedKey", unravel_key(key))
        if isinstance(module, ProbabilisticTensorDictModule):
            names = dict(zip(cast("Any", module.dist_keys), module.in_keys, strict=False))
            if "valid" in names:
                return cast("NestedKey", names["valid"])
    return None


def _weighted(weights: Mapping[NestedKey, float], parts: dict[NestedKey, Tensor]) -> list[tuple[float, Tensor]]:
    """The parts' entropies ``[*]`` beside their weights.

    Raises:
        KeyError: for a part without a weight, a weight without a part, and weights for an action of one part.
    """
    weights = {cast("NestedKey", unravel_key(name)): weight for name, weight in weights.items()}
    absent = [name for name in parts if name not in weights]
    unknown = [name for name in weights if name not in parts]
    if absent or unknown:
        raise KeyError(
            f"entropy_coeff: expected a weight for each of {list(parts)}, received {list(weights)}. Remedy: add "
            f"{absent} and remove {unknown}, or give one number for all."
        )
    return [(weights[name], part) for name, part in parts.items()]


def _ratio_statistics(log_ratio: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
    """Effective sample size over the number of rows, greatest and mean ratio, of ``[*, 1]``, each 0-d."""
    flat = log_ratio.flatten()
    if valid is None:
        count: Tensor | int = flat.numel()
    else:
        flat = torch.where(valid.flatten(), flat, -torch.inf)  # a ratio of 0
        count = valid.sum().clamp_min(1)
    ess = (2 * flat.logsumexp(0) - (2 * flat).logsumexp(0)).exp() / count
    ratio = flat.exp()
    statistics = {"ESS": ess, "max_ratio": ratio.max(), "mean_ratio": ratio.sum() / count}
    if valid is None:
        return statistics
    return {name: torch.where(valid.any(), value, 0.0) for name, value in statistics.items()}


def _finite(log_ratio: Tensor) -> Tensor:
    # exp of more than 88 is infinite, and its gradient NaN even where the ratio is clipped
    return log_ratio.clamp_max(MAX_LOG_RATIO)


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else cast("tuple[str, ...]", key)


def _names(tensordict: TensorDictBase) -> list[str]:
    return sorted(map(str, tensordict.keys(True, True)))
