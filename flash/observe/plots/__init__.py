"""Plots of a run: `plots` draws its numbers, `timeline` the activity of its workers (also as a trace), `rhythm_plot`
the attention in a response."""
