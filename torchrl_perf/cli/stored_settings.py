"""Settings from a JSON or YAML file, checked against the fields of a dataclass."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

__all__ = ["read_settings"]


def read_settings(path: Path, kind: type) -> dict[str, Any]:
    """Reads the fields of a dataclass from a file; fields may be missing.

    Args:
        path: a ``.json``, ``.yaml`` or ``.yml`` file that holds one mapping of names to values.
        kind: the dataclass.

    Returns:
        Name to value, in the types of the fields: a whole float becomes an int where one is expected, and text such as
        ``1e-3``, which YAML does not take for a number, becomes a float.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for another suffix, a file that cannot be parsed, unknown names (all of them named) or a value of
            another type.
    """
    if not path.is_file():
        raise FileNotFoundError(f"config: expected a file, found none at {path}.")
    values = _parse(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of names to values, received {type(values).__name__}.")
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(str(name) for name in values if name not in known)
    if unknown:
        raise ValueError(f"{path}: unknown settings {', '.join(unknown)}. Expected some of {', '.join(known)}.")
    hints = typing.get_type_hints(kind)
    return {name: _converted(path, name, value, hints[name]) for name, value in values.items()}


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: expected JSON, received {error}.") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"config: expected a .json, .yaml or .yml file, received {path}.")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, received {error}.") from None


def _converted(path: Path, name: str, value: Any, hint: Any) -> Any:
    """``value`` as one of the types that ``hint`` allows."""
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if typing.get_origin(option) is typing.Literal:
            if value in typing.get_args(option):
                return value
        elif option is type(None):
            if value is None:
                return value
        elif (result := _as(option, value)) is not None:
            return result
    expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise ValueError(f"{path}: {name}: expected {expected}, received {value!r} ({type(value).__name__}).")


def _as(kind: type, value: Any) -> Any:
    """``value`` as a plain ``kind`` without loss, or None."""
    if isinstance(value, bool) or kind in (bool, str):
        return value if isinstance(value, kind) else None
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if kind is int:
        return int(value) if not isinstance(value, str) and number.is_integer() else None
    return number
