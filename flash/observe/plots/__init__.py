"""Pictures of a run: `plots` of its rows, `timeline` of who was busy when, `rhythm_plot` of a response; `trace` is for
other viewers."""
