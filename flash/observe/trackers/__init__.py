"""What is told to outsiders while a run goes on: trackers (`feed` starts a `process` for each), a sink, alarm
commands."""
