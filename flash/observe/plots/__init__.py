"""Pictures of a run. `series` computes what they show, `plots` and `rhythm_plot` draw it; `trace` is for other
viewers."""
