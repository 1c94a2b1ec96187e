"""What a trainer that is given an algorithm shows of it."""

from typing import Any

__all__ = ["of_algorithm"]


def of_algorithm(trainer: Any, name: str) -> Any:
    """A public attribute of a trainer's algorithm, for the ``__getattr__`` of the trainer.

    Raises:
        AttributeError: for what neither has, private names, and a trainer whose algorithm is not made yet.
    """
    algorithm = vars(trainer).get("algorithm")
    if name.startswith("_") or algorithm is None:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}")
    try:
        return getattr(algorithm, name)
    except AttributeError:
        message = f"neither {type(trainer).__name__!r} nor its {type(algorithm).__name__!r} has an attribute {name!r}"
        raise AttributeError(message) from None
