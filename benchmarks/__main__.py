"""Runs benchmarks by name, all of them by default: `python -m benchmarks [NAME …] [--quick] [OPTIONS of one]`.

Full runs write their rows to benchmarks/results/, unless `--json` or an option of its own is given. `--list` explains
each benchmark in one line, with the age of its rows: the day and commit that recorded them, and the number of later
commits that changed the code that they measure. `python -m benchmarks NAME --help` shows the options of one.

To add a benchmark, write a function from `benchmarks.form.Args` to rows (`benchmarks.form.Row`), and give a row a goal
if the number has one. Put it into the module of its kind, and into the table that this module passes to
`benchmarks.form.main_of`; in a module of its own it calls `benchmarks.form.main`. Then add it to `BENCHMARKS` here. It
must have a quick form of a minute or two, which writes nothing to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

import msgspec

from benchmarks.form import COMMAND_TIMEOUT_S, RESULTS, ROOT, Recorded

EVERYTHING = ("flash", "algorithms", "envs")
"""Folders whose code a run of `flash train` uses."""
SIMULATED = ("flash/hub", "flash/samples", "flash/rollout", "flash/simulate")
"""Folders whose code a simulated run uses."""


class Benchmark(NamedTuple):
    """A benchmark that `python -m benchmarks` can run."""

    about: str
    """The thing that is measured, in one line."""
    module: str
    """Module below `benchmarks`. In a module with several benchmarks, the name follows as an argument."""
    measured: tuple[str, ...] = EVERYTHING
    """Folders whose code is measured."""


FIGURES, RUNS, ENGINE = "simulated.figures", "real.runs", "real.engine_cost"
"""Modules with several benchmarks."""
BENCHMARKS = {
    "async_ratio": Benchmark("simulated throughput and age of tokens by async ratio, on 40 GPUs", FIGURES, SIMULATED),
    "end_to_end": Benchmark("simulated speed-up of ROLL Flash's techniques, one after the other", FIGURES, SIMULATED),
    "env_async": Benchmark("simulated environments on their own, against lock-step", FIGURES, SIMULATED),
    "gpu_split": Benchmark("simulated throughput by the division of 40 GPUs", FIGURES, SIMULATED),
    "length_bias": Benchmark("simulated lengths of trained samples, by `rollout.fifo_window`", FIGURES, SIMULATED),
    "prompt_replication": Benchmark("simulated requests of one answer, against one per prompt", FIGURES, SIMULATED),
    "queue_scheduling": Benchmark("simulated queue scheduling, against whole batches", FIGURES, SIMULATED),
    "redundant_envs": Benchmark("simulated redundant environments, some of which fail", FIGURES, SIMULATED),
    "scaling": Benchmark("simulated throughput from 16 to 128 GPUs", FIGURES, SIMULATED),
    "stream_split": Benchmark("simulated gain of streamed steps, at the best split of the GPUs", FIGURES, SIMULATED),
    "mutations": Benchmark("simulated runs until a mistake in the code is found", "simulated.mutations", SIMULATED),
    "published": Benchmark("predictions of tables that others have published", "simulated.published", SIMULATED),
    "chaos": Benchmark("losses and speed on three hosts with a fault every 20 s", "real.chaos"),
    "model_service": Benchmark("time that the endpoint adds to calls of 500 agents", "real.model_service"),
    "async_vs_sync": Benchmark("asynchronous and streamed over synchronous training, equal halves", RUNS),
    "calibration": Benchmark("error of simulated step times, after `flash calibrate`", RUNS),
    "real_agentic": Benchmark("asynchronous over synchronous training, in slow environments", RUNS),
    "real_rlvr": Benchmark("asynchronous over synchronous training, on long-tailed answers", RUNS),
    "real_textworld": Benchmark("asynchronous and redundant over lock-step training, in TextWorld", RUNS),
    "engine_efficiency": Benchmark("throughput of the whole rollout path over bare vLLM", ENGINE),
    "sample_cost": Benchmark("processor time of a short sample, by process", ENGINE),
    "offpolicy": Benchmark(
        "accuracy of objectives by the age of their data", "offpolicy.run", ("flash/trainer", "algorithms")
    ),
    "sandbox": Benchmark(
        "time of commands in sandboxes and of starts, against swe-rex", "sandbox.run", ("envs/sandbox",)
    ),
    "versus_trl": Benchmark("time to equal accuracy, against TRL's GRPOTrainer", "versus_trl.run"),
}
"""All benchmarks, by their names."""


def main() -> int:
    """Run the named benchmarks, one after the other, or print help or the list. Returns the exit code of the process.

    It is 1 if a benchmark failed, and 128 plus the number of the signal that ended one. A wrong argument exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0], add_help=False, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--quick", action="store_true", help="smaller versions, whose rows are not kept")
    parser.add_argument("--list", action="store_true", help="explain each benchmark in one line")
    parser.add_argument("-h", "--help", action="store_true", help="show this help, or that of the named benchmark")
    args, own = parser.parse_known_args()
    if args.help and not args.names:
        parser.print_help()
        return 0
    if args.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:18s} {benchmark.about:68s} {recorded(name)}")
        return 0
    if unknown := [name for name in args.names if name not in BENCHMARKS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    own += ["--help"] if args.help else []
    if own and len(args.names) != 1:
        parser.error(f"{' '.join(own)}: options of a benchmark need the name of one benchmark")
    benchmarks = Benchmarks()
    failed = [name for name in args.names or BENCHMARKS if not benchmarks.run(name, own, quick=args.quick)]
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
    folders = [f"{folder}/*.py" for folder in BENCHMARKS[name].measured]
    words = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *folders]
    counted = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    return f"{found.day}, {commit}, {counted.stdout.strip() or 'an unknown number of'} commits since"


def command(name: str) -> list[str]:
    """Return the command that starts a benchmark."""
    module = BENCHMARKS[name].module
    several = [name] if module in (FIGURES, RUNS, ENGINE) else []
    return [sys.executable, "-m", f"benchmarks.{module}", *several]


class Benchmarks:
    """Runs benchmarks as processes. SIGINT or SIGTERM ends the running one, and no other is started after it."""

    def __init__(self) -> None:
        self.signal = 0
        """Signal that ended the benchmarks; 0 if none did."""
        self._process: subprocess.Popen[bytes] | None = None
        """Process of the last benchmark that was started."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def run(self, name: str, own: Sequence[str], *, quick: bool) -> bool:
        """Run the benchmark `name` to its end, with options of its own. Returns True if it succeeds.

        The rows of a full run without options of its own are kept in `RESULTS`. After a signal, nothing is started, and
        the result is False.
        """
        if self.signal:
            return False
        options = ["--quick"] if quick else [] if own else ["--json", str(RESULTS / f"{name}.json")]
        print(f"\n=== {name}", flush=True)
        # In its own process group, so that a terminal's Ctrl-C does not interrupt the clean-up.
        self._process = subprocess.Popen([*command(name), *options, *own], cwd=ROOT, process_group=0)
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
