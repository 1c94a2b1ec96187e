"""Features of images, graphs and sets."""

__all__: list[str] = []
