"""What a run tells of itself, and all that is read from what it has told.

- `observer`: what the hub tells; `recorder`: that of a real run, into its directory (`rundir`) and to `console`.
- `columns`: what each number is called, means and looks like; `alarms`: which of them a person is told of.
- `cluster`: nodes, engines and failures at one moment; `cluster_counts`: these in numbers.
- `watch`, `plots`, `comparison`, `rhythm`: runs as people look at them; `progress`: what a run is, and if it goes on.
- `trackers`: outsiders that are told meanwhile. `stats`, `state_times`, `text`: intervals, times in states, words.
"""
