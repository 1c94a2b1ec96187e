"""Docstrings on the site: roles such as ``:func:`name``` become code, as Markdown writes it."""

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|meth|data|mod|attr|exc|obj):`(~?)([^`]+)`")


def without_roles(text: str) -> str:
    """Markdown of a docstring, whose roles become code; ``~`` leaves the name behind the last dot alone."""
    return ROLE.sub(lambda found: f"`{found[2].rpartition('.')[2] if found[1] else found[2]}`", text)


class Roles(Extension):
    """Rewrites each docstring once, when its source has been read."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)
