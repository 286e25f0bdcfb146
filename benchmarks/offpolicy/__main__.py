"""Entry point of `python -m benchmarks.offpolicy`."""

from benchmarks.form import main
from benchmarks.offpolicy import run

own, rest = run.own_options(None)
comparison = run.Comparison(own)
main("offpolicy", run.__doc__ or "", comparison.measure, rest, plot=comparison.plot)
