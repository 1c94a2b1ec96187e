"""DQN with prioritised replay in an ordinary TorchRL script: the buffer is this package's, everything else TorchRL's.

    python examples/replay_only.py

Gymnasium's CartPole in TorchRL's Collector, 15,040 frames. Expected last line, with a return above 100:

    mean return of the last 20 episodes: 227.1
"""

from collections import deque

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from torchrl_perf.replay import make_replay_buffer


def main(total_frames: int = 15_040) -> float:
    """Trains; returns the mean return of the last 20 finished episodes."""
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), RewardSum())
    env.set_seed(0)
    value = QValueActor(MLP(4, 2, num_cells=[64, 64]), in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=total_frames // 3)
    policy = TensorDictSequential(value, explore)
    options = {"frames_per_batch": 64, "total_frames": total_frames, "auto_register_policy_transforms": False}
    collector = Collector(env, policy, **options)
    loss = DQNLoss(value, delay_value=True)
    loss.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss, tau=0.02)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    buffer = make_replay_buffer(total_frames, batch_size=64, device="cpu", sampler="prioritized")  # or "cuda"
    returns: deque[float] = deque(maxlen=20)
    for batch in collector:
        buffer.extend(batch)
        explore.step(batch.numel())
        for _ in range(12):
            sample = buffer.sample()
            optimizer.zero_grad()
            loss(sample)["loss"].backward()
            optimizer.step()
            target.step()
            buffer.update_tensordict_priority(sample)
        returns.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
    collector.shutdown()
    mean_return = sum(returns) / len(returns)
    print(f"mean return of the last 20 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main()
