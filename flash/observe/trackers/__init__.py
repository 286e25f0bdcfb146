"""What is told to outsiders while a run goes on.

`outsiders` are all of a run; each has a `feed`, a thread that never holds the run up and tells what it dropped, and an
outlet: the user's own sink, an `alarm_command`, a `teller` of a tracker. `tracking` tells one of the `trackers` what is
new in a run directory, also for `flash track`.
"""
