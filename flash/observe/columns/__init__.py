"""What the numbers of a run's rows are: the one table from which everything that shows or tells them is made.

`training`, `speed` and `evaluation` have an entry for each column of `metrics.jsonl` and `evals.jsonl`, `engine` for
each number that an engine tells, `column` says what an entry holds, `table` finds them and has the charts that draw
them, `page` makes the tables of docs/metrics.md.
The terminal, `flash watch`, charts, plots, alarms, Prometheus and trackers take names, units, meanings and forms
from here. A metric is an entry here, and the line that computes it.
"""
