"""TorchRL's clipped PPO loss without its host reads and its extra passes."""

import contextlib
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, distributions, nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.utils import distance_loss

from torchrl_perf.functional.ppo import clipped_surrogate, normalized_advantage


class DeviceClipPPOLoss(ClipPPOLoss):
    """``torchrl.objectives.ClipPPOLoss`` for policies with one action distribution whose entropy is closed form.

    The same constructor, keys and values, with three differences: nothing waits for the host (the parent reads whether
    the entropy is finite, and the value of ``clip_value``); a compiled version does not sample the entropy instead; the
    diagnostics ESS, max_ratio, mean_ratio and explained_variance, which need passes of their own, are left out.

    Keys read: those of actor and critic, action, sample_log_prob, advantage, value_target and, with ``clip_value``,
    state_value (names by ``set_keys``). Returns 0-d entries ``loss_objective``, ``loss_critic``, ``loss_entropy`` and,
    detached, ``entropy``, ``kl_approx``, ``clip_fraction``, ``value_clip_fraction``. The log-probability is shaped as
    the batch.

    Args:
        actor_network: a probabilistic TensorDict module.
        critic_network: a TensorDict module that writes ``state_value``; None for a policy loss alone.
        **kwargs: as for the parent; ``reduction`` has to be ``"mean"``, and the options in ``UNSUPPORTED`` unset.

    Raises:
        ValueError: at construction, for another reduction or an unsupported option.
        KeyError: when the batch has no advantage; compute it first, with ``GAETransform``.
    """

    UNSUPPORTED = ("normalize_advantage_exclude_dims", "advantage_norm", "delay_actor", "max_importance_ratio")
    """Options of the parent that this loss does not have."""

    def __init__(self, actor_network: nn.Module, critic_network: nn.Module | None = None, **kwargs: Any) -> None:
        reduction = kwargs.get("reduction") or "mean"
        if reduction != "mean":
            raise ValueError(f"reduction: expected 'mean', received {reduction!r}. Remedy: torchrl's ClipPPOLoss.")
        refused = {name: kwargs[name] for name in self.UNSUPPORTED if kwargs.get(name)}
        if refused:
            raise ValueError(f"Expected none of {self.UNSUPPORTED}, received {refused}. Remedy: torchrl's ClipPPOLoss.")
        super().__init__(actor_network, critic_network, **kwargs)
        # a Python bool: asking the parent's clip_value buffer would be a host read at each call
        self._clips_value = self.clip_value is not None and bool(self.clip_value)

    def _get_entropy(self, dist: distributions.Distribution, adv_shape: torch.Size) -> Tensor:
        return dist.entropy().unsqueeze(-1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Losses and diagnostics of a minibatch ``[B]``."""
        keys = self.tensor_keys
        tensordict = tensordict.copy()  # the networks write into it
        advantage = tensordict.get(keys.advantage, None)
        if advantage is None:
            raise KeyError(
                f"Expected {keys.advantage!r} in the batch, received "
                f"{sorted(map(str, tensordict.keys(True, True)))}. Remedy: run GAETransform on the [N, T] batch first."
            )
        if self.normalize_advantage:
            advantage = normalized_advantage(advantage)
        log_prob, dist, _ = self._get_cur_log_prob(tensordict)
        log_ratio = (log_prob - tensordict.get(keys.sample_log_prob)).unsqueeze(-1)
        gain, clipped = clipped_surrogate(log_ratio, advantage, *self._clip_bounds)
        out = TensorDict({"loss_objective": -gain.mean(), "clip_fraction": clipped.to(gain.dtype).mean()})
        out.set("kl_approx", -log_ratio.detach().mean())
        if self.entropy_bonus:
            entropy = self._get_entropy(dist, advantage.shape[:-1]).mean()
            out.set("entropy", entropy.detach())
            out.set("loss_entropy", -cast("Tensor", self.entropy_coeff) * entropy)
        if self._has_critic:
            loss_critic, value_clip_fraction, _ = self.loss_critic(tensordict)
            out.set("loss_critic", loss_critic.mean())
            if value_clip_fraction is not None:
                out.set("value_clip_fraction", value_clip_fraction)
        return out

    def loss_critic(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor | None, None]:
        """Value loss of each row times ``critic_coeff``, and the fraction of clipped values; overwrites state_value."""
        keys = self.tensor_keys
        if self.separate_losses:
            tensordict = tensordict.detach()
        needed = [keys.value_target, keys.value] if self._clips_value else [keys.value_target]
        absent = [key for key in needed if tensordict.get(key, None) is None]
        if absent:
            raise KeyError(
                f"Expected {needed} in the batch, received {sorted(map(str, tensordict.keys(True, True)))}. Remedy: "
                "run GAETransform on the [N, T] batch first, or clip_value=False where only the old value is missing."
            )
        old_value, target = tensordict.get(keys.value, None), tensordict.get(keys.value_target)
        with (
            self.critic_network_params.to_module(self.critic_network, preserve_module_state=False)
            if self.functional
            else contextlib.nullcontext()
        ):
            value = self.critic_network(tensordict).get(keys.value)
        loss = distance_loss(target, value, loss_function=self.loss_critic_type)
        clip_fraction = None
        if self._clips_value:
            change = value - old_value
            limit = cast("Tensor", self.clip_value)
            clipped = change.clamp(-limit, limit)
            loss = torch.maximum(loss, distance_loss(target, old_value + clipped, loss_function=self.loss_critic_type))
            clip_fraction = (change != clipped).to(loss.dtype).mean().detach()
        return cast("Tensor", self.critic_coeff) * loss, clip_fraction, None
