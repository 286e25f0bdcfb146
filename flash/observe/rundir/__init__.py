"""Files of a run: `rundir` writes and reads the run directory, `recording` and `samples` its larger files."""
