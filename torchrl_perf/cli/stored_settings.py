"""Settings from a JSON or YAML file, checked against the fields of a config."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import ConfigError, settings_from

__all__ = ["read_settings"]


def read_settings(path: Path, kind: type[RunConfig]) -> dict[str, Any]:
    """Read the fields of a config from a file; fields may be missing.

    Args:
        path: a ``.json``, ``.yaml`` or ``.yml`` file that holds one mapping of names to values.
        kind: the config.

    Returns:
        Name to value, in the types of the fields: a whole float becomes an int where one is expected, and text such as
        ``1e-3``, which YAML does not take for a number, becomes a float.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: with all problems at once if there are unknown names (each with the nearest valid one) or values
            of another type; values out of range are listed beside them, and otherwise left to the config that is made
            of the file and the options, which win over it.
        ValueError: for another suffix, a file that cannot be parsed, or a setting that it holds twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"config: expected a file, received {path}, where none is. Remedy: check the path.")
    try:
        values = _parse(path)
    except RecursionError:
        raise ValueError(
            f"{path}: expected a mapping of names to values, received one that is nested too deep. Remedy: name: "
            "value, one setting a line."
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: expected a mapping of names to values, received {type(values).__name__}. Remedy: name: value, "
            "one setting a line."
        )
    good, problems = settings_from(kind, values)
    if problems:
        raise ConfigError([*problems.values(), *kind.problems_of(good, bad=problems)], str(path))
    return good


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, received {error}. Remedy: save the file as UTF-8.") from None
    if path.suffix == ".json":
        try:
            return json.loads(text, object_pairs_hook=partial(_mapping, path))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: expected JSON, received {error}. Remedy: mend the file at the place named."
            ) from None
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(
            f"config: expected a .json, .yaml or .yml file, received {path}. Remedy: give the file one of these "
            "endings."
        )
    import yaml

    try:
        values, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path}: expected YAML, received {error}. Remedy: mend the file at the place named."
        ) from None
    if isinstance(tree, yaml.MappingNode):
        _refuse_twice([str(name.value) for name, _ in tree.value], path)
    return values


def _mapping(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice([name for name, _ in pairs], path)
    return dict(pairs)


def _refuse_twice(names: list[str], path: Path) -> None:
    """Refuse a setting that occurs twice: the readers of JSON and YAML would silently drop the first."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"{path}: expected each setting once, received {', '.join(twice)} more often. Remedy: keep one line of "
            "each."
        )
