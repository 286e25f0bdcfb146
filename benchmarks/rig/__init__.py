"""Hosts on one machine and a wire between them, for benchmarks and tests. All that was started ends with them."""
