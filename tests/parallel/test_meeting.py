"""Processes of one life of a run meet, whatever those of an earlier life have left in the same store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchrl_perf.parallel import meeting


@pytest.fixture
def store(monkeypatch):
    """One that outlives the lives."""
    monkeypatch.setattr(meeting, "_MET", [])
    return dist.HashStore()


def life(store, size, late=0):
    """The stores that the ranks of a life get; the first rank comes last, or first."""
    found = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: meeting.meet(store, rank, size, 20.0)}))
        for rank in sorted(range(size), key=lambda rank: (rank == 0) == bool(late))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(size))
    return [found[rank] for rank in range(size)]


def test_each_life_has_a_part_of_its_own(store):
    seen = set()
    for number in range(4):
        parts = life(store, 3, late=number % 2)
        assert not any(part.check(["address"]) for part in parts), "nothing of an earlier life"
        parts[number % 3].set("address", f"of life {number}")
        assert {part.get("address").decode() for part in parts} == {f"of life {number}"}
        seen.add(meeting.met())
    assert len(seen) == 4


def test_one_that_was_lost_while_it_asked_stops_nobody(store):
    shared = dist.PrefixStore("torchrl_perf/meeting", store)
    shared.add("asked", 1)  # and killed before it left its word
    shared.set(f"asks/{shared.add('asked', 1)}", "a word of a process that is gone")
    parts = life(store, 2)
    parts[1].set("address", "here")
    assert parts[0].get("address") == b"here"


def test_too_few_are_told(store):
    with pytest.raises(TimeoutError, match=r"expected 2 processes within 0\.1 s, received 1"):
        meeting.meet(store, 0, 2, 0.1)
    with pytest.raises(dist.DistStoreError):
        meeting.meet(store, 1, 2, 0.1)


def test_without_an_agent_the_first_rank_holds_the_store(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert meeting.agent_store(1.0) is None
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    for name, value in (("USE_AGENT_STORE", "True"),):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    server.set("key", "of the agent")
    assert meeting.agent_store(5.0).get("key") == b"of the agent"
