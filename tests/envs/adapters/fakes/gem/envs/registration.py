"""What there is."""

ENV_REGISTRY = {"game:Guess-v0": object(), "game:Crosswords-v0": object()}
