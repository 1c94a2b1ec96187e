"""What every off-policy algorithm shares."""

__all__: list[str] = []
