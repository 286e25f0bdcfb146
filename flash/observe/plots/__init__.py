"""Plots of a run: `plots` draws its numbers, `timeline` the activity of its workers, `rhythm_plot` the attention in a
response. `trace` writes the timeline for other viewers."""
