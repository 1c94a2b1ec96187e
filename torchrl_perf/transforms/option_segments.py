"""From steps to the transitions of a policy over options."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.envs import Transform

from torchrl_perf.functional.losses.options import OpenOption, no_option, option_segments
from torchrl_perf.modules.option_set import (
    ACTIVE_KEY,
    AGE_KEY,
    AVAILABLE_KEY,
    LOG_PROB_KEY,
    OPTION_KEY,
    START_KEY,
)

_NOT_CARRIED = {"reward", "done", "terminated", "truncated", "is_init", OPTION_KEY, AGE_KEY, ACTIVE_KEY}


class OptionSegments(Transform):
    """Turns ``[N, T]`` batches of steps into the semi-Markov transitions of the options that ended, in static shapes.

    Each option, from its choice to its end, becomes one transition: the state in which it was chosen, the option, its
    discounted reward R, its duration n, the true state in which it ended (Sutton, Precup and Singh, 1999). An option
    that is still open when a batch ends is carried over in buffers and comes with the batch in which it ends; how the
    stream is cut into batches changes nothing. Entry j of a row belongs to the boundary before step j: where an option
    ended there, "mask" is True; other entries have no meaning. What ends with the last step of a batch is told at entry
    0 of the next batch.

    Call it on each batch, in order; in a replay buffer it runs when the buffer is extended, and samples pass it
    untouched. :class:`~torchrl_perf.replay.OptionReplay` keeps the transitions that there are and no others.

    Reads (at index t):
        "option_start" bool, "active_option" int64, "option_log_prob" float ``[N, T]``, "option_available" bool
        ``[N, T, O]``: as the controller wrote them
        ("next", "reward") float, ("next", "done") and ("next", "terminated") bool: ``[N, T, 1]``
        ``keys`` and ("next", key) for each

    Writes, in a new TensorDict ``[N, T]``:
        "mask": bool ``[N, T]``
        ``keys``, "active_option", "option_log_prob", "option_available": as when the option was chosen
        ("next", "reward"): R ``[N, T, 1]``
        ("next", key) for each of ``keys``, ("next", "done"), ("next", "terminated"): as after its last step
        ("next", "option") and ("next", "option_age"): the option and n, int64 ``[N, T]``
        "steps_to_next_obs": n, int64 ``[N, T, 1]``; "gamma": ``gamma ** n`` ``[N, T, 1]``

    Args:
        example: a batch ``[N, T]`` (such as ``collector.batch``), of which the shapes of the carried state are taken.
        gamma: discount of a step, in [0, 1].
        keys: what the controller's networks and rules read; by default every entry that is both at the root and under
            "next", apart from reward, flags and the options' own.

    Raises:
        KeyError: where the example lacks a key.
        ValueError: for a gamma out of range, an example that is not ``[N, T]``, a batch of another N.
    """

    invertible = True

    def __init__(self, example: TensorDictBase, *, gamma: float, keys: Sequence[NestedKey] | None = None) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma: expected a discount in [0, 1], received {gamma}.")
        _check_batch(example, None)
        self.gamma = gamma
        self.num_envs = example.shape[0]
        self.keys = _shared_keys(example) if keys is None else [unravel_key(key) for key in keys]
        self.start_keys = [*self.keys, ACTIVE_KEY, LOG_PROB_KEY, AVAILABLE_KEY]
        self.end_keys = [*self.keys, "done", "terminated"]
        sources = [_require(example, key) for key in self.start_keys]
        ends = [_require(example, ("next", key)) for key in self.end_keys]
        reward = _require(example, ("next", "reward"))
        # buffers cannot be named after nested keys
        for prefix, values in (("start", sources), ("end", ends)):
            for number, value in enumerate(values):
                self.register_buffer(f"{prefix}_{number}", torch.zeros_like(value[:, 0]).contiguous())
        for name, value in no_option(torch.zeros_like(reward.reshape(self.num_envs, -1)[:, 0]))._asdict().items():
            self.register_buffer(f"open_{name}", value)

    @property
    def open_option(self) -> OpenOption:
        """The options that run after the last batch, ``[N]`` each."""
        return OpenOption(*(getattr(self, f"open_{name}") for name in OpenOption._fields))

    def restart(self) -> None:
        """Drops the open options, in place: for an env that was reset from outside."""
        for value in self.open_option:
            value.zero_()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the transitions of a batch; what a replay buffer samples is returned as it is."""
        # A replay buffer puts its transforms into a chain and into eval mode; nothing else does both.
        is_sampled = not self.training and self.__dict__["_container"] is not None
        return tensordict if is_sampled else self._inv_call(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError(
            "OptionSegments needs whole [N, T] batches, and an environment passes one step at a time: call it on the "
            "collected batch, or give it to a replay buffer"
        )

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.parent is not None:  # an environment calls this with each action
            return self._call(tensordict)
        _check_batch(tensordict, self.num_envs)
        shape = tensordict.shape
        start = _require(tensordict, START_KEY).view(shape)
        done = _require(tensordict, ("next", "done")).view(shape)
        reward = _require(tensordict, ("next", "reward")).view(shape)
        segments, after = option_segments(start, done, reward, self.gamma, self.open_option)

        result = TensorDict({}, shape, device=tensordict.device, names=tensordict.names)
        result.set("mask", segments.ended)
        after_first = torch.where(after.running, shape[1] - after.steps, 0)
        first = torch.cat([segments.first, after_first.unsqueeze(-1)], -1)
        for number, key in enumerate(self.start_keys):
            values = self._at_start(_require(tensordict, key), first, getattr(self, f"start_{number}"))
            result.set(key, values)
        for number, key in enumerate(self.end_keys):
            values, last = _require(tensordict, ("next", key)), getattr(self, f"end_{number}")
            result.set(("next", key), torch.cat([last.unsqueeze(1), values[:, :-1]], 1))
            last.copy_(values[:, -1])
        steps = segments.steps
        result.set(("next", "reward"), segments.returns.unsqueeze(-1))
        result.set(("next", OPTION_KEY), result.get(ACTIVE_KEY))
        result.set(("next", AGE_KEY), steps)
        result.set("steps_to_next_obs", steps.unsqueeze(-1))
        result.set("gamma", torch.pow(self.gamma, steps.to(torch.float32)).unsqueeze(-1))
        for target, value in zip(self.open_option, after, strict=True):
            target.copy_(value)
        return result

    @staticmethod
    def _at_start(values: Tensor, first: Tensor, carried: Tensor) -> Tensor:
        """``[N, T, *F]``: the entries at the first steps ``first [N, T + 1]``, or those carried from earlier batches.

        The last column of ``first`` is that of the option which goes on; its entry is carried from now on, in place.
        """
        rows = torch.arange(first.shape[0], device=first.device).unsqueeze(-1)
        is_carried = (first < 0).view(*first.shape, *(1 for _ in values.shape[2:]))
        chosen = torch.where(is_carried, carried.unsqueeze(1), values[rows, first.clamp_min(0)])
        carried.copy_(chosen[:, -1])
        return chosen[:, :-1]


def _shared_keys(example: TensorDictBase) -> list[NestedKey]:
    following = example.get("next")
    return [
        key
        for key in following.keys(True, True)
        if (key if isinstance(key, str) else key[-1]) not in _NOT_CARRIED and example.get(key, None) is not None
    ]


def _require(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(
            f"expected {key!r} in the batch, received {sorted(map(str, tensordict.keys(True, True)))}. Remedy: collect "
            "with an OptionPolicy, without excluding what its controller writes, and name the states with keys="
        )
    return value


def _check_batch(batch: TensorDictBase, num_envs: int | None) -> None:
    if batch.ndim != 2 or 0 in batch.shape or (num_envs is not None and batch.shape[0] != num_envs):
        expected = "[N, T]" if num_envs is None else f"[{num_envs}, T]"
        raise ValueError(
            f"expected a batch {expected} of steps in order, received {list(batch.shape)}. Remedy: transform a batch "
            "before it is flattened, and each stream of envs with an OptionSegments of its own."
        )
