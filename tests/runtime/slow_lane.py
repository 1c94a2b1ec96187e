"""A device in software whose copies come late: streams are queues, and any order that they allow may happen.

A copy is made in two halves, so that what is written or read in between is torn; the random order in which the queues
advance finds such an order soon. ``SlowLane`` takes the place of the lane that ``torchrl_perf.runtime.transfer`` uses.
"""

import random
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_perf.runtime._lanes import Lane


class Event:
    """Counts how often it was recorded, and how many of these have come true."""

    def __init__(self, device: "SlowDevice"):
        self.device, self.recorded, self.reached = device, 0, 0

    def record(self, stream: "Stream") -> None:
        """Come true once all that the stream has been given is done."""
        self.recorded += 1
        number = self.recorded

        def reach() -> None:
            self.reached = number

        stream.give(reach)

    def synchronize(self) -> None:
        """Let the device go on, in any order, until the last record has come true."""
        while self.reached < self.recorded:
            assert self.device.step(), "deadlock: the event can never come true"


class Stream:
    """Work in order: functions, and events to wait for."""

    def __init__(self, device: "SlowDevice"):
        self.device, self.queue = device, deque()
        device.streams.append(self)

    def give(self, work: Callable[[], object]) -> None:
        """Enqueue work."""
        self.queue.append((None, 0, work))

    def wait_event(self, event: Event) -> None:
        """Enqueue a wait for the work before the event's present recording."""
        self.queue.append((event, event.recorded, lambda: None))

    def wait_stream(self, other: "Stream") -> None:
        """Enqueue a wait for the present work of the other stream."""
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)


class SlowDevice:
    """The streams of one device; does nothing unless stepped, by a random walk or by a host that waits."""

    def __init__(self, seed: int):
        self.streams: list[Stream] = []
        self.random = random.Random(seed)
        self.current = Stream(self)
        self.lent: list[tuple[Tensor, Stream]] = []

    def step(self) -> bool:
        """Do one piece of work of a random stream that can go on; False if none can."""
        ready = [
            s for s in self.streams if s.queue and (s.queue[0][0] is None or s.queue[0][0].reached >= s.queue[0][1])
        ]
        if not ready:
            return False
        self.random.choice(ready).queue.popleft()[2]()
        return True

    def walk(self, most: int = 4) -> None:
        """Go on a little, by a random number of steps."""
        for _ in range(self.random.randrange(most + 1)):
            self.step()

    def finish(self) -> None:
        """Go on until nothing is left."""
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "deadlock"


class SlowLane(Lane):
    """A lane to a ``SlowDevice``, whose memory is host memory."""

    def __init__(self, device: torch.device, *, side_stream: bool = False, slow: SlowDevice):
        self.device, self.is_cuda, self.slow = device, True, slow
        self.side = Stream(slow) if side_stream else None

    def host(self, shape, dtype):
        """Memory that holds rubbish at first."""
        return torch.full((*shape,), 77, dtype=dtype)

    def empty(self, shape, dtype, stream):
        """Memory that holds rubbish at first."""
        return torch.full((*shape,), 66, dtype=dtype)

    def event(self):
        """An event of the slow device."""
        return Event(self.slow)

    def current(self):
        """The slow device's one current stream."""
        return self.slow.current

    def copy(self, target, source, stream):
        """Two halves, each made when the stream comes to it."""
        target, source = target.view(-1), source.reshape(-1) if source.is_contiguous() else source.clone().view(-1)
        half = len(target) // 2
        stream.give(lambda: target[:half].copy_(source[:half]))
        stream.give(lambda: target[half:].copy_(source[half:]))

    def lend(self, tensor, stream):
        """Note who uses what."""
        self.slow.lent.append((tensor, stream))

    def refuse_capture(self, name):
        """Nothing is captured here."""
