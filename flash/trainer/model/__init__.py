"""The model as the trainer computes it: loading, packed attention, log-probs, and the canary that the engine is held
to."""
