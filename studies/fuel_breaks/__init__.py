"""Claims about the original of ``fuel_breaks``, as experiments."""
