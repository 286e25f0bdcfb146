"""A program for another Python: see `__main__`."""
