"""PPO on CartPole as a TorchRL user writes it: the baseline of the benchmarks."""

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_perf.trainers.config import PPOConfig


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


class TorchRLPPO:
    """``Collector``, ``GAE``, ``ClipPPOLoss``, ``ReplayBuffer`` and Adam with their defaults, on our CartPole.

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
