"""A tiny multi-agent env: agents on a line that end one by one, by reaching the far side or by falling off the near."""

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

FAR, NEAR, LIMIT = 4.0, -2.0, 12


class Walkers(EnvBase):
    """``E`` lines of ``R`` agents; each step an agent moves by its action, -1 or 1; a line ends with its agents.

    Masked resets by ``torch.where``; no random numbers: agent r begins at ``r % 3 - 1``.
    """

    def __init__(self, num_envs=3, num_agents=2, *, discrete=True, own_flags=True, device="cpu"):
        super().__init__(batch_size=(num_envs,), device=device)
        self.discrete, self.own_flags, rows = discrete, own_flags, (num_envs, num_agents)

        def flag(*shape):
            return Binary(shape=(*shape, 1), dtype=torch.bool, device=device)

        agents = {"observation": Unbounded((*rows, 2), device=device), "event": flag(*rows)}
        if own_flags:
            agents["active"] = flag(*rows)
        self.observation_spec = Composite(
            agents=Composite(agents, shape=rows, device=device), is_init=flag(num_envs), shape=(num_envs,)
        )
        low = torch.full((*rows, 1), -1.0, device=device)
        action = Categorical(2, shape=rows, device=device) if discrete else Bounded(low, -low)
        self.action_spec = Composite(agents=Composite(action=action, shape=rows), shape=(num_envs,), device=device)
        reward = Unbounded((*rows, 1), device=device)
        self.reward_spec = Composite(agents=Composite(reward=reward, shape=rows), shape=(num_envs,), device=device)
        names = ("done", "terminated", "truncated")
        done = {name: flag(num_envs) for name in names}
        if own_flags:
            done["agents"] = Composite({name: flag(*rows) for name in names}, shape=rows, device=device)
        self.full_done_spec = Composite(done, shape=(num_envs,), device=device)
        self.register_buffer("place", torch.zeros(*rows, device=device))
        self.register_buffer("active", torch.ones(rows, dtype=torch.bool, device=device))
        self.register_buffer("elapsed", torch.zeros(num_envs, 1, dtype=torch.int64, device=device))

    def _entries(self, event, flags, is_init):
        time = (self.elapsed / LIMIT).expand(self.place.shape)
        agents = {"observation": torch.stack([self.place / FAR, time], -1), "event": event.unsqueeze(-1)}
        if self.own_flags:
            agents |= {"active": self.active.unsqueeze(-1).clone()}
            agents |= {name: flag.unsqueeze(-1) for name, flag in flags["agents"].items()}
        entries = {"is_init": is_init, **{name: flags[name] for name in ("done", "terminated", "truncated")}}
        return {"agents": TensorDict(agents, self.place.shape), **entries}

    def _step(self, tensordict):
        action = tensordict["agents", "action"]
        move = action * 2.0 - 1.0 if self.discrete else action.squeeze(-1)
        before = self.active.clone()
        self.place += torch.where(before, move, 0.0)
        self.elapsed += 1
        event = before & ((self.place >= FAR) | (self.place <= NEAR))
        self.active &= ~event
        limit = self.elapsed >= LIMIT
        none = ~self.active.any(-1, keepdim=True)
        agents = {"done": ~self.active | limit, "terminated": ~self.active, "truncated": self.active & limit}
        flags = {"agents": agents, "done": none | limit, "terminated": none, "truncated": limit & ~none}
        reward = torch.where(before, torch.where(self.place >= FAR, 1.0, -0.1), 0.0).unsqueeze(-1)
        entries = self._entries(event, flags, torch.zeros_like(limit))
        entries["agents"]["reward"] = reward
        return TensorDict(entries, self.batch_size)

    def _reset(self, tensordict=None, **kwargs):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones_like(self.elapsed, dtype=torch.bool) if mask is None else mask.view(-1, 1)
        start = (torch.arange(self.place.shape[1], device=self.device) % 3 - 1.0).expand(self.place.shape)
        self.place.copy_(torch.where(mask, start, self.place))
        self.active.copy_(torch.where(mask, True, self.active))
        self.elapsed.copy_(torch.where(mask, 0, self.elapsed))
        zero = torch.zeros_like(self.active)
        flags = {name: torch.zeros_like(mask) for name in ("done", "terminated", "truncated")}
        flags["agents"] = {"done": ~self.active, "terminated": ~self.active, "truncated": zero.clone()}
        return TensorDict(self._entries(zero.clone(), flags, mask.clone()), self.batch_size)

    def _set_seed(self, seed):
        pass
