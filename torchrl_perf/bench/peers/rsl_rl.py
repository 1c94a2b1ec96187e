"""rsl_rl's PPO, the usual trainer of Isaac Lab and mjlab, on an env of this package."""

import contextlib
import io
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_perf.runtime import Stopwatch, synchronize

__all__ = ["RslRlEnv", "measure"]

STEPS = 24
NETWORK: dict[str, Any] = {
    "class_name": "MLPModel",
    "hidden_dims": [128, 128],
    "activation": "elu",
    "obs_normalization": True,
}


class RslRlEnv:
    """An env as rsl_rl's ``VecEnv``: it has reset the rows that ended, and says which of them timed out.

    Args:
        env: ``[N]``, with the keys ``observation``, ``action`` and ``reward``.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env, self.device = env, env.device
        self.num_envs, self.num_actions = env.batch_size[0], env.action_spec.shape[-1]
        self.max_episode_length = getattr(env, "max_episode_steps", None) or 1000
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.cfg: dict[str, Any] = {}
        self._root = env.reset()

    def get_observations(self) -> TensorDict:
        """The present observations, group ``policy``."""
        return TensorDict({"policy": self._root["observation"]}, [self.num_envs], device=self.device)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Observations, rewards ``[N]``, done flags ``[N]`` and ``time_outs``."""
        self._root["action"] = actions.clone()
        stepped, self._root = self._env.step_and_maybe_reset(self._root)
        following = stepped["next"]
        extras = {"time_outs": following["truncated"].squeeze(-1)}
        return self.get_observations(), following["reward"].squeeze(-1), following["done"].squeeze(-1), extras


def measure(env: EnvBase, iterations: int, device: torch.device) -> tuple[float, int]:
    """Time PPO with the settings of Isaac Lab's locomotion, after two iterations that are not counted.

    Args:
        env: ``[N]``.
        iterations: how many are timed.
        device: of everything.

    Returns:
        Seconds, and steps of each env in them.
    """
    from rsl_rl.runners import OnPolicyRunner

    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "desired_kl": 0.01,
        "gamma": 0.99,
        "lam": 0.95,
        "entropy_coef": 0.0,
        "max_grad_norm": 1.0,
    }
    config = {
        "num_steps_per_env": STEPS,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": algorithm,
        "actor": {**NETWORK, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": dict(NETWORK),
        "multi_gpu": None,
        "check_for_nan": False,  # it waits for the host
    }
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(RslRlEnv(env), config, log_dir=None, device=str(device))
        runner.learn(2)
        synchronize(device)
        watch = Stopwatch("cpu").start()
        runner.learn(iterations)
        synchronize(device)
        watch.stop()
    return watch.host_seconds, iterations * STEPS
