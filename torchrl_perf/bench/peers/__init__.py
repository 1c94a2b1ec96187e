"""What the package is measured against: TorchRL as users write it, and JAX programs."""

__all__: list[str] = []
