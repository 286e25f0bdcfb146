"""Runs benchmarks by name, all of them by default: `python -m benchmarks [NAME …] [--quick]`.

Full runs write their rows to benchmarks/results/. Further options belong to the commands of the benchmarks, which
`--list` shows.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from types import FrameType

from benchmarks.form import RESULTS, ROOT

SIMULATED = (
    *("async_ratio", "end_to_end", "env_async", "gpu_split", "length_bias"),
    *("prompt_replication", "queue_scheduling", "redundant_envs", "scaling"),
)
"""Benchmarks that simulate runs, which need neither vLLM nor a model."""
REAL = ("async_vs_sync", "calibration", "chaos", "engine_efficiency", "model_service", "sample_cost")
"""Benchmarks that run Flash for real."""
MODULES = {
    **{name: f"benchmarks.simulated.{name}" for name in SIMULATED},
    **{name: f"benchmarks.real.{name}" for name in REAL},
    "real_agentic": "benchmarks.real.agentic",
    "real_rlvr": "benchmarks.real.rlvr",
    "real_textworld": "benchmarks.real.textworld",
    "offpolicy": "benchmarks.offpolicy",
    "sandbox": "benchmarks.sandbox",
    "versus_trl": "benchmarks.versus_trl",
}
"""Module of each benchmark, by its name."""


def main() -> int:
    """Run the named benchmarks, one after the other; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--quick", action="store_true", help="smaller versions, whose rows are not kept")
    parser.add_argument("--list", action="store_true", help="show the names and their commands")
    args = parser.parse_args()
    if args.list:
        for name, module in MODULES.items():
            print(f"{name:20s} python -m {module}")
        return 0
    unknown = [name for name in args.names if name not in MODULES]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(MODULES)}")
    benchmarks = Benchmarks()
    failed = [name for name in args.names or MODULES if not benchmarks.run(name, quick=args.quick)]
    if benchmarks.signal:
        print(f"ended by {signal.Signals(benchmarks.signal).name}")
        return 128 + benchmarks.signal
    if failed:
        print(f"failed: {', '.join(failed)}")
        return 1
    return 0


class Benchmarks:
    """Runs benchmarks as processes. SIGINT or SIGTERM ends the running one, and no other is started after it."""

    def __init__(self) -> None:
        self.signal = 0
        """Signal that ended the benchmarks; 0 if none did."""
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heed)

    def run(self, name: str, *, quick: bool) -> bool:
        """Run a benchmark to its end; return True if it succeeds."""
        if self.signal:
            return False
        options = ["--quick"] if quick else ["--json", str(RESULTS / f"{name}.json")]
        print(f"\n=== {name}", flush=True)
        # In its own process group, so that a terminal's Ctrl-C does not interrupt the clean-up.
        self._process = subprocess.Popen([sys.executable, "-m", MODULES[name], *options], cwd=ROOT, process_group=0)
        if self.signal:
            self._process.terminate()
        return self._process.wait() == 0

    def _heed(self, number: int, frame: FrameType | None) -> None:
        """End the running benchmark with SIGTERM, and start no other. The handler of SIGINT and SIGTERM."""
        self.signal = number
        if self._process is not None:
            self._process.terminate()


if __name__ == "__main__":
    sys.exit(main())
