"""Rules of other systems, on the same simulated engines, workload and clock as Flash.

Each class of `roll_flash` and `asynchronous` implements the published rules of one system. Where something is left out,
this favours that system: messages cost nothing, there is no start-up, and nothing fails except what the workload
describes.
"""
