"""Who is lost: a process that is gone, silent, behind the others, on this host or another, or while it is made."""

import json
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from rank_processes import run, said

from torchrl_perf.parallel import RankLostError, RankStoppedError, watch
from torchrl_perf.trainers import load_policy
from torchrl_perf.trainers.run.rank_folder import RESCUED

OTHER = 1
KILLED = -9


class Two:
    """What a watch asks of two ranks, of which this process is the first."""

    rank, size, begun = 0, 2, 7

    def __init__(self, other, seconds=60.0):
        self.other, self.seconds = other, seconds

    def of_first(self, make):
        return make()

    def values(self, value):
        return [value, self.other]


@pytest.fixture
def quick(monkeypatch):
    """Beats that are short, and few of them."""
    for name, value in (
        ("BEAT_SECONDS", 0.02),
        ("SILENT_BEATS", 25),
        ("HURRIED_BEATS", 15),
        ("EXPLAIN_SECONDS", 3.0),
    ):
        monkeypatch.setattr(watch, name, value)
    monkeypatch.setattr(watch.uuid, "uuid4", lambda: type("Key", (), {"hex": "run"}))


@pytest.fixture
def other():
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def place(process, **changes):
    """Where the process of the other rank is."""
    own = watch.own_place()
    return own._replace(pid=process.pid, started=watch.began(process.pid))._replace(**changes)


def lost(of, beat=None):
    """The watch of the first rank and what it says after a collective has failed; ``beat`` is what the other does."""
    store = dist.HashStore()
    told = dist.PrefixStore("run", store)
    told.set(f"{OTHER}", "1 lives 3 7")
    end = threading.Event()

    def beats():
        count = 0
        while not end.wait(0.02):
            count += 1
            told.set(f"{OTHER}", f"{count} {beat}")

    thread = threading.Thread(target=beats) if beat else None
    watching = watch.RankWatch(of, lambda: 4, store)
    if thread is not None:
        thread.start()
    try:
        watching.explain(RuntimeError("gloo: connection closed"), 400)
    except (RankLostError, RankStoppedError) as error:
        return error
    finally:
        end.set()
        watching.close()
        if thread is not None:
            thread.join()
    return None


def test_a_silent_process_of_this_host_is_named_and_killed(quick, other):
    error = lost(Two(place(other)))
    assert f"rank 1 of 2 was lost in iteration 5 (env step 400): its process {other.pid} on host" in str(error)
    assert "has given no sign of life for 0.3 s" in str(error)
    assert other.wait(5) == KILLED


def test_a_silent_process_of_another_host_is_named(quick, other):
    error = lost(Two(place(other, host="far", kernel="another")))
    assert f"process {other.pid} on host far has ended or cannot be reached" in str(error)
    assert other.poll() is None


def test_one_that_keeps_the_others_waiting_is_named_and_killed(quick, other):
    error = lost(Two(place(other), seconds=0.3), beat="lives 3 7")
    assert "has come no further for 0.3 s, while the others wait" in str(error)
    assert other.wait(5) == KILLED


def test_ranks_that_come_no_further_together_are_told_without_a_name(quick, other):
    error = lost(Two(place(other), seconds=0.3), beat="lives 4 7")
    assert isinstance(error, RankLostError)
    assert "to end within 0.3 s, received none on any of the 2 ranks in iteration 5 (env step 400)" in str(error)
    assert re.search(r"rank 0 waits in .*\.py:\d+\. All stop\. Remedy: a larger --rank-timeout", str(error))
    assert other.poll() is None, "nobody knows that it is the one"


def test_ranks_that_move_or_have_left_are_not_lost(quick, other):
    of = Two(place(other), seconds=0.3)
    assert lost(of, beat="left 4 7") is None, "the other has left, and this one writes its last files"
    moving = iter(range(1_000))
    store = dist.HashStore()
    dist.PrefixStore("run", store).set(f"{OTHER}", "1 lives 3 7")
    watching = watch.RankWatch(Two(place(other), seconds=0.1), lambda: next(moving), store)
    watching._end.wait(0.25)  # less than silence of 0.5 s, more than the time of all together
    assert watching._lost is None
    watching.close()


def test_without_the_store_the_one_that_is_gone_or_silent_is_named(quick, other):
    class Three(Two):
        size = 3

        def values(self, value):
            return [value, place(other), watch.own_place()._replace(kernel="far")]

    store = dist.HashStore()
    for rank in (1, 2):
        dist.PrefixStore("run", store).set(f"{rank}", "1 lives 3 7")
    watching = watch.RankWatch(Three(None), lambda: 4, store)
    watching.close()
    watching._silent = {0: 0, 1: 1, 2: 5}
    assert watching._of_store() == (2, "ended"), "the first rank's own host cannot be the one"
    other.kill()
    other.wait()
    assert watching._of_store() == (1, "ended")
    watching._places[1] = watching._places[1]._replace(kernel="farther")
    watching._ranks.rank = 2
    watching._places[0] = watching._places[0]._replace(kernel="farther")
    assert watching._of_store() == (0, "ended"), "whose host holds the store"


@pytest.mark.parametrize("agent", [False, True], ids=["first rank", "torchrun"])
def test_a_store_that_hangs_holds_nobody_up(quick, other, monkeypatch, agent):
    class Second(Two):
        rank = 1

        def values(self, value):
            return [self.other, value]

    class Hanging:
        def set(self, key, value):
            pass

        def multi_get(self, keys):
            hangs.wait()
            raise RuntimeError("store: connection closed")

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    hangs, store = threading.Event(), dist.HashStore()
    dist.PrefixStore("run", store).set("0", "1 lives 3 7")
    watching = watch.RankWatch(Second(place(other)), lambda: 4, store)
    watching._store = Hanging()
    with pytest.raises(RankLostError) as error:
        watching.explain(RuntimeError("gloo: connection closed"), 400)
    hangs.set()
    watching.close()
    if agent:
        assert "expected the store of torchrun to answer within 0.3 s, received nothing in iteration 5" in str(
            error.value
        )
        assert other.poll() is None, "nobody knows that it is the one"
    else:
        assert f"rank 0 of 2 was lost in iteration 5 (env step 400): its process {other.pid} on host" in str(
            error.value
        )
        assert other.wait(5) == KILLED


def test_a_process_that_is_gone_is_named_at_once(quick, other):
    of = Two(place(other))
    other.kill()
    other.wait()
    begin = time.monotonic()
    assert "has ended or cannot be reached" in str(lost(of, beat="lives 4 7"))
    assert time.monotonic() - begin < 2


def test_another_process_of_the_same_number_is_not_taken_for_it(quick, other):
    assert "has ended" in str(lost(Two(place(other, started="1")), beat="lives 4 7"))
    assert other.poll() is None


def test_a_rank_that_has_failed_itself_is_left_to_say_so(quick, other):
    assert isinstance(lost(Two(place(other)), beat="failed 4 7"), RankStoppedError)


@pytest.mark.slow
def test_ranks_that_hang_or_are_lost_early_are_named_by_one(tmp_path):
    checks = "stopped_run", "hanging_run", "lost_while_made", "stopped_while_made", "nan_run", "stuck_run"
    found = run(tmp_path, 2, *checks, timeout=600)
    ends = {check: [1, KILLED] for check in checks} | {"nan_run": [1, 1], "stuck_run": [KILLED, KILLED]}
    assert found == ends | {"stopped_while_made": [1, 143]}
    words = {
        "stopped_run": "was lost in iteration 7 (env step 576): .* has given no sign of life for 5 s",
        "hanging_run": "was lost in iteration 7 (env step 576): .* has come no further for 6 s, while the others wait",
        "lost_while_made": "was lost in iteration 1: .* has ended or cannot be reached",
        "stopped_while_made": "torchrl-perf: stopped by signal 15 before the first iteration; nothing was saved",
        "stuck_run": "to end within 6 s, received none on any of the 2 ranks in iteration 7: rank . waits in "
        ".*rank_checks.py:",
        "nan_run": "On rank 1 (host .*, process .*): Expected finite numbers, .* of iteration 7 (env step 672)",
    }
    for check in checks:
        told = "".join(said(tmp_path, check, rank) for rank in range(2))
        assert told.count("torchrl-perf: ") == 1, told
        assert re.search(words[check].replace("(", r"\(").replace(")", r"\)"), told), told
        seconds = json.loads((tmp_path / f"{check}.json").read_text())["seconds"]
        assert max(seconds) - min(seconds) < watch.EXPLAIN_SECONDS + 20
    for folder in ("runs/ppo-CartPole-3", "runs/ppo-CartPole-4"):
        assert load_policy(tmp_path / folder / "checkpoints" / RESCUED) is not None


@pytest.mark.slow
def test_twenty_kills_at_any_time_are_twenty_ends_and_one_run(tmp_path):
    """Of two ranks that go on from the newest checkpoint of both, one is killed, twenty times; then the run ends."""
    lives = [f"killed_after_{number}" for number in range(20)]
    found = run(tmp_path, 2, *lives, "not_killed", timeout=1200)
    for number, life in enumerate(lives):
        told = "".join(said(tmp_path, life, rank) for rank in range(2))
        assert found[life] == ([1, KILLED] if number % 2 else [KILLED, 1]), (life, told)
        assert told.count("torchrl-perf: ") == 1, told
        assert f"rank {number % 2} of 2 was lost" in told
    assert found["not_killed"] == [0, 0], said(tmp_path, "not_killed", 0)
    # on a busy machine the first lives may end before a checkpoint, and each begins a run of its own
    saved = re.search(r"saved in (\S+)", said(tmp_path, "not_killed", 0))
    folder = tmp_path / saved[1] / "checkpoints"
    ends = [torch.load(path / "000000600.pt", weights_only=True) for path in (folder, folder / "rank1")]
    one, other = (end["parts"]["actor"] for end in ends)
    assert all(torch.equal(one[name], other[name]) for name in one)
