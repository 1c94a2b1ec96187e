"""n-step transitions, made when a replay buffer is extended."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.envs import Transform

from torchrl_perf.functional.n_step import n_step_targets
from torchrl_perf.functional.rows.missing import steps_without_successor
from torchrl_perf.runtime.self_capture import self_capturing
from torchrl_perf.runtime.upstream.transforms import holder_of
from torchrl_perf.transforms.missing import fill_missing


class NStepTransform(Transform):
    """Turns a batch of steps into n-step transitions (Sutton and Barto, Reinforcement Learning, 2nd ed., 7.1).

    The counterpart of TorchRL's ``MultiStepTransform``, without its state: each batch is transformed by itself, nothing
    is held back, and the flags of "next" are those of the window's last step. (TorchRL keeps those of the first step,
    so that a window which ends in a terminal state still bootstraps.) A window ends with the first done step, or with
    the batch: the last ``n_steps - 1`` steps of a batch get shorter windows, whose length is in ``steps_to_next_obs``.

    A :class:`torchrl_perf.replay.DeviceStorage` with ``n_step > 1`` does the same when it is sampled, across batches,
    and stores each step once; use the transform for other storages.

    In a replay buffer it runs when ``[*batch, T]`` is extended, and samples pass unchanged. Called by itself, or as
    ``postproc`` of a collector, it returns the transformed batch. The given batch is never written to.

    A final observation that is missing is NaN as a whole in TorchRL's convention for envs that reset themselves. As in
    :class:`GAETransform` and TorchRL's ``GAE``, the observation of the window's last step stands in for it where that
    step ended an episode or the batch: a truncated window bootstraps from the last value that is known. A NaN anywhere
    else stays.

    Reads (at index t):
        ``("next", "reward")``: ``[*batch, T, *F]`` float
        ``("next", "done")``: ``[*batch, T, 1]`` bool

    Writes:
        ``("next", "reward")``: ``sum_(k < steps) gamma^k * reward_(t+k)``, at least float32
        ``("next", *)``: every other key, flags included, as at the window's last step
        ``"steps_to_next_obs"``: ``[*batch, T, 1]`` int64, in [1, n_steps]
        ``"gamma"``: ``[*batch, T, 1]`` float32, ``gamma ** steps_to_next_obs``

    Args:
        n_steps: longest window, at least 1; may be set later, as in TorchRL.
        gamma: discount in [0, 1], a number or a 0-d tensor.
        reward_keys: rewards to sum, as named under "next"; None for ``["reward"]``.
        done_key: the flag, as named under "next", that ends a window; None for ``"done"``.
        done_keys: None. TorchRL leaves these flags as the window's first step has them; here all flags are the last's.
        mask_key: None. A batch of whole streams has no padding.

    Raises:
        ValueError: if ``n_steps`` or ``gamma`` is out of range, or an argument is one of those refused; when a batch
            has no time dimension (the last one of at least two, or one named "time") or more than one flag a step.
        KeyError: when a batch lacks a key.
    """

    invertible = True

    def __init__(
        self,
        n_steps: int,
        gamma: float | Tensor,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        done_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        for name, key in (("done_keys", done_keys), ("mask_key", mask_key)):
            if key is not None:
                raise ValueError(
                    f"{name}: expected None, received {key!r}. Remedy: leave it out (the flags of a window are those "
                    "of its last step, and a batch of streams has no padding), or torchrl's MultiStepTransform."
                )
        if n_steps < 1:
            raise ValueError(
                f"expected n_steps of at least 1, received {n_steps}. Remedy: n_steps=1 keeps single steps"
            )
        if not 0 <= gamma <= 1:
            raise ValueError(f"expected gamma between 0 and 1, received {gamma}. Remedy: a number such as 0.99")
        self.n_steps = n_steps
        self.gamma = float(gamma)
        self.reward_keys = [unravel_key(key) for key in (reward_keys or ["reward"])]
        self.done_key = unravel_key("done" if done_key is None else done_key)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the n-step transitions of a batch; samples of a replay buffer are returned unchanged."""
        # A replay buffer puts its transforms into a chain and into eval mode; nothing else does both.
        is_sampled = not self.training and holder_of(self) is not None
        return tensordict if is_sampled else self._inv_call(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError(
            "NStepTransform: expected a whole [*batch, T] batch, received one step from an environment. Remedy: give "
            "it to a replay buffer or call it on a collected batch"
        )

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.parent is not None:  # an environment calls this with each action
            return self._call(tensordict)
        self._read_done(tensordict)
        made = self._windows(tensordict)
        batch = tensordict.copy()
        batch.set("next", made.get("next"))
        batch.set("steps_to_next_obs", made.get("steps_to_next_obs"))
        batch.set("gamma", made.get("gamma"))
        return batch

    @self_capturing
    def _windows(self, batch: TensorDictBase) -> TensorDictBase:
        """What a batch that was checked gets anew: "next", the number of steps, the discount."""
        done, following = self._read_done(batch), batch.get("next")
        time = batch.ndim - 1
        rewards: dict[NestedKey, Tensor] = {}
        steps = last = torch.empty(0)
        for key in self.reward_keys:
            reward = _require(following, key)
            rewards[key], steps, last = n_step_targets(reward, done, n=self.n_steps, gamma=self.gamma, time_dim=time)

        shape = batch.shape
        rows = [
            torch.arange(size, device=last.device).view(-1, *(1 for _ in range(time - dim)))
            for dim, size in enumerate(shape[:-1])
        ]
        following = following.exclude(*self.reward_keys).copy()  # the TensorDicts in it, too
        following = fill_missing(following, batch, steps_without_successor(done, time))
        following = following[(*rows, last.view(shape))]
        for key, reward in rewards.items():
            following.set(key, reward)
        steps = steps.view(*shape, 1)
        made = batch.empty()
        made.set("next", following)
        made.set("steps_to_next_obs", steps)
        made.set("gamma", torch.pow(self.gamma, steps.to(torch.float32)))
        return made

    def recorded_entries(self, leaves: dict[NestedKey, Tensor]) -> dict[NestedKey, Tensor]:
        """What a recording holds of a batch: all that is under "next", and what may stand in for it."""
        paths = {key: (key,) if isinstance(key, str) else key for key in leaves}
        under = {path[1:] for path in paths.values() if path[0] == "next"}
        return {key: leaf for key, leaf in leaves.items() if paths[key][0] == "next" or paths[key] in under}

    def _read_done(self, tensordict: TensorDictBase) -> Tensor:
        """The flag that ends windows, ``[*batch, T, 1]`` or ``[*batch, T]``, after the checks on the batch."""
        names = tensordict.names if tensordict.ndim == 1 else ["time"]
        if tensordict.ndim == 0 or names[-1] != "time":
            raise ValueError(
                f"expected a [*batch, T] batch, time last, received batch size {list(tensordict.shape)}. Remedy: flat "
                'rows have no time order: extend [N, T] batches, or name the dimension "time" if they are of one '
                "stream"
            )
        if "next" not in tensordict.keys():
            raise KeyError(
                f"expected 'next' in the batch, received {sorted(map(str, tensordict.keys()))}. Remedy: a batch of a "
                "collector"
            )
        done = _require(tensordict.get("next"), self.done_key)
        if done.numel() != tensordict.numel():
            raise ValueError(
                f"expected one flag a step, of shape {[*tensordict.shape, 1]}, in {('next', self.done_key)!r}, "
                f"received {list(done.shape)}. Remedy: name a flag that all agents share with done_key"
            )
        return done


def _require(following: TensorDictBase, key: NestedKey) -> Tensor:
    tensor = following.get(key, None)
    if tensor is None:
        available = sorted(str(name) for name in following.keys(include_nested=True, leaves_only=True))
        raise KeyError(
            f"expected {key!r} under 'next', received {available}. Remedy: name it with reward_keys or done_key"
        )
    return tensor
