"""Recurrent modules: a step inside a collector, a sequence inside a loss, with the same weights and the same resets."""

__all__: list[str] = []
