"""Claims about the original of ``options_market``, as experiments."""
