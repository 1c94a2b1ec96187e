"""Recurrent cells as functions: one step, and a sequence whose rows start over where an episode begins."""

__all__: list[str] = []
