"""The vLLM engine of a node.

`engine` implements `flash.rollout.engine.Engine`, and translates requests and responses. `start` has vLLM's arguments
and environment variables. `processes` starts, watches and ends vLLM's processes. `state` has the state machines of
`engine`: for adapters, for load, and for the time of the last step. `fork_server` is imported by the process from which
vLLM's processes are forked.
"""
