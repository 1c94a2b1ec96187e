"""Epsilon-greedy exploration whose schedule is closed form and lives on the device."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Categorical, OneHot, TensorSpec

from torchrl_perf.functional.masked import effective_mask, of_agents, of_rows
from torchrl_perf.functional.schedules import linear


class EpsilonGreedy(TensorDictModuleBase):
    """Acts greedily on a network of action values, or at random with probability epsilon, for each row on its own.

    One module stands for TorchRL's ``QValueActor`` and ``EGreedyModule``. Epsilon falls linearly from ``eps_start`` to
    ``eps_end`` in ``decay_frames`` frames; :meth:`step` advances it by any number of frames at the cost of one. All of
    the schedule is in buffers: ``.to(device)`` moves it, ``state_dict`` holds it, and a captured graph honours what is
    written there in place. Actions are greedy where TorchRL's exploration type is not RANDOM.

    Any batch shape ``[*]`` serves, ``[N, A]`` of agents, too. Action 0 is the answer of a row that allows no action,
    and of an agent that does not exist, whatever the network says of it, NaN included.

    Keys read: ``in_keys``, and ``mask_key`` and ``valid_key`` if given. Written: ``action_key``.

    Args:
        network: maps the inputs to action values ``[*, D]``.
        spec: the action's spec, of index (int64 ``[*]``) or one-hot ``[*, D]`` actions.
        in_keys: what the network reads.
        action_key: where the action is written.
        mask_key: bool ``[*, D]``, True for the actions that are allowed; all are by default. A mask of an env,
            ``[N, D]`` or ``[N, 1, D]``, holds for all its agents.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist; all do by default. A flag of an env,
            ``[N]`` or ``[N, 1]``, holds for all its agents.
        eps_start: epsilon at frame 0.
        eps_end: epsilon from ``decay_frames`` on.
        decay_frames: frames in which epsilon falls.

    Attributes:
        network: the network.
        spec: the action's spec.
        epsilon: buffer, 0-d, the current probability.

    Raises:
        ValueError: for another kind of spec, and an epsilon outside [0, 1].
    """

    epsilon: Tensor
    frames: Tensor
    eps_start: Tensor
    eps_end: Tensor
    decay_frames: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        spec: TensorSpec,
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        mask_key: NestedKey | None = None,
        valid_key: NestedKey | None = None,
        eps_start: float = 1.0,
        eps_end: float = 0.05,
        decay_frames: int = 10_000,
    ) -> None:
        super().__init__()
        if not isinstance(spec, Categorical | OneHot):
            raise ValueError(
                f"spec: expected Categorical (index) or OneHot actions, received {type(spec).__name__}. Remedy: an "
                "algorithm for continuous actions, such as SAC, or a discretised action space."
            )
        for name, value in (("eps_start", eps_start), ("eps_end", eps_end)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}: expected a probability in [0, 1], received {value}.")
        self.network, self.spec = network, spec
        self.num_actions = int(spec.space.n)
        self.one_hot = isinstance(spec, OneHot)
        self.dtype = spec.dtype
        self.action_key = action_key
        self.mask_key, self.valid_key = mask_key, valid_key
        self.in_keys = [*in_keys, *(key for key in (mask_key, valid_key) if key is not None)]  # pyright: ignore
        self.out_keys = [action_key]  # pyright: ignore
        self.network_keys = list(in_keys)
        device = next((p.device for p in network.parameters()), spec.device)
        self.register_buffer("epsilon", torch.tensor(float(eps_start), device=device))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("eps_start", torch.tensor(float(eps_start), device=device))
        self.register_buffer("eps_end", torch.tensor(float(eps_end), device=device))
        self.register_buffer("decay_frames", torch.tensor(decay_frames, dtype=torch.int64, device=device))

    def step(self, frames: int | Tensor = 1) -> None:
        """Advances the schedule by a number of frames, in place and without a host read."""
        self.frames += frames
        self.epsilon.copy_(linear(self.frames, self.eps_start, self.eps_end, self.decay_frames))

    def action_values(self, tensordict: TensorDictBase) -> Tensor:
        """``[*, D]`` values of all actions, from ``in_keys``."""
        return self.network(*[tensordict.get(key) for key in self.network_keys])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action; explore or not as TorchRL's exploration type says."""
        values = self.action_values(tensordict)
        mask = None
        if self.mask_key is not None:
            mask = effective_mask(of_agents(tensordict.get(self.mask_key), values).expand(values.shape))
            values = values.masked_fill(~mask, -torch.inf)
        action = values.argmax(-1)
        if interaction_type() is InteractionType.RANDOM:
            action = self._explore(action, mask)
        if self.valid_key is not None:
            action = torch.where(of_rows(tensordict.get(self.valid_key), action.shape), action, 0)
        if self.one_hot:
            hot = action.unsqueeze(-1) == torch.arange(self.num_actions, device=action.device)
            tensordict.set(self.action_key, hot.to(self.dtype))
        else:
            tensordict.set(self.action_key, action.to(self.dtype))
        return tensordict

    def _explore(self, greedy: Tensor, mask: Tensor | None) -> Tensor:
        """Random actions in place of a share epsilon of the greedy ones."""
        if mask is None:
            # one draw of two numbers a row: whether to explore, and where
            noise = torch.rand((2, *greedy.shape), device=greedy.device)
            chance, choice = noise[0], (noise[1] * self.num_actions).to(torch.int64)
        else:
            noise = torch.rand((self.num_actions + 1, *greedy.shape), device=greedy.device)
            chance, choice = noise[0], noise[1:].movedim(0, -1).masked_fill(~mask, -1.0).argmax(-1)
        return torch.where(chance < self.epsilon, choice, greedy)
