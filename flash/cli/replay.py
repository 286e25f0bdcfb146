"""Commands that train recorded steps again: replay, and bundle, which writes such steps into one file.

Each command has a function `add_COMMAND`, which adds its parser, and a function `run_COMMAND`, which carries it out and
returns the exit code. `flash.cli.main.COMMANDS` lists the functions `add_COMMAND`.

A *version* is the weights after a number of steps: step N trains version N into version N + 1. A *bundle* is a file of
recorded batches with all that their replay needs. `flash bundle` replays a bundle once when it writes it. The bundle
also has the metrics of that replay and of the run. A replay runs on one rank, on the CPU if there is no GPU. Results
are equal bit for bit only on the same build: the same processor, device and versions of packages.

The commands raise a FlashError for wrong arguments, damaged recordings and models that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from flash.cli.arguments import CommandParsers, check_folder_writable, check_writable, run_directory
from flash.config.load import given, load, load_recorded, split_arguments
from flash.config.models import is_hub_id
from flash.config.objects import import_from
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.observe.rundir.rundir import write_atomically
from flash.run.bundle import (
    BATCHES,
    CODE,
    CONFIG,
    CRITIC,
    HEAD,
    METRICS,
    MODEL,
    REFERENCE,
    STATE,
    SUMS,
    TEACHER,
    Bundle,
    MetricRow,
    build_of,
    metric_row,
    on_this_machine,
    open_bundle,
    runs_foreign_code,
)
from flash.run.bundling import make_bundle, own_sources
from flash.run.models import hugging_face_fault, make_fetched
from flash.run.replay import Comparison, ReplayPlan, plan, plan_step, refuse_idle, replay
from flash.text import one_line

REPLAY_METRICS = ("loss", "grad_norm", "entropy", "clip_fraction")
"""Metrics that `flash replay` prints for each step, each beside its value in the run."""
REPLAY_WIDTH = 13
"""Width of a column that `flash replay` prints, in characters."""
SHOWN_DIFFERENCES = 8
"""Largest number of different metrics that are printed for a bundle. `--json` writes all of them."""
PARTS = {
    f"{MODEL}/": "the policy before the first step",
    STATE: "moments, random states and other tensors of the trainer",
    f"{BATCHES}/": "samples, rewards and log-probs, as recorded",
    f"{CRITIC}/": "the model that the critics began with",
    f"{REFERENCE}/": "the reference of the KL",
    f"{TEACHER}/": "the teacher",
    f"{CODE}/": "your own modules of the objective",
    HEAD: "versions and fingerprints",
    CONFIG: "the settings that a replay uses",
    METRICS: "the metrics of the run",
    SUMS: "checksums",
}
"""Description of each part of a bundle, in the order in which sizes are printed."""


def add_bundle(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash bundle` to `commands`, and return it."""
    parser = commands.add_parser("bundle", help="Write a step of a run into one file that replays on any machine.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument(
        "--step",
        type=int,
        required=True,
        metavar="N",
        help="Step to bundle (required), with the steps between the newest checkpoint before it and this one.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="File to write. Default: NAME-step-N.flash, with the run's name.",
    )
    parser.add_argument(
        "--without-weights",
        action="store_true",
        help="Leave out the policy's weights and write their fingerprints instead. Moments and other models stay.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="Model that the run began with. Default: the run's model.path."
    )
    parser.set_defaults(run=run_bundle)
    return parser


def run_bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle of a step, for `flash bundle`. Prints the comparison with the run, and the size of each part."""
    directory = run_directory(arguments.run_dir)
    planned = plan_step(arguments.run_dir, arguments.step)
    overrides = [] if arguments.model is None else [f"model.path={json.dumps(str(arguments.model))}"]
    config = load_recorded([directory.config], overrides, checked=False)
    output: Path = arguments.output or Path(f"{config.run.name}-step-{arguments.step}.flash")
    check_writable(output)
    import_from(map(os.path.abspath, config.env.folders))
    before = set(sys.modules)
    # This checks the configuration, which imports the objective, and modules that it uses: the code of the bundle.
    config = load_recorded([directory.config], overrides)
    code = own_sources(config.algorithm.objective, set(sys.modules) - before)
    make_fetched(config)
    _check_model(config, "the bundle begins with that model: name it with --model FOLDER")
    if planned.first < arguments.step:
        _print_line(
            f"[version {arguments.step} has no checkpoint: the bundle begins at version {planned.first}, with the "
            f"batches of steps {planned.first} to {arguments.step}]"
        )
    _print_device(config)
    _print_line("[writing the parts, and training them again to see that they suffice]")
    rows = [metric_row(row) for row in directory.read_metrics()]
    output_of = _Output(rows, planned.first)
    parts = make_bundle(
        directory,
        config,
        planned,
        output,
        with_weights=not arguments.without_weights,
        code=code,
        on_step=output_of.show_step,
        on_comparison=output_of.show_comparison,
    )
    if planned.last not in planned.compared:
        _print_line(f"[the run has no checkpoint of version {planned.last}: only metrics are compared with it]")
    _print_differences(_differences(output_of.rows, rows), "the run's")
    sizes = {part.name: part.size for part in parts}
    _print_line(f"{output}: {output.stat().st_size:,} bytes")
    width = max(len(f"{size:,}") for size in sizes.values())
    for name in sorted(sizes, key=list(PARTS).index):
        without = ", without weights" if name == f"{MODEL}/" and arguments.without_weights else ""
        _print_line(f"  {sizes[name]:>{width},}  {name:<18} {PARTS[name]}{without}")
    for name in code:
        _print_line(f"[{name} is source code of yours: `flash replay` runs it if --trust is given]")
    return 0


def add_replay(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash replay` to `commands`, and return it."""
    parser = commands.add_parser("replay", help="Train the recorded batches of a run again, without engines.")
    parser.add_argument(
        "source", type=Path, metavar="RUN_DIR|BUNDLE", help="Folder of the run, or a file of `flash bundle`."
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG|KEY=VALUE",
        help="Configuration files and settings that differ from those of the run, such as algorithm.objective=cispo.",
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
        "--model", type=Path, metavar="FOLDER", help="Weights for a bundle that was made with --without-weights."
    )
    parser.add_argument(
        "--trust", action="store_true", help="Run the code of an objective that a bundle names or holds."
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="Write the metrics, and the comparisons with the run's weights, to this file.",
    )
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="Write the weights as a Hugging Face model folder."
    )
    parser.set_defaults(run=run_replay)
    return parser


def run_replay(arguments: argparse.Namespace) -> int:
    """Train recorded batches again, for `flash replay`.

    Prints the metrics of each step beside those of the run, and how far the weights differ from those of the run.
    Returns 1 if results of a bundle differ that should be equal bit for bit, as `_replay_bundle` describes. It is 0 for
    a run directory, because the build that trained the run is unknown.
    """
    check_writable(arguments.json)
    check_folder_writable(arguments.export)
    if arguments.source.is_file():
        if arguments.from_step is not None or arguments.to_step is not None:
            raise ConfigError("--from-step, --to-step: a bundle is replayed as a whole; leave them out")
        with open_bundle(arguments.source, arguments.model) as bundle:
            return _replay_bundle(arguments, bundle)
    if arguments.model is not None or arguments.trust:
        raise ConfigError(
            "--model, --trust: expected a bundle with them; the model of a run's folder is named with model.path=FOLDER"
        )
    directory = run_directory(arguments.source)
    planned = plan(arguments.source, arguments.from_step, arguments.to_step)
    files, overrides = split_arguments([str(directory.config), *arguments.config])
    # The run is the user's own, so its modules may be imported. A bundle may be another person's (`_replay_bundle`).
    config = load(files, overrides)
    refuse_idle(directory.config, config, given(files[1:], overrides))  # without the keys of the run's own file
    make_fetched(config)
    _check_model(config, "the replay begins with that model: name it with model.path=FOLDER")
    _print_line(
        f"[training {_steps(planned.first, planned.last - 1)} again, from {planned.checkpoint or config.model.path}]"
    )
    if planned.left_out:
        _print_line(f"[{planned.left_out} left out: no batch of step {planned.last} is recorded]")
    output = _Output([metric_row(row) for row in directory.read_metrics()], planned.first)
    _replay(arguments, config, planned, directory.batches, output)
    _write_json(arguments.json, output)
    return 0


def _replay_bundle(arguments: argparse.Namespace, bundle: Bundle) -> int:
    """Train the steps of an open bundle again, and print the comparison with the run and with the bundle's maker.

    Returns 1 if a value differs, and neither other settings nor rounding explain that. Rounding explains a difference
    on another build or on a GPU. It also explains a difference from the run if several ranks or a GPU trained the run.
    """
    head, planned = bundle.head, bundle.planned
    files, overrides = split_arguments([str(bundle.config), *arguments.config])
    named = given(files[1:], overrides)  # keys of the user, without those of the bundle's own file
    if "model.path" in named:
        raise ConfigError(
            "model.path: expected the bundle's model; --model names a folder for a bundle without weights"
        )
    # The checks import the objective, so the user must trust the bundle before. An objective that the user has named in
    # its place is the user's own code.
    config = load_recorded(files, overrides, checked=False)
    if config.algorithm.objective == bundle.objective and runs_foreign_code(bundle.objective):
        _admit_code(arguments, bundle)
    config = load_recorded(files, overrides)
    refuse_idle(bundle.config, config, named)
    _print_line(
        f"[step {head.step} of the run {head.run}: training {_steps(head.first, head.step)} again, from version "
        f"{head.first}]"
    )
    _print_device(config)
    one_cpu_rank = head.ranks == 1 and config.gpus_per_node == 0
    config = on_this_machine(config)
    if head.ranks > 1:
        _print_line(
            f"[the run trained on {head.ranks} ranks, a replay on one: sums have another order, so that results differ "
            "from the run's by rounding]"
        )
    here = build_of(config)
    for name in sorted(here.keys() | head.build.keys()):
        if here.get(name) != head.build.get(name):
            _print_line(f"[{name}: {head.build.get(name, 'none')} made the bundle, {here.get(name, 'none')} is here]")
    output = _Output(bundle.rows, planned.first)
    _replay(arguments, config, planned, bundle.batches, output)
    if len(head.results) == 1:
        _print_line(f"[the run has kept no weights of version {planned.last}: only metrics are compared with it]")
    differences = {
        "the run's": _differences(output.rows, bundle.rows),
        "those of the replay that made the bundle": _differences(output.rows, head.replayed),
    }
    for origin, found in differences.items():
        _print_differences(found, origin)
    _write_json(arguments.json, output, differences)
    if named or here != head.build or config.gpus_per_node > 0:
        return 0
    # The last result is that of the replay that made the bundle. A result of the run may come before it, which must be
    # equal only if one CPU rank has trained the run.
    first = 0 if one_cpu_rank else -1
    different = [comparison.different for comparison in output.comparisons[first:]]
    different += [len(one.found) for one in list(differences.values())[first:]]
    return int(any(different))


def _admit_code(arguments: argparse.Namespace, bundle: Bundle) -> None:
    """Add the code of a bundle to the import path if the user trusts it (`--trust`). Prints a line about it.

    Raises:
        ConfigError: the user has not said so.
    """
    held = ", ".join(bundle.code) or "a module that is installed here"
    if not arguments.trust:
        look = f"read it with `tar -xOf {arguments.source} {CODE}`, and " if bundle.code else ""
        raise ConfigError(
            f"{arguments.source} would run code: its objective {one_line(bundle.objective)}, from {held}; {look}"
            "repeat the command with --trust if you trust it"
        )
    _print_line(f"[running code of the bundle: {bundle.objective}, from {held}]")
    # In front of all other folders: a module of the same name here may be another version.
    sys.path.insert(0, str(bundle.folder / CODE))


class Difference(NamedTuple):
    """Metric of a step that differs between two trainings of it."""

    step: int
    """Number of the step."""
    metric: str
    """Name of the metric."""
    here: float | None
    """Value of the present replay; None if it is not finite."""
    there: float | None
    """Value of the other training; None if it is not finite."""

    @property
    def relative(self) -> float:
        """Difference in relation to the larger value; infinite if only one of the two is finite."""
        if self.here is None or self.there is None:
            return float("inf")
        return abs(self.here - self.there) / max(abs(self.here), abs(self.there))


class _Differences(NamedTuple):
    """Metrics of the same steps that were compared."""

    compared: int
    """Number of values that both trainings have."""
    found: list[Difference]
    """Values that differ, the largest relative difference first."""


def _differences(ours: Sequence[Mapping[str, float | None]], theirs: Sequence[MetricRow]) -> _Differences:
    """Compare each metric that two lists of rows have for the same step.

    A row has the metrics of one step, by name; `step` is its number. `ours`: rows of the present replay; `theirs`: rows
    of the other training. Metrics and steps that only one side has are left out.
    """
    others = {row.get("step"): row for row in theirs}
    compared, found = 0, list[Difference]()
    for row in map(metric_row, ours):
        other = others.get(row["step"], {})
        for name in sorted(row.keys() & other.keys() - {"step"}):
            compared += 1
            if row[name] != other[name]:
                found.append(Difference(int(row["step"] or 0), name, row[name], other[name]))
    return _Differences(compared, sorted(found, key=lambda one: -one.relative))


def _print_differences(differences: _Differences, origin: str) -> None:
    """Print the metrics that differ, the largest differences first, at most SHOWN_DIFFERENCES of them. `origin`: the
    other metrics, as a possessive, such as `the run's`."""
    compared, found = differences
    if not compared:
        _print_line(f"metrics: none of {origin} can be compared")
    elif not found:
        _print_line(f"metrics: all {compared} equal {origin}, bit for bit")
    else:
        _print_line(f"metrics: {len(found)} of {compared} differ from {origin}; the largest relative differences:")
        for one in found[:SHOWN_DIFFERENCES]:
            here, there = ("not finite" if value is None else f"{value:.9g}" for value in (one.here, one.there))
            _print_line(f"  step {one.step}  {one.metric:<24} {here:>16} {there:>16}  {one.relative:.1e}")


class _Output:
    """Printed lines of a replay, and the results that they show. `replay` and `make_bundle` call the methods.

    Args:
        run_rows: metrics of the run, a row for each step.
        first: version with which the replay begins.
    """

    def __init__(self, run_rows: Sequence[MetricRow], first: int) -> None:
        self._run_rows = {row.get("step"): row for row in run_rows}
        self._first = first
        self.rows: list[dict[str, float]] = []
        """Metrics of the replayed steps."""
        self.comparisons: list[Comparison] = []
        """Comparisons of the replayed weights."""

    def show_step(self, row: dict[str, float]) -> None:
        """Keep the metrics of a step, `row`, and print REPLAY_METRICS, each beside its value in the run. The first call
        prints the header of the table."""
        if not self.rows:
            names = " ".join(f"{name:>{REPLAY_WIDTH}} {'the run':>{REPLAY_WIDTH}}" for name in REPLAY_METRICS)
            _print_line(f" step {names}")
        self.rows.append(row)
        before = self._run_rows.get(row["step"], {})
        cells = [cell for name in REPLAY_METRICS for cell in (_figure(row.get(name)), _figure(before.get(name)))]
        _print_line(f"{int(row['step']):5d} " + " ".join(cells))

    def show_comparison(self, found: Comparison) -> None:
        """Keep a comparison, and print the difference of the replayed weights to other weights of the same version."""
        self.comparisons.append(found)
        name = f"version {found.version}"
        which = f"{found.different} of {found.tensors} tensors differ"
        if found.different == 0:
            _print_line(f"{name}: every weight equals {found.origin}, bit for bit")
        elif found.largest is not None:  # else only checksums of the other weights are known
            _print_line(
                f"{name}: weights differ from {found.origin} by at most {found.largest:.2g}; they have moved by at "
                f"most {found.moved:.2g} since version {self._first}; {which}, the first is {found.first}"
            )
        else:
            _print_line(
                f"{name}: {which} from {found.origin}, the first is {found.first}; the lengths of their changes since "
                f"version {self._first} differ by at most {found.apart:.1e} of their value"
            )


def _replay(arguments: argparse.Namespace, config: Config, planned: ReplayPlan, batches: Path, output: _Output) -> None:
    """Train the planned steps, print the results, and export the weights if `--export` names a folder. `batches`:
    folder of the recorded batches."""
    replay(
        config,
        planned,
        folder=batches,
        on_step=output.show_step,
        on_comparison=output.show_comparison,
        export=arguments.export,
    )


def _write_json(file: Path | None, output: _Output, differences: Mapping[str, _Differences] | None = None) -> None:
    """Write the results to the file of `--json`; None: write nothing.

    `steps` has the metrics of each step, and `comparisons` those of weights. For a bundle, `metrics` has the
    differences of the metrics, given as `differences` by the phrase for their origin.
    """
    if file is None:
        return
    found: dict[str, Any] = {
        "steps": output.rows,
        "comparisons": [msgspec.structs.asdict(one) for one in output.comparisons],
    }
    if differences is not None:
        found["metrics"] = [
            {"origin": origin, "compared": one.compared, "different": [each._asdict() for each in one.found]}
            for origin, one in differences.items()
        ]
    write_atomically(file, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def _check_model(config: Config, cure: str) -> None:
    """Raise ConfigError, with the advice `cure`, if the model of a run is neither here nor on the Hugging Face hub."""
    model = config.model.path
    if Path(model).is_dir():
        return
    if fault := hugging_face_fault(model) if is_hub_id(model) else f"there is no folder {model}":
        raise ConfigError(f"{fault}; {cure}")


def _print_device(config: Config) -> None:
    """Print a line if the run had GPUs and the replay has none."""
    if on_this_machine(config) is not config:  # it returns another configuration only in that case
        _print_line("[the run trained on GPUs, and there is none here: on the CPU results differ by rounding]")


def _steps(first: int, last: int) -> str:
    """Return steps as text, such as `step 2` or `steps 2 to 5`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _figure(value: float | None) -> str:
    """Return a metric as a cell of the table; a dash if it is missing."""
    return f"{'-' if value is None else format(value, '.4g'):>{REPLAY_WIDTH}}"


def _print_line(line: str) -> None:
    """Print a line at once, because a step takes long, and the user watches the lines."""
    sys.stdout.write(one_line(line) + "\n")
    sys.stdout.flush()
