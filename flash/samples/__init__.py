"""Samples: every training task between its issue and the commit of its step. Pure state machines: no clock, no task,
no peer.

- `buffer`: the way in. It decides: who gets which task, what a step trains. `state` makes what was decided, event by
  event (`journal`), and `replay` makes it again from a checkpoint.
- What decides: `rules` (the age contract, and the configuration's), `admission`, `choice`, `domains`, `breaker`.
- What there is: `tasks`, `groups`, `pool`, `leases`, `ledger`; how it goes: `leaving`, `slices`.
- `batches` deals a step to trainer ranks; `evaluation` is the same life for held-out tasks.
"""
