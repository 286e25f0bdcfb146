"""The vLLM engine of a node.

`engine` is the `Engine`; `start` has its arguments and environment, `processes` its processes, `requests` translates
requests and responses, and `state` is the pure state beside them.
"""
