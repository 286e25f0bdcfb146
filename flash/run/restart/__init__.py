"""What a run goes on from: the hub's state, the journal after it, and what the trainer ranks train again."""
