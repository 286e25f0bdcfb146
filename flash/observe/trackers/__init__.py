"""Receivers of a run's rows and alarms: trackers, the user's own sink, and the command that alarms start.

- `feed`: the interface of a receiver, and the thread with a queue that each receiver has. A slow or failing receiver
  never stops or slows the run.
- `receivers`: the sink of `observe.sink`, the command of `alarms.command`, and `Receivers`, all receivers of a run.
  `flash.observe.recorder` passes it each row.
- `tracking`: sends the new rows of a run directory to a tracker, from a process of its own; also for `flash track`.
- `trackers`: the four trackers of `track.to`.
"""
