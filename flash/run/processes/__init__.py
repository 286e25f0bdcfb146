"""The processes of a job: started, found by each other, watched, and ended together.

- `launcher` is the way in of `flash train`, `launch` what runs on a machine then, `supervisor` how its processes
  start, are watched, start again and end, `ranks` the trainer ranks among them; `worker` is what is started, `forked`
  how: from a process that has imported what it needs.
- `rendezvous`, `hub_place`, `hub_search`, `token`: how processes find the hub, and prove that they belong to the run.
- `locks`, `scratch`, `starter_watch`, `error_marker`, `requeue`: what holds when one of them dies.
"""
