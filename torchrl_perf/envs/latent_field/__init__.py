"""A point on the plane that follows an unknown vector field and is observed through many noisy channels."""

from torchrl_perf.envs.latent_field.action_encoder import ActionEncoder
from torchrl_perf.envs.latent_field.env import LatentField, LatentOptions, goal_reward
from torchrl_perf.envs.latent_field.fields import (
    FIELDS,
    MultiAttractor,
    VectorField,
    double_limit_cycle,
    duffing,
    flow,
    limit_cycle,
    snowman,
    van_der_pol,
)
from torchrl_perf.envs.latent_field.observation import ObservationMap

__all__ = [
    "FIELDS",
    "ActionEncoder",
    "LatentField",
    "LatentOptions",
    "MultiAttractor",
    "ObservationMap",
    "VectorField",
    "double_limit_cycle",
    "duffing",
    "flow",
    "goal_reward",
    "limit_cycle",
    "snowman",
    "van_der_pol",
]
