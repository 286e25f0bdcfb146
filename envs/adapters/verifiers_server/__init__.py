"""Server program that runs in the Python environment of `verifiers`: see `__main__`."""
