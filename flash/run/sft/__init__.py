"""Supervised fine-tuning, `flash sft`, without a hub and without engines.

`rows` and `course` form batches from the rows of a data set, `rank` trains them, and `launch` restarts failed ranks.
The trainer and the run directory are the same as in other runs.
"""
