"""Samples: every training task between its issue and the commit of its step. Pure state machines: no clock, no task,
no peer; `flash.hub` owns them.

A sample's road: `tasks` gives the next problem, `buffer` leases its tasks when `leases` admits them and takes the
results, `groups` holds them until a group is complete, `buffer` forms the batch of a step, and `batches` deals it to
the trainer ranks.

- `buffer` decides and records events; `store` applies them; `journal` defines them; `replay` applies them again.
- `tasks`, `groups`, `leases`: the parts of the store.
- `rules`: the age contract, the settings, the shares of domains, the breaker.
- `evaluation`: the same road for held-out tasks.
"""
