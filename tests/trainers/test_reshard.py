"""A replay of several ranks dealt out among another number of them: every row, with its priority, in order of time."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime.files import CheckpointError
from torchrl_perf.trainers import DQNConfig
from torchrl_perf.trainers.run.other_ranks import problem_of_other_ranks
from torchrl_perf.trainers.run.reshard import end_streams, resharded_frames, resharded_replay

ENVS = 6
STEPS = 5
"""Time rows that there is room for."""


def numbers(stream, times):
    """What tells each row of a stream."""
    return stream * 1_000.0 + times


def buffers(ranks, written, *, steps=STEPS, sampler="prioritized"):
    """The replay of each rank after so many time rows of all envs."""
    own, found = ENVS // ranks, []
    for rank in range(ranks):
        buffer = make_replay_buffer(steps * own, batch_size=4, device="cpu", sampler=sampler, num_streams=own)
        for time in range(written):
            value = numbers(torch.arange(rank * own, (rank + 1) * own), time).view(own, 1, 1)
            flags = torch.zeros(own, 1, 1, dtype=torch.bool)
            following = {"value": value + 1, "done": flags, "terminated": flags, "truncated": flags}
            buffer.extend(TensorDict({"value": value, "next": following}, [own, 1]))
        if sampler == "prioritized" and written:
            slots = buffer.storage.ring.valid_slots()
            buffer.update_priority(slots, priority(buffer[:]["value"].flatten()))
        found.append(buffer)
    return found


def priority(values):
    """Of a row."""
    return 1.0 + values % 997


def rows(buffer):
    """Numbers ``[T, N]`` of a buffer in order of time, and their weights."""
    ring = buffer.storage.ring
    cursor, length = ring.read()
    times = torch.arange(cursor - length, cursor) % ring.steps
    slots = (times.unsqueeze(-1) * ring.num_streams + torch.arange(ring.num_streams)).flatten()
    read = buffer.storage.get(slots)
    return read["value"].view(length, -1), read["next", "truncated"].view(length, -1), slots


@pytest.mark.parametrize("written", [3, 5, 13])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 2), (2, 1), (6, 1), (2, 6)])
def test_each_row_is_kept_with_its_priority(before, after, written):
    states = [buffer.state_dict() for buffer in buffers(before, written)]
    fresh = buffers(after, 0)
    expected = numbers(torch.arange(ENVS), torch.arange(max(0, written - STEPS), written).unsqueeze(-1))
    for rank, buffer in enumerate(fresh):
        own = ENVS // after
        buffer.load_state_dict(resharded_replay(states, rank, own, buffer.storage.max_size))
        end_streams(buffer)
        value, truncated, slots = rows(buffer)
        mine = expected[:, rank * own : (rank + 1) * own]
        assert torch.equal(value, mine)
        assert truncated[-1].all()
        assert not truncated[:-1].any()
        buffer.sample()  # which makes the tree
        weights = buffer.state_dict()["_sampler"]["tree"]["weights"][slots]
        torch.testing.assert_close(weights, priority(mine).flatten().pow(0.6))
        # and the ring goes on
        more = buffer.storage.get(slots[-own:]).unsqueeze(1)
        buffer.extend(more.exclude("index"))
        assert len(buffer) == min(written + 1, STEPS) * own


def test_the_newest_rows_are_kept_where_there_is_less_room():
    states = [buffer.state_dict() for buffer in buffers(2, 9)]
    fresh = buffers(3, 0, steps=3)
    for rank, buffer in enumerate(fresh):
        buffer.load_state_dict(resharded_replay(states, rank, 2, buffer.storage.max_size))
        value = rows(buffer)[0]
        assert torch.equal(value, numbers(torch.arange(2 * rank, 2 * rank + 2), torch.arange(6, 9).unsqueeze(-1)))


@pytest.mark.parametrize("sampler", ["random", "prioritized"])
def test_a_replay_that_nothing_was_written_to(sampler):
    states = [buffer.state_dict() for buffer in buffers(2, 0, sampler=sampler)]
    (buffer,) = buffers(1, 0, sampler=sampler)
    buffer.load_state_dict(resharded_replay(states, 0, ENVS, buffer.storage.max_size))
    end_streams(buffer)
    assert not len(buffer)


def test_ranks_that_are_not_equally_far_are_refused():
    states = [one[0].state_dict() for one in (buffers(2, 3), buffers(2, 4))]
    with pytest.raises(CheckpointError, match="expected replays of ranks that are equally far"):
        resharded_replay(states, 0, ENVS, STEPS * ENVS)


def test_frames_of_a_rank_are_those_of_its_part():
    own = {
        "frames": torch.tensor(0),
        "decay_frames": torch.tensor(300.0),
        "noise": torch.zeros(4, 2),
        "w": torch.ones(4),
    }
    saved = {
        "frames": torch.tensor(600),
        "decay_frames": torch.tensor(450.0),
        "noise": torch.ones(6, 2),
        "w": torch.zeros(4),
    }
    found = resharded_frames(saved, own, 2, 3)
    assert found["frames"].item() == 400
    assert found["frames"].dtype == saved["frames"].dtype
    assert found["decay_frames"] is own["decay_frames"]
    assert found["noise"] is own["noise"], "noise of envs begins anew"
    assert found["w"] is saved["w"]


def test_a_compact_replay_is_refused_by_name(tmp_path):
    config = DQNConfig.without_task(compact=True)
    assert "since its replay is compact, received 3" in problem_of_other_ranks(config, tmp_path, 2, 3)
    assert problem_of_other_ranks(config, tmp_path, 2, 2) == ""
