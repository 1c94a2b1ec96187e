"""Signatures that ``help()`` shows, where a metaclass of TorchRL's hides the constructor behind ``*args``."""

import inspect
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def shows_arguments(cls: Kind) -> Kind:
    """Give a class the signature of its constructor, which the ``__call__`` of TorchRL's metaclasses hides."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    cls.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return cls
