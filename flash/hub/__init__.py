"""The hub: it holds the state of a run, and connects the state machines of `flash.samples` with nodes and trainer
ranks.

For each sample, `work` leases the task to a node (a lease assigns one task to one node) and stores the result. `steps`
puts the group of the sample into a batch, divides the batch among the trainer ranks, and counts the step.

- `hub`: `Hub` makes all parts and answers requests. `protocol`: the messages. `gate`: checks what peers send.
- `work`: leases and results, and how many tasks each node gets.
- `nodes`: nodes and engines that join, load weights and leave. `fleet`: the state of nodes and engines.
- `trainers`: the trainer ranks and their restarts. `steps`: batches, commits and versions.
- `context`: the state that all parts share. `recovery`: the state that survives a hub process.
- `stages`: the stage of the run, which says what the run waits for. `metrics`: the metrics of each step.
"""
