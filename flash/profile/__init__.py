"""`flash profile`: a few steps of a run, down to operators.

- `order`: what is to be recorded, which processes find in their environment, and what each says of it.
- `recording`: torch's profiler in a trainer rank or an engine.
- `parts`: the files of all processes, as one trace; `report`: what they come down to.
"""
