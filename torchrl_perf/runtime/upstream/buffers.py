"""TorchRL's replay buffers: parts of a buffer that is still being made, and the count of a round-robin writer.

A buffer attaches itself to its storage in its constructor, where its public properties would make what is missing
once more. TorchRL tells a storage at which slots a writer writes, and not which of them are the next ones.
"""

from typing import Any

from torchrl.data.replay_buffers.writers import RoundRobinWriter


def sampler_of(buffer: Any) -> Any:
    """The sampler of a buffer, or None where it has none yet or is none."""
    return getattr(buffer, "_sampler", None)


def writer_of(buffer: Any) -> Any:
    """The writer of a buffer, or None where it has none yet or is none."""
    return getattr(buffer, "_writer", None)


def sample_unit_of(buffer: Any) -> Any:
    """The ``sample_unit`` that a buffer was made with, or None."""
    return getattr(buffer, "_sample_unit", None)


def dim_extend_of(buffer: Any) -> int | None:
    """The ``dim_extend`` that a buffer was made with, or None where it chooses itself."""
    return getattr(buffer, "_dim_extend", None)


def next_slot_of(writer: RoundRobinWriter) -> int:
    """The slot that a writer will write next; while it writes, the one after its rows."""
    return writer._cursor


def take_back(writer: RoundRobinWriter, rows: int, next_slot: int) -> None:
    """Undo what a writer counts before it writes: ``rows`` that were refused, back to ``next_slot``."""
    writer._cursor = next_slot
    writer._write_count -= rows
