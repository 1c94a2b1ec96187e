"""A ring of rows as a list of Python objects: what the storage must hold after any sequence of extends."""

import torch
from tensordict import TensorDict


class Stream:
    """Makes ``[N, T]`` batches of identifiable rows: observation = (env, step, episode), final ones negative."""

    def __init__(self, num_envs: int, generator: torch.Generator, p_done: float = 0.2, p_gap: float = 0.3):
        self.num_envs, self.generator, self.p_done, self.p_gap = num_envs, generator, p_done, p_gap
        self.root = [self._new(env) for env in range(num_envs)]
        self.count = 0

    def _new(self, env: int) -> list[float]:
        return [float(env), 0.0, float(self._number(1000))]

    def _number(self, high: int) -> int:
        return int(torch.randint(0, high, (), generator=self.generator))

    def _chance(self, p: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < p

    def rows(self, env: int, T: int) -> list[dict]:
        rows = []
        for _ in range(T):
            root, done = self.root[env], self._chance(self.p_done)
            following = [-1.0 - env, float(self._number(1000)), root[2]] if done else [root[0], root[1] + 1, root[2]]
            self.count += 1
            rows.append(
                {
                    "observation": root,
                    "action": self.count,
                    "next_observation": following,
                    "reward": float(self._number(7)) - 3,
                    "done": done,
                    "terminated": done and self._chance(0.5),
                }
            )
            self.root[env] = self._new(env) if done else following
        if self._chance(self.p_gap):  # the next batch does not go on where this one ends
            self.root[env] = self._new(env)
        return rows

    def batch(self, T: int) -> tuple[list[list[dict]], TensorDict]:
        rows = [self.rows(env, T) for env in range(self.num_envs)]

        def stack(name, dtype):
            return torch.tensor([[row[name] for row in stream] for stream in rows], dtype=dtype)

        done = stack("done", torch.bool).unsqueeze(-1)
        terminated = stack("terminated", torch.bool).unsqueeze(-1)
        td = TensorDict(
            {
                "observation": stack("observation", torch.float32),
                "action": stack("action", torch.int64),
                "done": torch.zeros_like(done),
                "next": {
                    "observation": stack("next_observation", torch.float32),
                    "reward": stack("reward", torch.float32).unsqueeze(-1),
                    "done": done,
                    "terminated": terminated,
                    "truncated": done & ~terminated,
                },
            },
            [self.num_envs, T],
            names=[None, "time"],
        )
        return rows, td


class ListRing:
    """Rows by time and stream; with ``final_rows``, also which of them have lost their final observation."""

    def __init__(self, steps: int, num_streams: int, final_rows: int | None = None):
        self.steps, self.num_streams, self.final_rows = steps, num_streams, final_rows
        self.streams: list[list[dict]] = [[] for _ in range(num_streams)]
        self.breaks: list[int] = []  # absolute times of rows whose next observation is no row's root, oldest first
        self.first = 0  # rows before this time are forgotten

    @property
    def cursor(self) -> int:
        return len(self.streams[0])

    @property
    def length(self) -> int:
        return self.cursor - self.first

    def extend(self, rows: list[list[dict]]) -> None:
        start, T = self.cursor, len(rows[0])
        # A batch longer than the ring leaves its newest rows; breaks of rows that never were stored are not kept.
        kept = max(start, start + T - self.steps)
        for time in range(max(kept - 1, 0), start + T - 1) if T else ():
            for stream in range(self.num_streams):
                if time < kept and (self.steps <= T or time < self.first or start == 0):
                    continue
                before = self._at(rows, stream, time, start)
                if before["next_observation"] != self._at(rows, stream, time + 1, start)["observation"]:
                    self.breaks.append(time)
        for stream, new in enumerate(rows):
            self.streams[stream].extend(new)
        self.first = max(self.first, self.cursor - self.steps)
        if self.final_rows is not None and len(self.breaks) > self.final_rows:
            self.first = max(self.first, self.breaks[-self.final_rows - 1] + 1)

    def _at(self, rows, stream, time, start):
        return self.streams[stream][time] if time < start else rows[stream][time - start]

    def slot(self, time: int, stream: int) -> int:
        return time % self.steps * self.num_streams + stream

    def valid(self) -> list[tuple[int, int]]:
        return [(time, stream) for time in range(self.first, self.cursor) for stream in range(self.num_streams)]

    def n_step(self, time: int, stream: int, n: int, gamma: float) -> dict:
        """The row at ``time`` with its window's discounted reward and the next entries of the window's last row."""
        rows = self.streams[stream]
        total, last = 0.0, time
        for k in range(n):
            if time + k >= len(rows):
                break
            last = time + k
            total += gamma**k * rows[last]["reward"]
            if rows[last]["done"]:
                break
        return {
            **rows[last],
            "observation": rows[time]["observation"],
            "action": rows[time]["action"],
            "reward": total,
            "steps": last - time + 1,
        }
