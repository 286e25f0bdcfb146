"""Entry point of `python -m benchmarks.versus_trl`."""

import sys
from functools import partial

from benchmarks.form import main
from benchmarks.versus_trl import run

cases, systems, seeds, rest = run.arguments(sys.argv[1:])
plot = partial(run.draw, "--quick" in rest)
main("versus_trl", run.__doc__ or "", partial(run.compare, cases, systems, seeds), rest, plot=plot)
