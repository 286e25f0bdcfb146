"""Recording, reporting and showing of runs. Nothing here decides anything about a run, except that an alarm may end it.

- `observer`: the events that the hub reports. `recorder`: the observer of a real run, which writes the run directory
  (`rundir`), prints to the terminal (`console`), raises alarms (`alarms`) and passes rows to receivers (`trackers`).
- `columns`: the name, meaning, unit, number format and chart of each number.
- `cluster`: nodes, engines and failures at one moment, and the numbers that describe them.
- `watch`, `plots`, `comparison`, `rhythm`: runs as people look at them. `timeline`: shares of time of each worker.
- `stats`: means of evaluations with confidence intervals.
"""
