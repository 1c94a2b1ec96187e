"""What every on-policy algorithm shares."""

__all__: list[str] = []
