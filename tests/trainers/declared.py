"""Where a setting is declared, and which settings a trainer reads."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest

ADAM = {
    # what every optimiser is set to: (what both runs have, the value that is tried)
    "adam_beta1": ({}, 0.5),
    "adam_beta2": ({}, 0.5),
    "adam_eps": ({}, 0.1),
    "weight_decay": ({}, 0.5),
}


def declaring(kind: type, field: str) -> type:
    """The highest class of a config's bases that declares a field: what reads it is shared by all below."""
    return next(base for base in reversed(kind.__mro__) if field in vars(base).get("__annotations__", {}))


def repeated(kind: type, field: str, *parts: type) -> tuple[pytest.MarkDecorator, ...]:
    """The mark of a key whose effect the trainers of a base class show already: the second part tries it again.

    Args:
        kind: a config.
        field: of it.
        *parts: classes that no trainer but those of ``kind`` shows the keys of.
    """
    return () if declaring(kind, field) in (kind, *parts) else (pytest.mark.slow,)


def unread(config: Any, act: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fields that nothing reads while ``act(config)`` runs; copies of the whole config do not count."""
    left = {field.name for field in dataclasses.fields(config)}

    def watched(self: Any, name: str) -> Any:
        if self is config and sys._getframe(1).f_globals["__name__"] not in ("dataclasses", "copy"):
            left.discard(name)
        return object.__getattribute__(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(type(config), "__getattribute__", watched)
        act(config)
    return left
