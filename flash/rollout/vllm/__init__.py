"""vLLM as an engine of a node: how it is started, its processes, its requests, and what it tells of its load."""
