"""The hub: the one stateful place of a run. It connects the state machines of `flash.samples` with the run's peers.

One sample's way through it: `work` leases its task to a node and books its result; `steps` puts its group into a batch,
deals that to the trainer ranks and books the step.

- `hub`: `Hub` wires all parts and answers requests; `protocol`: the messages; `gate`: checks what peers send.
- `work`: leases and results; which node gets how many tasks.
- `nodes`, `fleet`: nodes and engines that come, load weights and go; their state.
- `trainers`, `steps`: the trainer ranks and their restarts; batches, commits and versions.
- `context`: the state that all parts share; `recovery`: the state that survives a hub.
- `stages`, `metrics`: what the run waits for; what it measures.
"""
