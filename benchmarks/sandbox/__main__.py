"""Entry point of `python -m benchmarks.sandbox`."""

import sys
from functools import partial

from benchmarks.form import main
from benchmarks.sandbox import plot as picture
from benchmarks.sandbox import run

cases, with_swerex, rest = run.arguments(sys.argv[1:])
# A part of the figures makes no picture.
plot = picture.draw if {*run.WITH_SWEREX} <= {*cases} and with_swerex else None
main("sandbox", run.__doc__ or "", partial(run.measure, cases, with_swerex), rest, plot=plot)
