"""Networks of action values."""

__all__: list[str] = []
