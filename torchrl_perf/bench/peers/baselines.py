"""PPO on CartPole as a TorchRL user writes it: the baseline of the benchmarks."""

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Composite, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_perf.envs import CartPole
from torchrl_perf.trainers.ppo import PPOConfig


def plain_network(inputs: int, outputs: int, device: torch.device) -> nn.Module:
    """Tanh 64-64."""
    return nn.Sequential(
        nn.Linear(inputs, 64, device=device),
        nn.Tanh(),
        nn.Linear(64, 64, device=device),
        nn.Tanh(),
        nn.Linear(64, outputs, device=device),
    )


def plain_actor(env: EnvBase) -> ProbabilisticActor:
    """Categorical policy of TorchRL's own parts."""
    net = TensorDictModule(plain_network(4, 2, env.device), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        net,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        spec=env.full_action_spec,
    )


class PlainCartPole(EnvBase):
    """CartPole in tensors as TorchRL's documentation has users write an env: ``_step``, and ``_reset`` with a mask.

    The same equations as the package's, without its auto-reset; TorchRL resets the done rows.
    """

    def __init__(self, num_envs: int, device: torch.device | str) -> None:
        super().__init__(device=device, batch_size=[num_envs])
        self._task = CartPole(num_envs, device=device)
        self.observation_spec = Composite(
            observation=self._task.observation_spec["observation"].clone(), shape=[num_envs]
        )
        self.action_spec = self._task.action_spec.clone()
        self.reward_spec = self._task.reward_spec.clone()
        self.full_done_spec = self._task.full_done_spec.clone()
        self._state = self._draw()
        self._elapsed = torch.zeros(num_envs, 1, dtype=torch.int32, device=device)

    def _draw(self) -> torch.Tensor:
        return torch.rand(*self.batch_size, 4, device=self.device) * 0.1 - 0.05

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._state, reward, terminated = self._task.dynamics(self._state, tensordict["action"])
        self._elapsed = self._elapsed + 1
        terminated, truncated = terminated.unsqueeze(-1), self._elapsed >= 500
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        out = {"observation": self._state, "reward": reward.unsqueeze(-1), **flags}
        return TensorDict(out, self.batch_size, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            mask = torch.ones_like(self._elapsed, dtype=torch.bool)
        self._state = torch.where(mask, self._draw(), self._state)
        self._elapsed = torch.where(mask, 0, self._elapsed)
        flags = {name: torch.zeros_like(mask) for name in ("done", "terminated", "truncated")}
        return TensorDict({"observation": self._state, **flags}, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            torch.manual_seed(seed)


class TorchRLPPO:
    """``Collector``, ``GAE``, ``ClipPPOLoss``, ``ReplayBuffer`` and Adam with their defaults.

    Args:
        env: a batched CartPole.
        config: sizes and coefficients.
        cudagraph_policy: let the collector capture the policy.
    """

    def __init__(self, env: EnvBase, config: PPOConfig, *, cudagraph_policy: bool = False):
        self.config = config
        self.actor = plain_actor(env)
        self.critic = ValueOperator(plain_network(4, 1, env.device), in_keys=["observation"])
        self.collector = Collector(
            env,
            self.actor,
            frames_per_batch=config.batch_size,
            total_frames=-1,
            device=env.device,
            cudagraph_policy=cudagraph_policy,
            auto_register_policy_transforms=False,  # the default of today, without the notice of tomorrow's
        )
        self.gae = GAE(gamma=config.gamma, lmbda=config.lmbda, value_network=self.critic)
        self.loss = ClipPPOLoss(
            self.actor,
            self.critic,
            clip_epsilon=config.clip_epsilon,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            normalize_advantage=config.normalize_advantage,
            loss_critic_type="l2",
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=config.learning_rate, eps=1e-5)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(config.batch_size, device=env.device),
            sampler=SamplerWithoutReplacement(),
            batch_size=config.batch_size // config.minibatches,
        )
        self._batches = iter(self.collector)

    def collect(self) -> TensorDictBase:
        """One batch ``[N, T]``."""
        return next(self._batches)

    def advantage(self, batch: TensorDictBase) -> TensorDictBase:
        """GAE."""
        with torch.no_grad():
            return self.gae(batch)

    def update(self, batch: TensorDictBase) -> None:
        """Epochs of shuffled minibatches."""
        self.buffer.extend(batch.reshape(-1))
        for _ in range(self.config.epochs):
            for minibatch in self.buffer:
                losses = self.loss(minibatch)
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), self.config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def step(self) -> None:
        """One iteration."""
        self.update(self.advantage(self.collect()))

    def close(self) -> None:
        """Ends the collector."""
        self.collector.shutdown()
