"""The processes of a job: started by torchrun or beside it, found by each other, watched, and ended together.

- `launcher` is the way in of a node with trainers; `worker` is what it starts, `trainers` its trainer ranks' own
  launch.
- `rendezvous`, `hub_place`, `hub_search`, `token`: how processes find the hub, and prove that they belong to the run.
- `locks`, `scratch`, `starter_watch`, `error_marker`, `requeue`: what holds when one of them dies.
"""
