"""Recording, reporting and showing of runs.

- `observer`: the events that the hub reports. `recorder`: the observer of a real run, which writes the run directory
  (`rundir`), prints to the terminal (`console`), raises alarms (`alarms`) and passes rows to receivers (`trackers`).
- `columns`: the name, meaning, unit and chart of each number.
- `cluster`: nodes, engines and failures at one moment. `cluster_counts`: the same as numbers.
- `watch`, `plots`, `comparison`, `rhythm`: runs as people look at them.
- `stats`, `state_times`, `text`: confidence intervals, times in states, numbers as text.
"""
