"""PPO on vessels: with a critic of each alone (IPPO, arXiv:2011.09533), or one that sees all (MAPPO, 2103.01955)."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.mlp import hidden_layers
from torchrl_perf.systems.marine.trainer import MarineTask
from torchrl_perf.trainers.on_policy.trainer import OnPolicyTrainer
from torchrl_perf.trainers.ppo import PPO
from torchrl_perf.trainers.run.numerics import NumericalGuard

__all__ = ["PPO_SETTINGS", "VesselPPOTrainer", "make_vessel_ppo"]

PPO_SETTINGS: dict[str, Any] = {
    **{"num_steps": 64, "minibatches": 16, "epochs": 4, "gamma": 0.99, "learning_rate": 5e-4, "entropy_coeff": 3e-3},
    **{"hidden_sizes": (128, 128), "log_interval": 2},
}
"""Of both, beside the numbers of vessels and of steps."""


class VesselPPO(PPO):
    """PPO whose rows are vessels, with the metrics of :class:`~torchrl_perf.systems.marine.trainer.MarineTask`."""

    metric_names: ClassVar[tuple[str, ...]] = MarineTask.metric_names

    def measure(self, batch: TensorDictBase, metrics: DeviceMetrics, guard: NumericalGuard) -> None:
        """Outcomes of the vessels."""
        super().measure(batch, metrics, guard)
        seen = SimpleNamespace(metrics=metrics, valid_key=self.valid_key, env=self.env)
        MarineTask().measure(seen, batch)


class VesselPPOTrainer(OnPolicyTrainer):
    """The loop of :class:`~torchrl_perf.trainers.PPOTrainer` on :class:`VesselPPO`; the arguments are the same."""

    algorithm_class: ClassVar[type[PPO]] = VesselPPO  # pyright: ignore[reportIncompatibleVariableOverride]


def make_vessel_ppo(config: Any, *, world: Mapping[str, Any], shared: bool) -> VesselPPOTrainer:
    """A trainer of one policy for all vessels of the worlds that another agent's settings describe.

    Args:
        config: of :class:`~torchrl_perf.trainers.PPOConfig`; ``num_envs`` counts vessels.
        world: settings of the world, as of ``MarineSACConfig``; ``max_robots`` among them.
        shared: whether the critic sees all vessels of a world, or the one alone whose return it tells.

    Raises:
        ValueError: for a number of vessels that is none of whole worlds.
    """
    from torchrl_perf.systems.marine.config import MarineSACConfig
    from torchrl_perf.systems.marine.trainer import make_marine_env
    from torchrl_perf.trainers.sources import device_of

    worlds, rest = divmod(config.num_envs, world["max_robots"])
    if rest:
        raise ValueError(
            f"num_envs: expected a multiple of max_robots = {world['max_robots']}, received {config.num_envs}. Remedy: "
            f"num_envs={(worlds + 1) * world['max_robots']}."
        )
    device = device_of(config, None, None)
    torch.manual_seed(config.seed)
    env = make_marine_env(MarineSACConfig(num_envs=worlds, **world), device)
    env = AgentStreams(env.base_env, joint=True) if shared else env
    return VesselPPOTrainer(config, env=env, critic=_joint_critic(env, config) if shared else None)


def _joint_critic(env: EnvBase, config: Any) -> ValueOperator:
    """One value of each row, from the observations of all vessels of its world."""
    size, device = env.observation_spec["joint"].shape[-1], env.device
    layers: list[nn.Module] = hidden_layers([size, *config.critic_widths], config.activation, device=device)
    layers.append(nn.Linear(config.critic_widths[-1], 1, device=device))
    return ValueOperator(MixedSequential(*layers, precision=config.precision), in_keys=["joint"])
