"""`verifiers` 0.4, as far as its server sees it: all of it is in `v1`."""
