"""Samples: the state of every training task between its issue and the commit of its step.

All modules are pure state machines or functions: they own no anyio task, clock or connection. `flash.hub` owns them. A
*task* asks for one sample of a problem. A *sample* is its result: a trajectory or a failure. A *group* is the tasks
about one problem, and a *member* is a task of a group with its state and result.

`tasks` chooses the problem of the next group, makes its tasks, and decides when they may start. `buffer` leases them to
nodes and takes the results. `groups` holds them until the group is complete. Then `buffer` chooses the groups of a
step, and `batches` makes them a batch and splits it among the trainer ranks.

- `buffer` decides and records events, and `store` makes the changes. `journal` defines the events, and replays them
  after a crash.
- `tasks` and `groups` have the parts of the store.
- `rules` has the settings, the shares of domains, and the breaker that stops a run which only fails.
- `evaluation` leases held-out tasks and collects their results.
"""
