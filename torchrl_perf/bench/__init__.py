"""Benchmarks: each runs the baseline and the package in one session and reports every row, slower ones too."""

__all__: list[str] = []
