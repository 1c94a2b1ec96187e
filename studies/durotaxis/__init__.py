"""Claims about the original of ``durotaxis``, as experiments."""
