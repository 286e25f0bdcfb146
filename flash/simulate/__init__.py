"""`flash simulate` and `flash calibrate`: the real hub and nodes around simulated hardware, on a virtual clock.

- `world`: a whole run, the way in; `clock`: on which waiting takes no time, for tests too.
- `engine` (of `steps`), `trainer`, `environment`: the hardware; `workload`: how long all of it takes.
- `meter`, `report`, `tables`, `plots`: what came of it; `bounds`: what it is measured against.
- `calibrate`, with `fitting`: the constants of a measured run.
"""
