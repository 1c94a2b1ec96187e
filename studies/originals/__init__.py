"""The patterns of the original programs, written anew from their descriptions: what the package is compared with.

Nothing here is fast on purpose, and none of it is used outside of the benchmarks.
"""

__all__: list[str] = []
