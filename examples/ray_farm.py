"""A farm of CPU envs on Ray that feeds this package's replay buffer: TorchRL's RayCollector, and our buffer and Adam.

    python examples/ray_farm.py

Needs the extra ``ray``. Two collectors step Gymnasium's CartPole in processes of their own, on this machine or, with
``--address auto``, on a Ray cluster; weights go to each after its batch. Expected last line, with a return above 100:

    mean return of the last 20 episodes: 200.9
"""

import argparse
from collections import deque
from importlib.util import find_spec

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import EnvBase, GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.trainers import GuardedAdam


def make_env() -> EnvBase:
    """An env of a collector."""
    return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), RewardSum())


def main(total_frames: int = 12_800, collectors: int = 2, address: str | None = None) -> float:
    """Trains; returns the mean return of the last 20 finished episodes."""
    if find_spec("ray") is None:
        raise ImportError(
            "expected the package ray, received an environment without it. Remedy: pip install 'torchrl_perf[ray]'."
        )
    torch.manual_seed(0)
    spec = make_env().action_spec
    value = QValueActor(MLP(4, 2, num_cells=[64, 64]), in_keys=["observation"], spec=spec)
    explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=total_frames // 3)
    policy = TensorDictSequential(value, explore)
    place = {"address": address} if address else {"include_dashboard": False}
    farm = RayCollector(
        [make_env] * collectors,
        policy,
        frames_per_batch=128,
        total_frames=total_frames,
        ray_init_config={**place, "log_to_driver": False},
        remote_configs={"num_cpus": 1, "num_gpus": 0},
        collector_kwargs={"auto_register_policy_transforms": False},
        update_after_each_batch=True,
    )
    loss = DQNLoss(value, delay_value=True)
    loss.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss, tau=0.02)
    optimizer = GuardedAdam(loss.parameters(), lr=1e-3, max_grad_norm=10.0)
    buffer = make_replay_buffer(total_frames, batch_size=64, device="cpu", sampler="prioritized")  # or "cuda"
    returns: deque[float] = deque(maxlen=20)
    for batch in farm:
        buffer.extend(batch.reshape(-1))
        explore.step(batch.numel())
        for _ in range(24):
            sample = buffer.sample()
            optimizer.zero_grad()
            loss(sample)["loss"].backward()
            optimizer.step()
            target.step()
            buffer.update_tensordict_priority(sample)
        returns.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
    farm.shutdown()
    mean_return = sum(returns) / len(returns)
    print(f"mean return of the last 20 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--total-frames", type=int, default=12_800)
    options.add_argument("--collectors", type=int, default=2)
    options.add_argument("--address")
    main(**vars(options.parse_args()))
