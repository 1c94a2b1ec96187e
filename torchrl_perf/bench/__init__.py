"""Benchmarks: each runs the baseline and the package in one sitting and reports every row, the slower ones too."""

__all__: list[str] = []
