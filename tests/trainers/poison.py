"""Tasks whose numbers go bad at a chosen call, in a chosen env."""

import torch
from torch import Tensor

from torchrl_perf.envs import DeviceEnv

VALUES = {"NaN": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def poisoned(base: type[DeviceEnv], what: str, *, call: int, env: int, kind: str = "NaN") -> type[DeviceEnv]:
    """A task whose state, observation or reward is not finite in one env, once.

    Args:
        base: the task.
        what: "state" (stays bad), "observation" (of one step, the state being good) or "reward".
        call: the step, counted from 1 over the whole run.
        env: number of the env.
        kind: "NaN", "inf" or "-inf".
    """

    class Poisoned(base):
        def __init__(self, num_envs: int, **options: object) -> None:
            super().__init__(num_envs, **options)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=self.device))
            self.register_buffer("numbers", torch.arange(num_envs, device=self.device))

        def hit(self) -> Tensor:
            return self.calls.eq(call) & self.numbers.eq(env)

        def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            following, reward, terminated = super().dynamics(state, action)
            self.calls += 1
            if what == "reward":
                reward = torch.where(self.hit(), VALUES[kind], reward)
            if what == "state":
                following = torch.where(self.hit().unsqueeze(-1), VALUES[kind], following)
            return following, reward, terminated

        def _advance(self, tensordict):
            entries, state, done = super()._advance(tensordict)
            if what == "observation":
                bad = self.hit().unsqueeze(-1)
                entries["observation"] = torch.where(bad, VALUES[kind], entries["observation"])
            return entries, state, done

    return Poisoned
