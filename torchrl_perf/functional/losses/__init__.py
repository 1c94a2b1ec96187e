"""Losses and the numbers they are made of."""

__all__: list[str] = []
