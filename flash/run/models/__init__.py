"""Models that a command begins with. Missing ones are made. The entry point is the module `models`."""
