"""`flash replay`: repeat the training of a run from its recorded batches."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from flash.cli.arguments import CommandParsers, check_folder_writable, check_writable, run_directory
from flash.config.load import given, load, split_arguments
from flash.config.models import is_hub_id
from flash.errors import ConfigError
from flash.observe.rundir.rundir import write_atomically
from flash.run.fetch import hub_fault
from flash.run.models import make_fetched
from flash.run.replay import Comparison, plan, refuse_idle, replay
from flash.text import one_line

SHOWN = ("loss", "grad_norm", "entropy", "clip_fraction")
"""Metrics that are printed, each beside its value in the run."""
WIDTH = 13
"""Width of a printed column, in characters."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("replay", help="Train the recorded batches of a run again, without engines.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument(
        "config",
        nargs="*",
        metavar="KEY=VALUE",
        help="Settings that differ from those of the run, such as algorithm.objective=cispo.",
    )
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="N",
        help="Version to start from: 0, or one that has a checkpoint. Default: the oldest possible one.",
    )
    parser.add_argument(
        "--to-step", type=int, metavar="N", help="Version to stop at. Default: the newest possible one."
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="Write the metrics, and the comparisons with the run's checkpoints, to this file.",
    )
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="Write the weights as a Hugging Face model folder."
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Repeat the training, print the metrics of each step beside those of the run, and compare with its checkpoints."""
    check_writable(arguments.json)
    check_folder_writable(arguments.export)
    directory = run_directory(arguments.run_dir)
    course = plan(arguments.run_dir, arguments.from_step, arguments.to_step)
    files, overrides = split_arguments([str(directory.config), *arguments.config])
    config = load(files, overrides)
    refuse_idle(directory.config, config, given(files[1:], overrides))
    make_fetched(config)
    model = config.model.path
    fault = "" if Path(model).is_dir() else hub_fault(model) if is_hub_id(model) else f"there is no folder {model}"
    if fault:
        raise ConfigError(f"{fault}; the replay begins with that model: name it with model.path=FOLDER")
    had = {int(row["step"]): row for row in directory.read_metrics() if "step" in row}
    rows: list[dict[str, float]] = []
    comparisons: list[Comparison] = []

    def show_step(row: dict[str, float]) -> None:
        rows.append(row)
        before = had.get(int(row["step"]), {})
        cells = [cell for name in SHOWN for cell in (_figure(row.get(name)), _figure(before.get(name)))]
        _say(f"{int(row['step']):5d} " + " ".join(cells))

    def show_comparison(found: Comparison) -> None:
        comparisons.append(found)
        _say(_told(found, course.first))

    _say(f"[training steps {course.first} to {course.last - 1} again, from {course.checkpoint or config.model.path}]")
    if course.left_out:
        _say(f"[{course.left_out} left out: no batch of step {course.last} is recorded]")
    _say(" step " + " ".join(f"{name:>{WIDTH}} {'the run':>{WIDTH}}" for name in SHOWN))
    replay(
        config, course, folder=directory.batches, step=show_step, comparison=show_comparison, export=arguments.export
    )
    if arguments.json is not None:
        found = {"steps": rows, "comparisons": [msgspec.structs.asdict(one) for one in comparisons]}
        write_atomically(
            arguments.json, msgspec.json.format(msgspec.json.encode(found, enc_hook=str), indent=2) + b"\n"
        )
    return 0


def _told(found: Comparison, first: int) -> str:
    name = found.checkpoint.name
    if found.largest == 0:
        return f"version {found.version}: every weight equals the checkpoint's ({name}), bit for bit"
    return (
        f"version {found.version}: weights differ from the checkpoint's ({name}) by at most {found.largest:.2g}; "
        f"they have moved by at most {found.moved:.2g} since version {first}"
    )


def _figure(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.4g'):>{WIDTH}}"


def _say(line: str) -> None:
    sys.stdout.write(one_line(line) + "\n")
    sys.stdout.flush()
