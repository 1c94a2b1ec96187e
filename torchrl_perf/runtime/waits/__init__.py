"""Host waits: heard, counted, refused, and what to write instead."""

__all__: list[str] = []
