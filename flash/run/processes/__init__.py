"""Processes of a job: how they start, find each other, are watched, and end together.

- `launcher` is the entry point of `flash train`. `launch` runs the parts of one machine. `supervisor` starts, watches,
  restarts and ends the processes of a part; `ranks` is the part of the trainer ranks. `worker` is the code of a started
  process. `forked` forks that process from a server that has imported its modules.
- `rendezvous`, `hub_place`, `hub_search` and `token` let processes find the hub and prove that they belong to the run.
- `locks`, `scratch`, `starter_watch`, `error_marker` and `requeue` handle the death of one of these processes.
"""
