"""A package, as the real one is."""
