"""Form of all benchmarks: `python -m benchmarks NAME [--quick] [--json FILE] [--plot FILE] [options of its own]`.

A benchmark is a function from Args to rows. Its module calls `main`, or `main_of` if it has several benchmarks. `main`
parses the arguments, runs the function, prints a description of the machine and the rows as a table, and writes the
rows as JSON. It draws them if the benchmark has a plot; a full run draws to docs/images/figures/<name>.png by default.
The other functions are for the benchmarks: running commands, and Python environments of other systems.
"""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
"""Root of the repository."""
WORKLOADS = ROOT / "benchmarks" / "workloads"
"""Folder of the configurations that are measured."""
RESULTS = ROOT / "benchmarks" / "results"
"""Folder of the recorded rows."""
FIGURES = ROOT / "docs" / "images" / "figures"
"""Folder of the pictures of full runs."""
SOFTWARE = ("torch", "vllm", "transformers", "triton")
"""Packages whose versions are recorded with the rows (`version_of`)."""
COMMAND_TIMEOUT_S = 10
"""Longest wait for git and nvidia-smi, which only describe the machine."""
PIP_INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
"""Arguments with which a Python installs packages."""
INSTALL_TIMEOUT_S = 1800
"""Longest wait for pip."""
ENDING_S = 120
"""Longest wait for a command after SIGTERM: a run writes a checkpoint, under a deadline of its own."""


class Row(msgspec.Struct, frozen=True):
    """One measured figure, with the figures that it is compared with. A row has at most one goal."""

    case: str
    """Conditions under which it was measured."""
    metric: str
    """`speedup` is baseline ÷ ours, `efficiency` a share of a limit; other names end in their unit."""
    unit: str
    """Unit for people, such as `s` or `share`."""
    ours: float
    """Figure of Flash."""
    reference: float | None = None
    """Figure of a paper or of another system."""
    at_least: float | None = None
    """Goal of a metric that is better when higher; None if it has no such goal."""
    at_most: float | None = None
    """Goal of a metric that is better when lower; None if it has no such goal."""
    peer: float | None = None
    """Figure of a peer's rules in the same simulation."""
    bound: float | None = None
    """Limit of every schedule in the same simulation."""

    @property
    def met(self) -> bool | None:
        """True if the goal is reached; None without a goal. NaN reaches no goal."""
        if self.at_least is not None:
            return self.ours >= self.at_least
        return None if self.at_most is None else self.ours <= self.at_most


class Recorded(msgspec.Struct, frozen=True):
    """Content of a file of `benchmarks/results`."""

    day: str
    """Day of the measurement, as YYYY-MM-DD."""
    machine: dict[str, str]
    """Machine, software and commit, by the titles of `machine`. Files of other machines may have the commit alone."""
    rows: list[Row]


class Args(msgspec.Struct, frozen=True):
    """Options from the command line of a benchmark."""

    quick: bool
    """True for a smaller version, which takes a minute or two."""
    own: argparse.Namespace = msgspec.field(default_factory=argparse.Namespace)
    """All options, among them those that only this benchmark has."""


Run = Callable[[Args], list[Row]]
"""A benchmark."""
Plot = Callable[[Sequence[Row], Path], None]
"""Draws the rows of a benchmark to a file."""


def main_of(benchmarks: Mapping[str, tuple[Run, Plot | None]], argv: Sequence[str] | None = None) -> list[Row]:
    """Run the benchmark that the first argument names, as `main` does. Its docstring is its description.

    `benchmarks` are those of a module, by name. `argv` are the arguments; None: those of the command line.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in benchmarks:
        raise SystemExit(f"expected the name of a benchmark as the first argument: {', '.join(benchmarks)}")
    run, plot = benchmarks[name]
    return main(name, inspect.getdoc(run) or "", run, rest, plot=plot)


def main(
    name: str,
    description: str,
    run: Run,
    argv: Sequence[str] | None = None,
    *,
    plot: Plot | None = None,
    add_options: Callable[[argparse.ArgumentParser], object] | None = None,
) -> list[Row]:
    """Run a benchmark, print its rows, write and draw them as the arguments say, and return them.

    Args:
        name: name of the benchmark, a key of `benchmarks.__main__.BENCHMARKS` or `gpu`. Its plot's file has this name.
        description: text for `--help` and above the table.
        run: the benchmark.
        argv: arguments; None: those of the command line.
        plot: draws rows to a file; None if the benchmark has no plot.
        add_options: adds options that only this benchmark has to a parser, for `Args.own`; None if it has none.

    Arguments that are wrong end the process with exit code 2, before anything is measured.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a smaller version, within a minute or two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    if plot is not None:
        parser.add_argument(
            "--plot", type=Path, metavar="FILE", help="draw the rows to FILE; full runs: docs/images/figures"
        )
    if add_options is not None:
        add_options(parser)
    args = parser.parse_args(argv)
    picture: Path | None = None
    if plot is not None:
        picture = args.plot or (None if args.quick else FIGURES / f"{name}.png")
    for option, file in (("--json", args.json), ("--plot", picture)):
        if file is not None and not file.parent.is_dir():
            parser.error(f"{option}: the folder {file.parent} does not exist")
    print(f"{name}: {description.strip()}\n")
    for title, text in machine():
        print(f"  {title:<8} {text}")
    print(flush=True)
    # `python -m benchmarks` ends a benchmark with SIGTERM. As after Ctrl-C, it then ends all that it has started.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        rows = run(Args(quick=args.quick, own=args))
    finally:
        signal.signal(signal.SIGTERM, before)
    print_table(rows)
    if args.json is not None:
        recorded = Recorded(day=time.strftime("%Y-%m-%d"), machine=dict(machine()), rows=rows)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=2) + b"\n")
        print(f"\nwritten to {args.json}")
    if plot is not None and picture is not None:
        plot(rows, picture)
        print(f"drawn to {picture}")
    return rows


def run_command(
    words: Sequence[str | Path],
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    ending_s: float = ENDING_S,
) -> None:
    """Run a command to its end. `variables` are all its environment variables; None: those of this process.

    If the wait is interrupted, for example by Ctrl-C, or lasts too long, the command gets SIGTERM. If it has not ended
    `ending_s` later, it is killed with its children. Then the interrupt or error is raised. Tests replace `ending_s`.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took more than `timeout_s` seconds.
    """
    # The command gets its own process group, which Ctrl-C in a terminal does not reach. Otherwise it would get SIGINT
    # from the terminal and SIGTERM from here.
    with subprocess.Popen(words, env=variables, process_group=0) as process:
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ending_s)
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    if code != 0:
        raise subprocess.CalledProcessError(code, words)


def make_python(folder: Path, requirements: Sequence[str], prepare: Callable[[Path], object] | None = None) -> Path:
    """Return the Python of another system's environment in `folder`; make the environment first, unless it exists.

    An environment with other requirements or of another Python is made again. `prepare` gets the Python of a new
    environment, and may install packages before the requirements.

    Raises:
        subprocess.CalledProcessError: pip could not install them; its output was shown.
    """
    # This file is written last, so an environment without it is not finished.
    executable, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join((*requirements, platform.python_version())) + "\n"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {folder} (once): {requirements[0]}, …", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        if prepare is not None:
            prepare(executable)
        run_command([executable, *PIP_INSTALL, *requirements], INSTALL_TIMEOUT_S)
        stamp.write_text(wanted)
    return executable


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows in aligned columns; the last column says if the goal was met."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("case", "metric", "unit"):
        table.add_column(title, no_wrap=True)
    # Only simulations have these columns.
    simulated = [name for name in ("peer", "bound") if any(getattr(row, name) is not None for row in rows)]
    for title in ("ours", "reference", *simulated, "goal"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        goal = "-" if row.at_most is None else f"<= {_figure(row.at_most)}"
        goal = goal if row.at_least is None else f">= {_figure(row.at_least)}"
        verdict = {None: Text(""), True: Text("met", "green"), False: Text("missed", "red")}[row.met]
        figures = [_figure(getattr(row, name)) for name in ("ours", "reference", *simulated)]
        table.add_row(*map(Text, (row.case, row.metric, row.unit, *figures, goal)), verdict)
    # A log file has no width: nothing may be cut there.
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table, crop=False)


def machine() -> list[tuple[str, str]]:
    """Describe the machine, the software and the commit, as (title, text) lines."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about_cpus = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", about_cpus.read_text()) if about_cpus.exists() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = platform.platform()
    lines = [
        ("cpu", f"{named[1] if named else platform.machine()}, {cores} of {os.cpu_count()} cores usable"),
        ("memory", f"{memory / 2**30:.1f} GiB"),
        ("system", f"{system}, Python {platform.python_version()}"),
        ("software", ", ".join(f"{name} {version_of(name)}" for name in SOFTWARE)),
    ]
    if commit := output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"):
        # The rows and pictures of other benchmarks change nothing that is measured.
        results = (":!benchmarks/results", ":!docs/images")
        changed = output_of("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", *results)
        lines.append(("commit", f"{commit} with local changes" if changed else commit))
    gpus = output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()
    lines.append(("gpus", "; ".join(gpus) or "none"))
    return lines


def version_of(package: str) -> str:
    """Return the version of an installed package, or of its build for CPUs (`-cpu`); `-` if neither is installed."""
    for name in (package, f"{package}-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "-"


def _figure(value: float | None) -> str:
    """Format a figure with four significant digits, without an exponent where that stays readable. None becomes `-`."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"


def output_of(*command: str) -> str:
    """Return the output of a command; an empty text if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        # Names of files in the output of git may be no UTF-8.
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return ""
    return done.stdout.strip()
