"""Interpreted kernels are checked in every test of kernels."""

import os
from collections.abc import Iterator

import pytest

from tests.kernels.bounds import bounds_checked


@pytest.fixture(autouse=True, scope="session")
def only_their_own_memory() -> Iterator[None]:
    """Where Triton interprets kernels, an access outside of their arguments is an error."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with bounds_checked():
        yield
