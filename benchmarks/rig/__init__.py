"""Hosts on one machine, a wire between them, and the end of all that was started: for benchmarks and for tests."""
