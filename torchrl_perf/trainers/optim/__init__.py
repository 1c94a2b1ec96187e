"""The optimiser of the trainers and its settings."""

__all__: list[str] = []
