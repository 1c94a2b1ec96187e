"""Which tensors of a VMAS simulation are its state, and how the state is loaded and read.

Dimension key: ``N`` envs.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_perf.envs.vmas_slots import Found, MovingSlot, Slot, scan
from torchrl_perf.runtime.seeds import seeded

if TYPE_CHECKING:
    from torchrl_perf.envs.vmas_world import VmasWorld

__all__ = ["BoundSlots", "StateSlots"]


class StateSlots:
    """Which slots are the state of a scenario, and which of them a reset writes; found by watching a small copy.

    The copy is reset and stepped a few times. Tensors that change are state. The scenario is refused if a masked reset
    would not be exact: if anything that changes is not a tensor with one row for each env, or a reset reads state of
    the last episode. Tensors that never changed are assumed constant, and :meth:`check_constants` watches them.

    Args:
        probe: the copy, of a number of envs that no other dim of its tensors has.
        larger: a second copy with more envs, which shows the dim of envs of each tensor.

    Attributes:
        state: paths of the state, sorted.
        drawn: those that a reset writes; the others keep their values.
        drawn_together: those of which a reset of all envs draws one value for all of them, a reset of one env its own.

    Raises:
        ValueError: for a scenario whose reset cannot be masked exactly.
    """

    phases = 4
    """Resets, each followed by two steps, in which the copy is watched."""

    def __init__(self, probe: VmasWorld, larger: VmasWorld) -> None:
        self.name = probe.name
        self._probe = probe
        host = random.getstate()
        for world in (probe, larger):  # some tensors exist only after the first step
            world.reset()
            world.random_step()
            world.reset()
        before = scan(probe.scenario)
        rows = self._rows_of(before, scan(larger.scenario), (probe.num_envs, larger.num_envs))
        loud, written = self._watch(before, rows)
        self.state = sorted(loud)
        self.drawn = [path for path in self.state if path in written]
        self._check_independence(before)
        self.drawn_together = self._drawn_together(larger)
        if self.drawn_together:
            self._check_single_resets(before)
        if random.getstate() != host:
            self._refuse("it draws from Python's own generator, whose numbers all envs would share")

    def _refuse(self, reason: str) -> None:
        raise ValueError(
            f"scenario: expected one whose reset can be masked exactly, received {self.name!r}: {reason}. Remedy: "
            "torchrl.envs.VmasEnv, which resets env by env on the host."
        )

    def _rows_of(self, one: Found, other: Found, sizes: tuple[int, int]) -> set[str]:
        """Paths of the tensors with one row for each env, the same in both copies."""
        differing = [path for path in {*one.leaves, *other.leaves} if not _same_leaf(path, one, other, sizes)]
        differing += one.slots.keys() ^ other.slots.keys()
        if differing:
            self._refuse(f"two copies of it differ in {_some(differing)}")
        shapes = {path: (slot.get().shape, other.slots[path].get().shape) for path, slot in one.slots.items()}
        rows = {path for path, (a, b) in shapes.items() if a[:1] == sizes[:1] and b[:1] == sizes[1:]}
        elsewhere = [path for path, (a, b) in shapes.items() if path not in rows and a != b]
        if elsewhere:
            self._refuse(f"the first dim of {_some(elsewhere)} is not that of the envs")
        return rows

    def _watch(self, before: Found, rows: set[str]) -> tuple[set[str], set[str]]:
        """Paths of the tensors that change at all, and of those that a reset writes."""
        loud: set[str] = set()
        written: set[str] = set()
        moving: set[str] = set()
        views: list[dict[str, Any]] = []
        last = _marks(before)
        for phase in range(3 * self.phases):
            is_reset = phase % 3 == 0
            if is_reset:
                self._probe.reset()
            else:
                self._probe.random_step()
            now = scan(self._probe.scenario)
            paths = {*before.leaves, *now.leaves}
            changed = [path for path in paths if before.leaves.get(path) != now.leaves.get(path)]
            changed += before.slots.keys() ^ now.slots.keys()
            marks = _marks(now)
            moved = {path for path, mark in marks.items() if not _still(mark, last.get(path))}
            changed += [
                path for path in moved - rows if path in last and not torch.equal(marks[path][0], last[path][0])
            ]
            if changed:
                self._refuse(f"{_some(changed)} changes, which is no tensor with a row for each env")
            loud |= moved
            written |= moved if is_reset else set()
            moving |= {path for path, slot in now.slots.items() if slot.owner is not before.slots[path].owner}
            views.append({path: _view(mark[0]) for path, mark in marks.items()})
            self._check_observation(now, rows)
            last = _marks(scan(self._probe.scenario))
        self._moving = moving
        # for each path the first one that always holds the very same tensor: they are two names of it
        groups: dict[Any, str] = {}
        self._shared = {path: groups.setdefault(tuple(view[path] for view in views), path) for path in sorted(loud)}
        return loud & rows, written & rows

    def _check_observation(self, found: Found, rows: set[str]) -> None:
        """Refuse observations that change the state."""
        before = {path: found.slots[path].get().clone() for path in rows}
        self._probe.observe()
        now = scan(self._probe.scenario)
        changed = [path for path, value in before.items() if not _same(value, now.slots[path].get())]
        changed += [path for path, value in found.leaves.items() if now.leaves.get(path) != value]
        if changed:
            self._refuse(f"its observation changes {_some(changed)}")

    def _check_independence(self, found: Found) -> None:
        """Refuse a reset whose result depends on the values before it."""
        reference = self._after_reset(found, [])

        def differing(disturbed: list[str]) -> list[str]:
            outcome = self._after_reset(found, disturbed)
            return [path for path in self.drawn if not _same(reference[path], outcome[path])]

        for path in differing(self.drawn):  # usually empty, which takes one reset
            self._refuse(f"its reset makes {path} from what the episode before left")
        self._probe.reset()

    def _after_reset(self, found: Found, disturbed: list[str]) -> dict[str, Tensor]:
        """What a reset with fixed random numbers writes, after other values have been put into some tensors."""
        slots = self._placed(found)
        for path in disturbed:
            value = slots[path].get()
            other = ~value if value.dtype == torch.bool else value + 1
            if value.is_contiguous():
                value.copy_(other)  # in place, so that other names of the tensor see it as well
            else:
                slots[path].set(other)
        with seeded(0, self._probe.device):
            self._probe.reset()
        return {path: slots[path].get().clone() for path in self.drawn}

    def _check_single_resets(self, found: Found) -> None:
        """Refuse a scenario whose reset of one env writes something of another shape than that of all envs."""
        slots = self._placed(found)
        shapes = {path: slots[path].get().shape for path in self.state}
        self._probe.reset_one_by_one()
        for path, shape in shapes.items():
            now = slots[path].get().shape
            if now != shape:
                self._refuse(f"a reset of one env turns {path} from {list(shape)} into {list(now)}")

    def _placed(self, found: Found) -> dict[str, Slot]:
        """The slots; those whose owners are replaced become :class:`MovingSlot`."""
        return {
            path: MovingSlot(slot.owner, slot.key, slot.root, slot.chain) if path in self._moving else slot
            for path, slot in found.slots.items()
        }

    def _drawn_together(self, larger: VmasWorld) -> list[str]:
        """Paths of which a reset of all envs draws one value for all of them."""
        slots = self._placed(scan(larger.scenario))
        seen: dict[str, list[Tensor]] = {path: [] for path in self.drawn}
        for _ in range(2 * self.phases):
            larger.reset()
            for path, values in seen.items():
                values.append(slots[path].get().clone())
        return [path for path, values in seen.items() if _alike(values) and not _constant(values)]

    # -- moving a state in and out -----------------------------------------------------------------------------------

    def bind(self, world: VmasWorld) -> BoundSlots:
        """The slots of another copy of the scenario.

        Raises:
            ValueError: where the copy differs from the one that was examined.
        """
        found = scan(world.scenario)
        self._rows_of(scan(self._probe.scenario), found, (self._probe.num_envs, world.num_envs))
        return BoundSlots(self._placed(found), self.state, self._shared, self.name)


class BoundSlots:
    """The slots of one simulation; see :class:`StateSlots`."""

    def __init__(self, slots: dict[str, Slot], state: list[str], shared: dict[str, str], name: str) -> None:
        self._slots = {path: slots[path] for path in state}
        self._shared = shared
        self._name = name
        inside = set(state)
        self._constants = {path: slot for path, slot in slots.items() if path not in inside}
        self._marks = {path: (slot.get(), slot.get()._version) for path, slot in self._constants.items()}

    def load(self, state: dict[str, Tensor], *, copy: bool) -> None:
        """Put the state ``[N, ...]`` into the objects; as copies where the simulation will write to it."""
        if not copy:
            for path, slot in self._slots.items():
                slot.set(state[path])
            return
        copies: dict[str, Tensor] = {}
        for path, slot in self._slots.items():
            first = self._shared[path]
            if first not in copies:
                copies[first] = state[path].clone(memory_format=torch.contiguous_format)
            slot.set(copies[first])

    def read(self) -> dict[str, Tensor]:
        """The present state: the objects' own tensors, not copies."""
        return {path: slot.get() for path, slot in self._slots.items()}

    def check_constants(self) -> None:
        """Raise once a tensor that was assumed constant has been written to; no tensor is read.

        Raises:
            RuntimeError: naming it.
        """
        for path, (tensor, version) in self._marks.items():
            now = self._constants[path].get()
            if now is not tensor or now._version != version:
                raise RuntimeError(
                    f"scenario {self._name!r}: expected {path} to stay as it was in {StateSlots.phases} episodes of a "
                    "small copy, received a new value; a reset would leave it out. Remedy: torchrl.envs.VmasEnv."
                )


Mark = tuple[Tensor, int]


def _marks(found: Found) -> dict[str, Mark]:
    """The tensor of each slot and its version, which together tell whether it has been written to since."""
    return {path: (slot.get(), slot.get()._version) for path, slot in found.slots.items()}


def _still(mark: Mark, last: Mark | None) -> bool:
    return last is not None and mark[0] is last[0] and mark[1] == last[1]


def _view(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _alike(values: list[Tensor]) -> bool:
    """Whether in each tensor all rows are the same."""
    return all(torch.equal(value, value[:1].expand_as(value)) for value in values)


def _constant(values: list[Tensor]) -> bool:
    return all(torch.equal(value, values[0]) for value in values)


def _same_leaf(path: str, one: Found, other: Found, sizes: tuple[int, int]) -> bool:
    """Whether a value is the same in two copies, except that the number of envs may differ."""
    values = one.leaves.get(path), other.leaves.get(path)
    if values[0] == values[1]:
        return True
    texts = [re.sub(rf"\b{size}\b", "N", str(value)) for value, size in zip(values, sizes, strict=True)]
    return texts[0] == texts[1]


def _some(paths: list[str]) -> str:
    """The first three paths, and how many more there are."""
    first = ", ".join(sorted(paths)[:3])
    return first if len(paths) <= 3 else f"{first} and {len(paths) - 3} more"
