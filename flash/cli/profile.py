"""`flash profile`: a few steps of a run under torch's profiler, and what they come down to."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flash.cli.arguments import CommandParsers
from flash.cli.train import start
from flash.config.advice import advise
from flash.config.load import load, split_arguments
from flash.config.tree import Config
from flash.errors import ConfigError, RunDirectoryError
from flash.observe.plots.trace import trace, trace_begin
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.profile.order import ProfileOrder
from flash.profile.parts import WHOLE, Measured, WholeTrace, parts_in, read_part, whole_trace
from flash.profile.report import report
from flash.text import harmless, one_line

CLOSE_S = 60.0
"""Of an engine that ends while it records: what was recorded is written too."""
REPORT = "report.txt"


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("profile", help="run a few steps of a config under torch's profiler, for Perfetto")
    parser.add_argument("config", nargs="+", metavar="CONFIG|KEY=VALUE", help="as for train")
    parser.add_argument("--steps", type=_at_least(1), default=3, metavar="N", help="steps to record (3)")
    parser.add_argument("--warm-up", type=_at_least(0), default=2, metavar="M", help="steps before those (2)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new one; default: NAME-profile beside the run")
    parser.add_argument("--resume", action="store_true", help="record the run that there is")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {least} or more; got {text!r}")
        return int(text)

    return read


def run(arguments: argparse.Namespace) -> int:
    """Start the run with an order for its processes, then put together what they have written."""
    from flash.run.checks.preflight import left_as_it_was, start_problems

    paths, overrides = split_arguments(arguments.config)
    asked = load(paths, overrides)
    out = (arguments.out or asked.run_dir.with_name(f"{asked.run.name}-profile")).absolute()
    first_node = os.environ.get("FLASH_NODE_RANK", "0") == "0"
    if first_node:
        _refuse(out, asked.run.name)
    overrides.append(f"deadlines.close={max(CLOSE_S, asked.deadlines.close)}")
    overrides.append("run.resume=true" if arguments.resume else f"run.output_dir={json.dumps(str(out))}")
    config = load(paths, overrides, also=start_problems)
    order = _order(config, arguments.warm_up, arguments.steps, out)
    advise(config, left_as_it_was(config))
    if first_node:
        _make(out)
    order.give()
    try:
        code = start(config)
    finally:
        if first_node and not any(out.iterdir()):
            out.rmdir()
    return _show(config, order, code) if first_node else code


def _order(config: Config, warm_up: int, steps: int, out: Path) -> ProfileOrder:
    """Which steps are meant. Raises ConfigError: the run has fewer."""
    from flash.run.restart.history import booked_version

    made = booked_version(config) if config.run.resume else 0
    order = ProfileOrder(str(out), made + warm_up, made + warm_up + steps)
    if order.stop > config.run.steps:
        left = f"{config.run.steps - made} of its {config.run.steps} steps are left" if made else "the run has fewer"
        raise ConfigError(
            f"--warm-up {warm_up} and --steps {steps}: expected at most run.steps = {config.run.steps} together, and "
            f"{left}; give fewer, or a larger run.steps"
        )
    return order


def _refuse(out: Path, run: str) -> None:
    """A folder that holds anything but runs of this name that came to nothing. Raises ConfigError."""
    above = next(folder for folder in out.parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"cannot make {out}: {above} is a file; name a folder with --out FOLDER")
    if out.exists() and not (out.is_dir() and all(it.name.lstrip(".").startswith(run) for it in out.iterdir())):
        raise ConfigError(f"{out} exists: a profile makes its folder; name a new one with --out FOLDER")


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out}: {error.strerror}; name a folder with --out FOLDER") from error


def _show(config: Config, order: ProfileOrder, code: int) -> int:
    """Put the parts together and print the report of a run that has ended with this code; the exit code."""
    out = Path(order.folder)
    if not (files := parts_in(out)):
        last = order.stop - 1
        sys.stderr.write(f"flash: nothing was recorded of steps {order.first} to {last}: the run's output says why\n")
        return code or 1
    directory, whole = RunDirectory(config.run_dir), out / WHOLE
    spans, metrics = directory.read_spans(), directory.read_metrics()
    begin = trace_begin(spans, metrics)
    said = f"{whole}: open it at ui.perfetto.dev, which keeps it in the browser"
    try:
        with whole_trace(whole, begin) as made:
            measured, problems = _gather(made, files)
            for event in _meanwhile(trace(spans, metrics)["traceEvents"], measured, begin):
                made.put(event)
    except OSError as error:  # the figures are there all the same
        measured, problems = _gather(WholeTrace(len, begin), files)
        said, code = f"{whole} cannot be written: {error.strerror}; single processes have files there", code or 1
    lines = [*_told(config, order, measured), "", *report(measured, spans)]
    try:
        write_atomically(out / REPORT, "".join(f"{line}\n" for line in lines).encode())
    except RunDirectoryError as error:
        problems.append(str(error))
    for problem in problems:
        sys.stderr.write(f"flash: warning: {harmless(problem)}\n")
    sys.stdout.write("".join(f"{one_line(line)}\n" for line in ["", *lines, "", said]))
    return code or int(bool(_missing(config, measured)))


def _gather(whole: WholeTrace, files: Iterable[Path]) -> tuple[list[Measured], list[str]]:
    """What the files come down to, each also put into the trace, and what is wrong with others."""
    measured, problems = list[Measured](), list[str]()
    for file in files:
        try:
            part, facts = read_part(file)
        except ConfigError as error:
            problems.append(str(error))
        else:
            measured.append(whole.add(part, facts))
    return measured, problems


def _meanwhile(
    events: Iterable[Mapping[str, Any]], measured: Sequence[Measured], begin: float
) -> Iterator[Mapping[str, Any]]:
    """The run's timeline while something was recorded."""
    start = min((part.facts.begin for part in measured), default=begin) - begin
    stop = max((part.facts.end for part in measured), default=begin) - begin
    for event in events:
        ts, duration = event.get("ts", start * 1e6), event.get("dur", 0)
        if ts <= stop * 1e6 and ts + duration >= start * 1e6:
            yield event


def _told(config: Config, order: ProfileOrder, measured: Sequence[Measured]) -> Iterator[str]:
    """Which steps were recorded, of whom, and where the rest is."""
    ranks = [part.facts.steps for part in measured if part.facts.who.startswith("trainer")]
    made = max(ranks, default=0)
    last = order.first + made - 1
    if made:
        steps = f"step {last}" if made == 1 else f"steps {order.first} to {last}"
        yield f"{steps} of {config.run.steps} of the run in {config.run_dir}"
    if ranks and (missing := order.stop - order.first - made) > 0:
        yield f"the run ended before {missing} of the {made + missing} steps that were asked for"
    for who in _missing(config, measured):
        yield f"nothing is there of {who}: it had not started, or what was said above of it tells why"


def _missing(config: Config, measured: Iterable[Measured]) -> list[str]:
    """Who has left no file that can be read."""
    ranks = {f"trainer {rank}" for rank in range(config.trainer_world_size)}
    engines = {f"engine {number}" for number in range(sum(map(config.engines_on, range(config.cluster.nodes))))}
    return sorted((ranks | engines) - {part.facts.who for part in measured})
