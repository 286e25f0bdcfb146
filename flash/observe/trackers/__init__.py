"""Receivers of a run's rows and alarms: trackers, the user's own sink, and the command that alarms start.

- `feed`: the interface of a receiver, and the thread with a queue that each receiver has. A slow or failing receiver
  never stops or slows the run.
- `receivers`: the sinks of `track.to`, the command of `alarms.command`, and `Receivers`, all receivers of a run.
  `flash.observe.recorder` passes it each row.
- `trackers`: the trackers of `track.to` that Flash knows, and the process that sends a run's new rows to one of them.
  `flash track` uses it too.
"""
