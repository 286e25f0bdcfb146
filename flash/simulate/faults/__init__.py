"""`flash simulate --faults`: random runs with random faults, played by the real hub, nodes and recovery.

- `scenario`: the drawn configuration and faults of a seed; `play`: plays it, lets the faults happen, and makes a
  failing scenario smaller.
- `cluster`: the processes of the run and the launchers that start them again; `parts`: its disk, engines, environments
  and trainer ranks; `network`: the connections between its machines; `loop`: the event loop, with processes that can
  be killed and frozen.
- `bookkeeper`: accounts of the run from messages and files, and the laws that it checks.
"""
