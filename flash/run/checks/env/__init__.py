"""Checks of an environment, for `flash check-env`: episodes without a model, resources, checks and a short training."""
