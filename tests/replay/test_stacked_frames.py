"""Stacks made of frames that are stored once equal the stacks that were collected."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.replay.stacked_frames import StackedFrames
from torchrl_perf.runtime import no_host_sync

N, FRAMES = 3, 4


class Episodes:
    """Frames that count the steps of all envs; episodes of 4, 5 and 7 steps; stacks with 0 before the first."""

    def __init__(self):
        self.number, self.lengths = 1, (4, 5, 7)
        self.stacks = [self._first() for _ in range(N)]
        self.ages = [0] * N

    def _frame(self):
        self.number += 1
        return torch.full((2, 2), float(self.number))

    def _first(self):
        return torch.cat([torch.zeros(FRAMES - 1, 2, 2), self._frame().unsqueeze(0)])

    def steps(self, count):
        rows = []
        for _ in range(count):
            root, following, done = torch.stack(self.stacks), [], []
            for env in range(N):
                self.ages[env] += 1
                following.append(torch.cat([self.stacks[env][1:], self._frame().unsqueeze(0)]))
                done.append(self.ages[env] == self.lengths[env])
                self.stacks[env] = following[-1]
                if done[-1]:
                    self.stacks[env], self.ages[env] = self._first(), 0
            ended = torch.tensor(done).unsqueeze(-1)
            entries = {"reward": torch.ones(N, 1), "done": ended, "terminated": ended}
            rows.append(
                TensorDict({"observation": root, "next": {"observation": torch.stack(following), **entries}}, [N])
            )
        return torch.stack(rows, 1)


def filled(steps, *, compact, n_step, capacity=N * 64):
    buffer = make_replay_buffer(capacity, batch_size=64, device="cpu", compact=compact, n_step=n_step, gamma=0.9)
    stacks, episodes, batches = StackedFrames(buffer, FRAMES), Episodes(), []
    for _ in range(steps):
        batches.append(episodes.steps(2))
        buffer.extend(stacks.newest(batches[-1]))
    return buffer, stacks, torch.cat(batches, 1)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("n_step", [1, 3, 6])
def test_stacks_are_those_that_were_collected(compact, n_step):
    buffer, stacks, history = filled(12, compact=compact, n_step=n_step)
    assert int(buffer.storage.ring.length) == history.shape[1]  # no row is forgotten
    sample = buffer.sample(256)
    with no_host_sync():
        whole = stacks.whole(sample)
    assert whole["observation"].shape == whole["next", "observation"].shape == (256, FRAMES, 2, 2)
    for row in whole:
        newest = row["observation"][-1, 0, 0]
        env, time = (history["observation"][:, :, -1, 0, 0] == newest).nonzero()[0]
        assert torch.equal(row["observation"], history["observation"][env, time])
        last = row["next", "observation"][-1, 0, 0]
        env, time = (history["next", "observation"][:, :, -1, 0, 0] == last).nonzero()[0]
        assert torch.equal(row["next", "observation"], history["next", "observation"][env, time])


def test_frames_that_were_overwritten_are_0():
    buffer, stacks, history = filled(40, compact=False, n_step=1, capacity=N * 16)
    whole = stacks.whole(buffer.sample(512))
    oldest = history["observation"][:, -16:, -1, 0, 0].amin()
    frames = whole["observation"][:, :, 0, 0]
    assert ((frames == 0) | (frames >= oldest)).all()
    assert (frames[:, -1] > 0).all()


def test_the_batch_stays_and_less_is_stored():
    _, stacks, history = filled(1, compact=False, n_step=1)
    kept = stacks.newest(history)
    assert kept["observation"].shape == (N, 2, 1, 2, 2)
    assert history["observation"].shape == (N, 2, FRAMES, 2, 2)


def test_one_frame_is_no_stack():
    with pytest.raises(ValueError, match=r"frames: expected at least 2, received 1"):
        StackedFrames(make_replay_buffer(8, batch_size=2, device="cpu"), 1)
