"""Claims about the original of ``marine``, as experiments."""
