"""Restart of a run: the hub's state, the journal after it, and the steps that the trainer ranks train again."""
