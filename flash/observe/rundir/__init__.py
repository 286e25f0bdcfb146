"""What a run leaves on disk. `rundir` is the only door to it; `recording` and `sample_files` are its larger files."""
