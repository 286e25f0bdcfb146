"""Runs benchmarks by name, all of them by default: `python -m benchmarks [NAME …] [--quick]`.

Full runs write their rows to benchmarks/results/. Further options belong to the commands of the benchmarks, which
`--list` shows, with the age of their rows: the day and commit that recorded them, and the number of later commits that
changed the code that they measure.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from types import FrameType

import msgspec

from benchmarks.form import COMMAND_TIMEOUT_S, RESULTS, ROOT, Recorded

SIMULATED = (
    *("async_ratio", "end_to_end", "env_async", "gpu_split", "length_bias"),
    *("prompt_replication", "queue_scheduling", "redundant_envs", "scaling"),
)
"""Benchmarks that simulate runs, which need neither vLLM nor a model, in one module."""
SIMULATED_ALONE = ("mutations", "published")
"""Further benchmarks that simulate runs, each in a module of its own."""
REAL = ("chaos", "model_service")
"""Benchmarks that run Flash for real, each in a module of its own."""
RUNS = ("async_vs_sync", "calibration", "real_agentic", "real_rlvr", "real_textworld")
"""Benchmarks that compare whole runs of `flash train`."""
MODULES = {
    **{name: f"benchmarks.simulated.figures {name}" for name in SIMULATED},
    **{name: f"benchmarks.simulated.{name}" for name in SIMULATED_ALONE},
    **{name: f"benchmarks.real.{name}" for name in REAL},
    **{name: f"benchmarks.real.runs {name}" for name in RUNS},
    **{name: f"benchmarks.real.engine_cost {name}" for name in ("engine_efficiency", "sample_cost")},
    "offpolicy": "benchmarks.offpolicy.run",
    "sandbox": "benchmarks.sandbox.run",
    "versus_trl": "benchmarks.versus_trl.run",
}
"""Module of each benchmark, by its name. Where a module has several benchmarks, the name follows as an argument."""
MEASURED = {
    **dict.fromkeys(SIMULATED + SIMULATED_ALONE, ("flash/hub", "flash/samples", "flash/rollout", "flash/simulate")),
    "offpolicy": ("flash/trainer", "algorithms"),
    "sandbox": ("envs/sandbox",),
}
"""Folders whose code a benchmark measures, by its name; all of Flash, if it is not named here."""
EVERYTHING = ("flash", "algorithms", "envs")
"""Folders that a run of `flash train` uses."""


def main() -> int:
    """Run the named benchmarks, one after the other; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--quick", action="store_true", help="smaller versions, whose rows are not kept")
    parser.add_argument("--list", action="store_true", help="show the names and their commands")
    args = parser.parse_args()
    if args.list:
        for name, module in MODULES.items():
            print(f"{name:18s} python -m {module:49s} {recorded(name)}")
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


def recorded(name: str) -> str:
    """Return when the rows of a benchmark were recorded, and how often the measured code has changed since then."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return "no recorded rows"
    found = msgspec.json.decode(file.read_bytes(), type=Recorded)
    commit = found.machine.get("commit", "unknown").split()[0]
    folders = [f"{folder}/*.py" for folder in MEASURED.get(name, EVERYTHING)]
    words = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *folders]
    counted = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    return f"{found.day}, {commit}, {counted.stdout.strip() or 'an unknown number of'} commits since"


class Benchmarks:
    """Runs benchmarks as processes. SIGINT or SIGTERM ends the running one, and no other is started after it."""

    def __init__(self) -> None:
        self.signal = 0
        """Signal that ended the benchmarks; 0 if none did."""
        self._process: subprocess.Popen[bytes] | None = None
        """Process of the last benchmark that was started."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def run(self, name: str, *, quick: bool) -> bool:
        """Run the benchmark `name`, a key of MODULES, to its end. Returns True if it succeeds.

        After a signal, nothing is started, and the result is False.
        """
        if self.signal:
            return False
        options = ["--quick"] if quick else ["--json", str(RESULTS / f"{name}.json")]
        print(f"\n=== {name}", flush=True)
        # In its own process group, so that a terminal's Ctrl-C does not interrupt the clean-up.
        self._process = subprocess.Popen(
            [sys.executable, "-m", *MODULES[name].split(), *options], cwd=ROOT, process_group=0
        )
        if self.signal:  # it came during the start, before `_end` knew the process
            self._process.terminate()
        return self._process.wait() == 0

    def _end(self, number: int, frame: FrameType | None) -> None:
        """End the running benchmark with SIGTERM, and start no other. The handler of SIGINT and SIGTERM."""
        self.signal = number
        if self._process is not None:
            self._process.terminate()


if __name__ == "__main__":
    sys.exit(main())
