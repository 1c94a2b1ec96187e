"""Arguments of an env as a command line and a file have them."""

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["env_arguments"]

LONGEST = 120  # characters of a word that a sentence repeats


def env_arguments(words: Sequence[str]) -> dict[str, Any]:
    """The arguments in words such as ``length=12``, ``map="4x4"`` and ``{"length": 12, "map": "4x4"}``.

    Args:
        words: each ``name=value``, whose value is JSON, or else text; or a JSON object. Later ones win.

    Raises:
        ValueError: for a word of another form.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if word.lstrip().startswith("{"):
            found |= _object(word)
        elif equals and name.isidentifier():
            found[name] = _value(text)
        else:
            raise ValueError(
                f"env_args: expected name=value or a JSON object, received {word[:LONGEST]!r}. Remedy: such as "
                "length=12."
            )
    return found


def _object(word: str) -> dict[str, Any]:
    try:
        values = json.loads(word)
    except ValueError as error:
        raise ValueError(
            f"env_args: expected name=value or a JSON object, received {word[:LONGEST]!r}: {error}. Remedy: quotes "
            "around names and texts, such as '{\"length\": 12}'."
        ) from None
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
