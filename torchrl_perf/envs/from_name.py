"""Classes and functions of users by ``module.path:Class`` and ``file.py:function``."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrl_perf.near_names import nearest_word

__all__ = ["named_module", "named_object"]


def named_object(place: str) -> Any:
    """The class or function at a place.

    A module is looked for in the working directory, too; the folder of a file is where its own imports are looked for.

    Args:
        place: ``module.path:name`` or ``folder/file.py:name``.

    Raises:
        ValueError: for a module or file that is not there or does not import, and a name that it does not have.
    """
    source, _, name = place.rpartition(":")
    is_file = source.endswith(".py") or "/" in source
    if not source or not name.isidentifier():
        raise ValueError(
            f"env: expected module.path:Class or file.py:function, received {place!r}. Remedy: the name of a class or "
            "function behind the colon."
        )
    module = _file(Path(source), place) if is_file else named_module(source, place)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        near = nearest_word(name, known)
        remedy = f"{source}:{near}, the nearest" if near else f"one of {', '.join(known) or 'none'}"
        raise ValueError(
            f"env: expected a class or function of {source}, received {name!r}. Remedy: {remedy}."
        ) from None


def named_module(name: str, place: str) -> ModuleType:
    """A module, which is looked for in the working directory, too.

    Args:
        name: dotted.
        place: what was asked for, for messages.

    Raises:
        ValueError: for a module that is not there or does not import.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:  # the program's own folder is, where it is not run by python -m
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if name != missing and not name.startswith(f"{missing}."):
            raise _unusable(place, name, error) from error
        raise ValueError(
            f"env: expected a module that can be imported from {here}, received {place!r}, and there is no module "
            f"{missing}. Remedy: the folder that holds it as working directory, or file.py:name."
        ) from None
    except Exception as error:
        raise _unusable(place, name, error) from error


def _file(path: Path, place: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"env: expected a file, received {place!r}, and there is none at {path}. Remedy: its path.")
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    # a name of its own where another module has the file's
    name = path.stem if loaded is None and importlib.util.find_spec(path.stem) is None else f"env_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"env: expected a Python file, received {place!r}. Remedy: a file that ends in .py.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _unusable(place, str(path), error) from error
    return module


def _unusable(place: str, source: str, error: Exception) -> ValueError:
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = line or (trace.tb_lineno if trace is not None else None)
    file = getattr(error, "filename", None) or (trace.tb_frame.f_code.co_filename if trace is not None else source)
    return ValueError(
        f"env: expected a module that imports, received {place!r}: {type(error).__name__}: {error} ({file}, line "
        f"{line}). Remedy: python -c 'import' of it shows the whole trace; mend it there."
    )
