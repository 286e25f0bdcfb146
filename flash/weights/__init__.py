"""Versions of the weights on their way from the trainer to the engines, and the proof that they arrived.

`publisher` is the way in, `update` says what it announces; `tcp`, `group` (with `membership`) and `ipc` are its
backends. `plugin`, `tcp_engine`, `member` and `worker_extension` run in vLLM's processes. `verification` is what a
loaded engine is held to.
"""
