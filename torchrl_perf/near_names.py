"""The name that was meant where an unknown one was given: of a setting, an env, a metric."""

import difflib
import re
from collections.abc import Iterable

__all__ = ["nearest_word", "plain_word"]


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like a given one, whatever its case and punctuation; None where none is like it.

    The number of a version, as in ``CartPole-v1``, is left out; of several versions the last is meant.
    """
    plain = {plain_word(other): other for other in known if isinstance(other, str)}
    if not (meant := plain_word(word)):
        return None
    near = difflib.get_close_matches(meant, plain, n=1, cutoff=0.5)
    return plain[near[0]] if near else None


def plain_word(word: str) -> str:
    """A word without case, punctuation and version."""
    without = re.sub(r"[-_]v\d+$", "", word.strip())
    return re.sub(r"[^a-z0-9]", "", without.lower())
