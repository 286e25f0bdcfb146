"""Processes of a job: how they start, find each other, are watched, and end together.

- `launcher` is the entry point of `flash train`, `flash join` and `flash sft`. `launch` runs the parts of one machine.
  `supervisor` starts, watches, restarts and ends the processes of a part; `ranks` is the part of the trainer ranks.
  `worker` is the code of a started process. `forked` forks that process from a server that has imported its modules.
- `hub_place` and `rendezvous` let processes find the hub and prove that they belong to the run.
- `locks` and `launch_state` handle the death of one of these processes.
"""
