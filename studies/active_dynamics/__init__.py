"""Claims about the original of ``active_dynamics``, as experiments."""
