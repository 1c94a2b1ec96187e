"""Epsilon-greedy exploration whose schedule is closed form and lives on the device."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec

from torchrl_perf.functional.masked import effective_mask, of_agents, of_rows
from torchrl_perf.functional.schedules import linear
from torchrl_perf.modules.specs import composite_of
from torchrl_perf.runtime.draws import uniform
from torchrl_perf.runtime.self_capture import self_capturing

ACTION_VALUE_KEY, CHOSEN_VALUE_KEY = "action_value", "chosen_action_value"
SINGLE = Categorical | OneHot


class EpsilonGreedy(TensorDictModuleBase):
    """Acts greedily on a network of action values, or at random with probability epsilon, independently in each row.

    With a network it replaces TorchRL's ``QValueActor`` and ``EGreedyModule`` together. Without one it is the
    counterpart of ``EGreedyModule``: it follows a policy, ``TensorDictSequential(policy, EpsilonGreedy(spec))``, and
    replaces some of the policy's actions by random ones.

    Epsilon falls linearly from ``eps_init`` to ``eps_end`` in ``annealing_num_steps`` frames; :meth:`step` advances it
    by any number of frames at the cost of one. The schedule is in buffers: ``.to(device)`` moves it, ``state_dict``
    holds it, and a captured graph sees in-place changes. Actions are greedy if TorchRL's exploration type is not
    RANDOM.

    Any batch shape ``[*]`` works, such as ``[N, A]`` of agents. A row that allows no action, and an agent that does not
    exist, get action 0, whatever the network's output, NaN included.

    Keys read: ``in_keys``, and ``action_mask_key`` and ``valid_key`` if given; without a network the action. Written:
    ``action_key``, and by a network "action_value" ``[*, D]`` and "chosen_action_value" ``[*, 1]`` as a ``QValueActor``
    does, so that TorchRL's losses accept it as one: the values of all actions, and that of the action written, explored
    or not. ``write_values=False`` leaves both out, for a policy that only collects.

    Args:
        network: maps the inputs to action values ``[*, D]``; or, in its place, the spec.
        eps_init: epsilon at frame 0.
        eps_end: epsilon at last; by default 0.05, and without a network 0.1, as TorchRL's.
        annealing_num_steps: frames in which epsilon falls; by default 10,000, and without a network 1,000.
        spec: the action's spec, or a Composite that holds it at ``action_key``: index (int64 ``[*]``) or one-hot
            ``[*, D]`` actions; without a network also several in one, ``MultiCategorical`` or ``MultiOneHot``, whose
            parts are drawn together, and ``Binary``.
        in_keys: what the network reads, ``("observation",)`` by default.
        action_key: where the action is written.
        action_mask_key: bool ``[*, D]``, True for the actions that are allowed; all are by default. A mask of an env,
            ``[N, D]`` or ``[N, 1, D]``, holds for all its agents.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist; all do by default. A flag of an env,
            ``[N]`` or ``[N, 1]``, holds for all its agents.
        write_values: write the values of a network, too.
        device: of the schedule; by default the network's, or the spec's.
        **former: ``mask_key``, ``eps_start`` and ``decay_frames`` for ``action_mask_key``, ``eps_init`` and
            ``annealing_num_steps``.

    Attributes:
        network: the network, or None.
        spec: a Composite that holds the action's spec.
        epsilon: buffer, 0-d, the current probability; ``eps`` is the same.

    Raises:
        ValueError: for another kind of spec, a mask of several actions in one, and an epsilon outside [0, 1]; at a
            call, for a number of values or actions that is not the spec's.
        TypeError: for other arguments.
    """

    epsilon: Tensor
    frames: Tensor
    eps_start: Tensor
    eps_end: Tensor
    decay_frames: Tensor

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        network: nn.Module | TensorSpec | None = None,
        eps_init: float = 1.0,
        eps_end: float | None = None,
        annealing_num_steps: int | None = None,
        *,
        spec: TensorSpec | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        action_key: NestedKey = "action",
        action_mask_key: NestedKey | None = None,
        valid_key: NestedKey | None = None,
        write_values: bool = True,
        device: torch.device | str | None = None,
        **former: Any,
    ) -> None:
        super().__init__()
        if isinstance(network, TensorSpec):
            if spec is not None:
                raise ValueError("spec: expected one, received two. Remedy: EpsilonGreedy(spec).")
            network, spec = None, network
        mask_key = former.pop("mask_key", action_mask_key)
        eps_start = former.pop("eps_start", eps_init)
        decay_frames = former.pop("decay_frames", annealing_num_steps)
        if former:
            raise TypeError(
                f"EpsilonGreedy: expected its own arguments, received {sorted(former)}. Remedy: take these out."
            )
        eps_end = (0.05 if network is not None else 0.1) if eps_end is None else eps_end
        decay_frames = (10_000 if network is not None else 1_000) if decay_frames is None else decay_frames
        self.network, self.action_key = network, action_key
        self.write_values = write_values and network is not None
        self._read_spec(spec, mask_key)
        for name, value in (("eps_start", eps_start), ("eps_end", eps_end)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(
                    f"{name}: expected a probability in [0, 1], received {value}. Remedy: a number from 0 to 1."
                )
        if decay_frames < 0:
            raise ValueError(
                f"annealing_num_steps: expected at least 0 frames, received {decay_frames}. Remedy: "
                "annealing_num_steps=0 for no annealing."
            )
        self._make_keys(in_keys, mask_key, valid_key)
        leaf = cast("Any", self.spec)[action_key]
        own = None if network is None else next((param.device for param in network.parameters()), None)
        device = device if device is not None else own if own is not None else leaf.device
        for name, value in (("epsilon", eps_start), ("eps_start", eps_start), ("eps_end", eps_end)):
            self.register_buffer(name, torch.tensor(float(value), dtype=torch.float32, device=device))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("decay_frames", torch.tensor(decay_frames, dtype=torch.int64, device=device))
        self._make_parts(leaf, device)

    def _read_spec(self, spec: TensorSpec | None, mask_key: NestedKey | None) -> None:
        leaf: Any = spec
        if isinstance(spec, Composite):
            leaf = spec[self.action_key] if self.action_key in spec.keys(True, True) else None
            if leaf is None:
                raise ValueError(
                    f"spec: expected {self.action_key!r} in the Composite, received {list(spec.keys(True, True))}. "
                    "Remedy: action_key, or the action's own spec."
                )
        served = SINGLE if self.network is not None else SINGLE | MultiCategorical | MultiOneHot | Binary
        # MultiCategorical and MultiOneHot inherit from the single ones
        several = isinstance(leaf, MultiCategorical | MultiOneHot | Binary)
        if not isinstance(leaf, served) or (several and self.network is not None):
            raise ValueError(
                f"spec: expected Categorical (index) or OneHot actions, received {type(leaf).__name__}. Remedy: an "
                "algorithm for continuous actions, such as SAC, or a discretised action space; of several actions in "
                "one a policy of your own, followed by EpsilonGreedy(spec)."
            )
        if several and mask_key is not None:
            raise ValueError(
                f"action_mask_key: expected None for {type(leaf).__name__}, received {mask_key!r}. Remedy: one action "
                "out of all combinations."
            )
        self.spec = composite_of(cast("TensorSpec", spec), self.action_key)
        self.several = several
        self.one_hot = isinstance(leaf, OneHot | MultiOneHot)
        self.dtype = leaf.dtype
        self.num_actions = leaf.shape[-1] if several else int(leaf.space.n)

    def _make_keys(
        self, in_keys: Sequence[NestedKey] | None, mask_key: NestedKey | None, valid_key: NestedKey | None
    ) -> None:
        if in_keys is None:
            in_keys = [self.action_key] if self.network is None else ["observation"]
        self.mask_key, self.valid_key = mask_key, valid_key
        self.in_keys = [*in_keys, *(key for key in (mask_key, valid_key) if key is not None)]  # pyright: ignore
        values = [ACTION_VALUE_KEY, CHOSEN_VALUE_KEY] if self.write_values else []
        self.out_keys = [self.action_key, *values]  # pyright: ignore
        self.network_keys = list(in_keys)

    def _make_parts(self, leaf: Any, device: torch.device | str | None) -> None:
        """The number of choices of each part of the action, in a buffer that is rebuilt instead of stored."""
        if isinstance(leaf, Binary):
            sizes = [2] * leaf.shape[-1]
        elif isinstance(leaf, MultiCategorical):
            sizes = leaf.nvec.reshape(-1, leaf.nvec.shape[-1])[0]
        elif isinstance(leaf, MultiOneHot):
            sizes = [int(box.n) for box in leaf.space]
        else:
            sizes = [self.num_actions]
        self.parts = [int(size) for size in sizes]
        self.register_buffer("_sizes", torch.tensor(self.parts, device=device), persistent=False)

    @property
    def eps(self) -> Tensor:
        """The current epsilon, under TorchRL's name."""
        return self.epsilon

    @property
    def eps_init(self) -> Tensor:
        """Epsilon at frame 0, under TorchRL's name."""
        return self.eps_start

    @property
    def annealing_num_steps(self) -> Tensor:
        """Frames in which epsilon falls, under TorchRL's name."""
        return self.decay_frames

    @property
    def action_space(self) -> str:
        """``"one-hot"`` or ``"categorical"``, as TorchRL's losses ask for it."""
        return "one-hot" if self.one_hot else "categorical"

    def step(self, frames: int | Tensor = 1) -> None:
        """Advances the schedule by a number of frames, in place and without a host read."""
        self.frames += frames
        self.epsilon.copy_(linear(self.frames, self.eps_start, self.eps_end, self.decay_frames))

    def action_values(self, tensordict: TensorDictBase) -> Tensor:
        """``[*, D]`` values of all actions, from ``in_keys``.

        Raises:
            ValueError: for another number of values than actions, and without a network.
        """
        if self.network is None:
            raise ValueError("network: expected one, received None. Remedy: EpsilonGreedy(network, spec=spec).")
        values = cast("nn.Module", self.network)(*[tensordict.get(key) for key in self.network_keys])
        if values.shape[-1:] != (self.num_actions,):
            raise ValueError(
                f"network: expected values [*, {self.num_actions}], one for each action, received "
                f"{list(values.shape)}. Remedy: as many outputs as actions."
            )
        return values

    @self_capturing
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action; explore or not as TorchRL's exploration type says."""
        explores = interaction_type() is InteractionType.RANDOM
        if self.network is None:
            return self._follow(tensordict) if explores or interaction_type() is None else tensordict
        values = self.action_values(tensordict)
        mask = self._mask(tensordict, values)
        masked = values if mask is None else values.masked_fill(~mask, -torch.inf)
        action = masked.argmax(-1)
        if explores:
            action = self._explore(action, mask)
        if self.valid_key is not None:
            action = torch.where(of_rows(tensordict.get(self.valid_key), action.shape), action, 0)
        if self.write_values:
            chosen = values.gather(-1, action.unsqueeze(-1))
            tensordict.set(ACTION_VALUE_KEY, values).set(CHOSEN_VALUE_KEY, chosen)
        return tensordict.set(self.action_key, self._encoded(action, self.dtype))

    def _mask(self, tensordict: TensorDictBase, values: Tensor) -> Tensor | None:
        if self.mask_key is None:
            return None
        return effective_mask(of_agents(tensordict.get(self.mask_key), values).expand(values.shape))

    def _encoded(self, action: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.one_hot:
            return action.to(dtype)
        return (action.unsqueeze(-1) == torch.arange(self.num_actions, device=action.device)).to(dtype)

    def _explore(self, greedy: Tensor, mask: Tensor | None) -> Tensor:
        """Random actions in place of a share epsilon of the greedy ones."""
        # float32 whatever the default dtype: 16 bits are too coarse for many actions or a small epsilon
        kind: dict[str, Any] = {"dtype": torch.float32, "device": greedy.device}
        if mask is None:
            # one draw of two numbers a row: whether to explore, and where
            noise = uniform((2, *greedy.shape), **kind)
            chance, choice = noise[0], (noise[1] * self.num_actions).to(torch.int64)
        else:
            noise = uniform((self.num_actions + 1, *greedy.shape), **kind)
            chance, choice = noise[0], noise[1:].movedim(0, -1).masked_fill(~mask, -1.0).argmax(-1)
        return torch.where(chance < self.epsilon, choice, greedy)

    # -- after a policy -----------------------------------------------------------------------------------------------

    def _follow(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replaces some of a policy's actions by random ones."""
        action = cast("Tensor", tensordict.get(self.action_key))
        last = self.num_actions if self.one_hot or self.several else None
        if last is not None and action.shape[-1:] != (last,):
            raise ValueError(
                f"{self.action_key}: expected [*, {last}], as in the spec, received {list(action.shape)}. Remedy: the "
                "spec of what the policy writes."
            )
        rows = action.shape if last is None else action.shape[:-1]
        if self.several:
            found = self._several(action, rows)
        else:
            index = action if last is None else action.to(torch.uint8).argmax(-1)
            like = torch.empty((*rows, self.num_actions), device="meta")
            found = self._encoded(self._explore(index, self._mask(tensordict, like)), action.dtype)
        if self.valid_key is not None:
            exists = of_rows(tensordict.get(self.valid_key), rows)
            found = torch.where(exists if last is None else exists.unsqueeze(-1), found, action)
        return tensordict.set(self.action_key, found)

    def _several(self, action: Tensor, rows: Sequence[int]) -> Tensor:
        """As :meth:`_explore`, for an action of several parts, which are all drawn together."""
        parts = len(self.parts)
        noise = uniform((*rows, parts + 1), dtype=torch.float32, device=action.device)
        choice = (noise[..., 1:] * self._sizes).to(torch.int64)
        if self.one_hot:
            hot = [
                choice[..., i, None] == torch.arange(size, device=action.device) for i, size in enumerate(self.parts)
            ]
            choice = torch.cat(hot, -1)
        return torch.where(noise[..., :1] < self.epsilon, choice.to(action.dtype), action)
