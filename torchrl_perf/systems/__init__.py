"""Five whole systems: a task, its networks, its trainer, its evaluation and its pictures in one folder each."""

__all__: list[str] = []
