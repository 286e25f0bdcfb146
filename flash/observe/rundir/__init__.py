"""Files of a run: `rundir` writes and reads the run directory, `recording` and `sample_files` its larger files."""
