"""The numbers in a run's rows: one table, from which everything that shows or reports them is made.

- `column` defines an entry of the table: the name, meaning, unit, chart and alarm of one number.
- `training` and `speed` have an entry for each column of `metrics.jsonl`.
- `table` has the entries of `evals.jsonl` and of engines, the charts, and the functions that find an entry.

The terminal, `flash watch`, `flash view`, plots, alarms, Prometheus, trackers and docs/metrics.md take names, units,
meanings and number formats from here. To add a metric, write the line that computes it and an entry here.
"""
