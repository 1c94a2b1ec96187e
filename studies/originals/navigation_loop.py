"""The training loop of marine before its rewrite: NumPy envs, the wrapper that asks for each row, a list replay."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from studies.originals.experience import ListReplay, insert_by_robot
from studies.originals.navigation import NavigationLoop, random_world
from studies.originals.policy_wrapper import SampleWrapper

ROBOTS, OBSTACLES, DISTANCE = 5, 4, 40.0
LEVELS = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])


def fresh_env() -> NavigationLoop:
    """An env of the last stage of the curriculum."""
    robots, obstacles = random_world(ROBOTS, OBSTACLES, DISTANCE)
    return NavigationLoop(robots, obstacles, np.zeros((0, 4)))


class LoopTraining:
    """Envs one after the other, robots one after the other.

    Args:
        wrapper: the policy, of discrete actions.
        num_envs: number of envs.
        capacity: of the replay.
        device: of policy and experience.
    """

    def __init__(self, wrapper: SampleWrapper, num_envs: int, capacity: int, device: torch.device) -> None:
        self.wrapper, self.device = wrapper, device
        self.envs = [fresh_env() for _ in range(num_envs)]
        self.replay = ListReplay(capacity)
        self.observations = np.array([env.observe() for env in self.envs])
        self.rewards: list[float] = []

    def step(self) -> None:
        """One step of all envs; the rows of robots that were active go to the replay."""
        active = np.array([[robot.active for robot in env.robots] for env in self.envs])
        observations = torch.from_numpy(self.observations).to(self.device)
        choices = self.wrapper(observations.flatten(0, 1)).view(len(self.envs), ROBOTS)
        pairs = choices.cpu().numpy()
        actions = LEVELS[np.stack([pairs // 5, pairs % 5], -1)]
        results = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        following, reward, done, events = (list(column) for column in zip(*results, strict=True))
        after = np.array(following)
        step = {
            "observation": observations,
            "action": choices,
            "reward": torch.tensor(reward, dtype=torch.float32, device=self.device),
            "next_observation": torch.from_numpy(after).to(self.device),
            "done": torch.tensor(done, device=self.device),
            "active": torch.tensor(active, device=self.device),
            "goal": torch.tensor([[event == "goal" for event in row] for row in events], device=self.device),
            "collision": torch.tensor([[event == "collision" for event in row] for row in events], device=self.device),
        }
        insert_by_robot(step, self.replay)
        self.rewards += np.array(reward)[active].tolist()
        for index, ended in enumerate(done):
            if all(ended):
                self.envs[index] = fresh_env()
                after[index] = self.envs[index].observe()
        self.observations = after

    def iteration(self, steps: int, batch_size: int, update: Callable[[dict[str, Tensor]], object]) -> None:
        """Some steps of all envs, then one update."""
        for _ in range(steps):
            self.step()
        update(self.replay.sample(batch_size, self.device))
