"""`flash simulate` and `flash calibrate`: the real hub and nodes with simulated hardware, on a virtual clock.

- `world`: a whole simulated run, and the entry point; `clock`: the virtual clock, on which waiting takes no real time.
  Tests use the clock too.
- `engine` (built on `steps`), `trainer`, `environment`: the simulated hardware; `workload`: lengths, durations and
  rewards.
- `report`, `tables`, `plots`: results of a run; `bounds`: theoretical step times to compare them with.
- `calibrate`: fits the constants of the simulation to a measured run.
- `faults`: random runs with random faults, which test the real code.
"""
