"""Which rows count, which come next, and where they are."""

__all__: list[str] = []
