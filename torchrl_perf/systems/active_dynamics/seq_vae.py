"""A sequential variational autoencoder: encoder, latent dynamics, decoder, and the filter that runs beside an env.

Dimension key: ``B`` windows, ``N`` envs, ``T`` steps, ``O`` channels, ``S`` numbers of the latent state, ``D`` of the
action, ``H`` of the hidden state.
"""

from typing import cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import TensorSpec, Unbounded

from torchrl_perf.functional.wide import wide_dtype, widened
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.icem import ICEMPlanner
from torchrl_perf.modules.policy_state import PolicyState
from torchrl_perf.systems.active_dynamics.latent_dynamics import LatentDynamics
from torchrl_perf.systems.active_dynamics.latent_maps import Belief, LatentDecoder, ObservationEncoder

__all__ = ["BeliefFilter", "FilteredPolicy", "SeqVAE", "UniformInputs"]

BELIEF_KEY = "belief"
HELD_KEYS = ("held", "held_for")


class SeqVAE(nn.Module):
    """A deep state-space model: beliefs about a latent state from observations, and how that state moves.

    ``z_t+1 ~ N(g(z_t, a_t), q dt)``, ``y_t ~ p(y | z_t)``, and an amortised filter ``q(z_t | y_0..t, a_0..t-1)``, as in
    Krishnan, Shalit and Sontag (arXiv:1609.09869); train it with
    :class:`~torchrl_perf.objectives.MultiStepELBOLoss`.

    Args:
        encoder: of observations.
        dynamics: of the latent state.
        decoder: of observations.
    """

    def __init__(self, encoder: ObservationEncoder, dynamics: LatentDynamics, decoder: LatentDecoder) -> None:
        super().__init__()
        self.encoder, self.dynamics, self.decoder = encoder, dynamics, decoder

    def encode(
        self,
        observation: Tensor,
        action: Tensor,
        is_init: Tensor,
        hidden: Tensor | None = None,
        previous_action: Tensor | None = None,
    ) -> Belief:
        """Beliefs at each step of windows, from the hidden state that each begins with.

        The result is that of the filter step by step, to rounding.

        Args:
            observation: ``[B, T, O]``.
            action: ``[B, T, D]``.
            is_init: bool ``[B, T]``, first steps of an episode, where hidden state and last action are 0.
            hidden: ``[B, H]`` before the first step; None is 0.
            previous_action: ``[B, D]`` before the first step; None is 0.

        Returns:
            ``loc`` and ``var`` ``[B, T, S]``, and the hidden state after the last step.
        """
        if self.encoder.kind == "mlp":
            return self.encoder(observation)
        rows, size = observation.shape[0], self.encoder.hidden_size
        state = observation.new_zeros(rows, size) if hidden is None else hidden
        before = torch.zeros_like(action[:, 0]) if previous_action is None else previous_action
        going_on = ~is_init.unsqueeze(-1)
        loc, var = [], []
        for t in range(observation.shape[1]):
            # `where`, and not a product: a hidden state that is not finite ends with its episode
            state = torch.where(going_on[:, t], state, 0.0)
            belief = self.encoder(observation[:, t], torch.where(going_on[:, t], before, 0.0), state)
            loc.append(belief.loc)
            var.append(belief.var)
            state, before = cast("Tensor", belief.hidden), action[:, t]
        return Belief(torch.stack(loc, 1), torch.stack(var, 1), state)

    def predict(self, latent: Tensor, actions: Tensor) -> Tensor:
        """Means of the states after each of some actions, without noise.

        Args:
            latent: ``[*, S]``.
            actions: ``[*, k, D]``.

        Returns:
            ``[*, k, S]``.
        """
        states = []
        for action in actions.unbind(-2):
            latent = self.dynamics(latent, action)
            states.append(latent)
        return torch.stack(states, -2)


class BeliefFilter(TensorDictModuleBase):
    """The encoder as part of a policy: one cell a step, whose state is kept in the TensorDict.

    Keys read: "observation" ``[*, O]``, and of a recurrent encoder "hidden" ``[*, H]`` and "previous_action"
    ``[*, D]``, which the :class:`~torchrl_perf.transforms.PolicyState` of :meth:`make_state` keeps in an env, 0 after a
    reset. Written: "belief" ``[*, S]``, the mean, and ("next", "hidden").

    Args:
        encoder: shared, not copied.

    Raises:
        KeyError: when it runs, for an entry that is missing.
    """

    def __init__(self, encoder: ObservationEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.in_keys = ["observation", *encoder.state_shapes]  # pyright: ignore
        self.out_keys = [BELIEF_KEY, *([("next", "hidden")] if encoder.state_shapes else [])]  # pyright: ignore

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Entries that the env has to keep, and their sizes."""
        return self.encoder.state_shapes

    def make_state(self) -> PolicyState:
        """Return the transform that keeps these entries in an env, zeros after a reset."""
        return PolicyState({key: Unbounded(shape=size) for key, size in self.state_shapes.items()})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the belief and the state after it."""
        values = [tensordict.get(key, None) for key in self.in_keys]  # pyright: ignore
        if any(value is None for value in values):
            raise KeyError(
                f"BeliefFilter: expected {self.in_keys}, received {sorted(map(str, tensordict.keys(True, True)))}. "
                "Remedy: TransformedEnv(env, filter.make_state())."
            )
        observation, *state = values
        hidden, previous = state or (None, None)
        belief = self.encoder(observation, previous, hidden)
        tensordict.set(BELIEF_KEY, belief.loc)
        if belief.hidden is not None:
            tensordict.set(("next", "hidden"), belief.hidden)
        return tensordict


class UniformInputs(TensorDictModuleBase):
    """Actions drawn uniformly within their bounds, the baseline for active inputs.

    Fresh ones at each step push a point to and fro; held for some steps, they carry it further.

    Written: "action" ``[*, D]``. Read: only the batch size; held for several steps, also "held" ``[*, D]`` and
    "held_for" ``[*, 1]``, which are written under "next", and which the :class:`~torchrl_perf.transforms.PolicyState`
    of :meth:`make_state` keeps in an env.

    Args:
        spec: the action's, ``[*, D]`` with finite bounds.
        hold: steps of each action, at least 1.

    Raises:
        ValueError: for a hold below 1.
    """

    low: Tensor
    high: Tensor

    def __init__(self, spec: TensorSpec, *, hold: int = 1) -> None:
        super().__init__()
        if hold < 1:
            raise ValueError(f"hold: expected at least 1 step, received {hold}. Remedy: hold=1 for fresh inputs.")
        low, high = action_bounds(spec)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.hold = hold
        kept = list(HELD_KEYS) if hold > 1 else []
        self.in_keys = [BELIEF_KEY, *kept]  # pyright: ignore
        self.out_keys = ["action", *(("next", key) for key in kept)]  # pyright: ignore

    def make_state(self) -> PolicyState:
        """Return the transform that keeps held inputs in an env; without any, nothing."""
        if self.hold == 1:
            return PolicyState({})
        sizes = dict(zip(HELD_KEYS, (self.low.shape[0], 1), strict=True))
        return PolicyState({key: Unbounded(shape=(size,), dtype=self.low.dtype) for key, size in sizes.items()})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action, and what is held after it."""
        size = (*tensordict.batch_size, self.low.shape[0])
        uniform = torch.rand(size, dtype=wide_dtype(self.low.dtype), device=self.low.device)
        action = _between(self.low, self.high, uniform)
        if self.hold > 1:
            held, steps = (cast("Tensor", tensordict.get(key)) for key in HELD_KEYS)
            action = torch.where(steps == 0.0, action, held)
            tensordict.set(("next", HELD_KEYS[0]), action.clone())  # the env may clip the action in place
            tensordict.set(("next", HELD_KEYS[1]), (steps + 1.0) % self.hold)
        return tensordict.set("action", action)


class FilteredPolicy(TensorDictModuleBase):
    """A filter, and a planner or random inputs that act on its belief.

    A planner trusts an untrained model as much as a trained one. So each action is replaced by a uniform one with the
    probability :attr:`random_share`, a number on the device that a schedule writes in place.

    Keys read and written: those of both parts, and with a recurrent encoder ("next", "previous_action").

    Args:
        filter_: gives the belief.
        inputs: reads "belief" and writes "action": an :class:`~torchrl_perf.modules.ICEMPlanner` with
            ``state_key="belief"`` or :class:`UniformInputs`, whose state is kept too, or a module without a state.

    Attributes:
        random_share: buffer, float32 0-d, 0 at the start.
    """

    random_share: Tensor

    def __init__(self, filter_: BeliefFilter, inputs: TensorDictModuleBase) -> None:
        super().__init__()
        self.filter, self.inputs = filter_, inputs
        device = next(filter_.parameters()).device
        self.register_buffer("random_share", torch.zeros((), device=device))
        own = [("next", "previous_action")] if filter_.state_shapes else []
        read = [key for key in inputs.in_keys if key != BELIEF_KEY]  # pyright: ignore
        self.in_keys = [*filter_.in_keys, *read]  # pyright: ignore
        self.out_keys = [*filter_.out_keys, *inputs.out_keys, *own]  # pyright: ignore

    def make_state(self) -> PolicyState:
        """Return the transform that keeps the state of filter and planner in an env."""
        planned = self.inputs.make_state().specs if isinstance(self.inputs, (ICEMPlanner, UniformInputs)) else {}
        return PolicyState({**planned, **self.filter.make_state().specs})

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write belief, action and the state after them."""
        tensordict = self.inputs(self.filter(tensordict))
        if isinstance(self.inputs, ICEMPlanner):
            planned = cast("Tensor", tensordict.get("action"))
            chance = torch.rand(*planned.shape[:-1], 1, dtype=torch.float32, device=planned.device) < self.random_share
            draws = torch.rand_like(planned, dtype=wide_dtype(planned.dtype))
            uniform = _between(self.inputs.low, self.inputs.high, draws)
            tensordict.set("action", torch.where(chance, uniform, planned))
        if self.filter.state_shapes:
            # a copy, since the env may clip the action in place
            tensordict.set(("next", "previous_action"), cast("Tensor", tensordict.get("action")).clone())
        return tensordict


def _between(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    """``low + share (high - low)`` in the dtype of the bounds, from shares that are float32 at least."""
    return torch.lerp(widened(low), widened(high), share.to(widened(low).dtype)).to(low.dtype)
