"""The hub: it holds the state of a run, and connects the state machines of `flash.samples` with nodes and trainer
ranks.

A sample's way through it: `work` leases its task to a node (a lease is the right and the duty to run one task) and
stores its result. `steps` puts its group into a batch, divides the batch among the trainer ranks, and counts the step.

- `hub`: `Hub` makes all parts and answers requests. `protocol`: the messages. `gate`: checks what peers send.
- `work`: leases and results, and how many tasks each node gets.
- `nodes`: nodes and engines that join, load weights and leave. `fleet`: their state.
- `trainers`: the trainer ranks and their restarts. `steps`: batches, commits and versions.
- `context`: the state that all parts share. `recovery`: the state that survives a hub process.
- `stages`: what the run waits for. `metrics`: what it measures.
"""
