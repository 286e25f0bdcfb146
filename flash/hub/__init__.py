"""The hub: the one stateful place of a run. It wires `flash.samples` to the peers of the run.

- `hub`: the way in; `protocol`: what is said; `gate`: who may say it; `in_process`: a peer of the same process.
- `nodes` and `ranks`: the hub's side of the rollout nodes and of the trainer ranks.
- `progress`: how far the run is, shared by all; `stages`: what it waits for; `metrics`, `overview`: what is told.
- `state`: what a checkpoint keeps of all this.
"""
