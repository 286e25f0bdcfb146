"""Entry point of `python -m benchmarks.sandbox`."""

import sys
from functools import partial

from benchmarks.form import main
from benchmarks.sandbox import plot as picture
from benchmarks.sandbox import run

with_swerex, rest = run.arguments(sys.argv[1:])
# Without the peer there is nothing to draw.
plot = picture.draw if with_swerex else None
main("sandbox", run.__doc__ or "", partial(run.measure, with_swerex), rest, plot=plot)
