"""Commands that read the run directory of a run, finished or in progress.

They are view, watch, plot, compare, trace, track, export and rhythm. Each command has a function `add_COMMAND`, which
adds its parser, and a function `run_COMMAND`, which carries it out and returns the exit code. `flash.cli.main.COMMANDS`
lists the functions `add_COMMAND`. Packages that take long to import are imported when a command needs them.

A command that cannot work with its arguments or its run raises a FlashError, mostly a ConfigError. `flash.cli.main`
prints its message and exits with 2.

`flash rhythm` measures the attention of a model in responses, as training with `algorithm.rhythm` does, which gives
some tokens larger advantages. *Local* attention heads look back few tokens, *global* ones many. A *plan* is a token
where the distance that local heads look back changes most. An *anchor* is a token at which later tokens look most
(*FAI*, future attention influence).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import anyio
import msgspec

from algorithms.rhythm import Rhythm
from flash.cli.arguments import (
    OUTPUTS,
    CommandParsers,
    check_folder_writable,
    check_plot,
    check_writable,
    run_directory,
    runs_in,
)
from flash.config.load import load, read_toml
from flash.config.tree import Config, ModelConfig, TrackerName
from flash.errors import ConfigError, FlashError, advice_for_extra
from flash.observe.comparison import differences, read_run, results, table
from flash.observe.rhythm import MeasuredRhythm, coupling_lines, head_lines, response_lines
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.observe.timeline import trace
from flash.observe.trackers.trackers import Tracking, not_installed, settings, tracker_lock
from flash.run.models import Dtype, export_model, overrides_of_run, own_dtype
from flash.text import one_line
from flash.trainer.checkpoint_files import MANIFEST

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from flash.run.rhythm import RhythmResponses

VIEW_PORT = 8710
"""Default TCP port of the page of `flash view`."""
VIEW_PACKAGES = ("starlette", "uvicorn", "plotly")
"""Packages that `flash view` needs."""
WATCH_S = 1.0
"""Seconds between two updates of the screen by `flash watch`."""
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
"""Names of all trackers, for `flash track`."""
RHYTHM_SAMPLES = 8
"""Default number of recorded samples that `flash rhythm` examines."""


def add_view(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash view` to `commands`, and return it."""
    parser = commands.add_parser("view", help="Show runs in the browser, while they run and afterwards.")
    parser.add_argument(
        "run_dir",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help=f"Folders of runs. Default: all runs in {OUTPUTS}, of which the newest is shown first.",
    )
    parser.add_argument(
        "--port", type=int, default=VIEW_PORT, help=f"Port of the page. 0: any free port. Default: {VIEW_PORT}."
    )
    parser.set_defaults(run=run_view)
    return parser


def run_view(arguments: argparse.Namespace) -> int:
    """Serve a page with the runs until an interrupt, for `flash view`. Prints the address of the page.

    The page shows all runs that the user has named. If none is named, it shows the newest one first, and lists the
    others in the folder of runs.
    """
    named: list[Path] = arguments.run_dir
    paths = [run_directory(path).path for path in named] or runs_in(OUTPUTS, "view")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {arguments.port}")
    missing = [name for name in VIEW_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"flash view needs packages that are not installed, {' and '.join(missing)}: {advice_for_extra('view')}"
        )
    from flash.view.app import make_app
    from flash.view.runs import open_runs

    runs = open_runs(paths)
    shown = "; ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs"
    anyio.run(_serve_page, make_app(runs, len(runs) if named else 1), arguments.port, shown)
    return 0


async def _serve_page(app: Starlette, port: int, shown: str) -> None:
    """Serve the page until SIGINT or SIGTERM. `port`: TCP port, 0 for any free one; `shown` names the runs in the line
    with the address."""
    from flash.http.server import HttpAddress, open_socket, serving

    address = HttpAddress(port=port)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as stops:
        async with serving(app, open_socket(address), address) as url:
            sys.stdout.write(f"[showing {shown} at {url}/ - Ctrl-C ends it]\n")
            sys.stdout.flush()
            async for _ in stops:
                return


def add_watch(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash watch` to `commands`, and return it."""
    parser = commands.add_parser("watch", help="Show a run in the terminal, while it runs and afterwards.")
    parser.add_argument(
        "run_dir", nargs="?", type=Path, help=f"Folder of the run. Default: the newest run in {OUTPUTS}."
    )
    parser.add_argument("--once", action="store_true", help="Print the present state once, and exit.")
    parser.set_defaults(run=run_watch)
    return parser


def run_watch(arguments: argparse.Namespace) -> int:
    """Draw a run in the terminal every second until an interrupt, for `flash watch`; once with `--once`, or if the
    output is no terminal."""
    from rich.console import Console
    from rich.live import Live

    from flash.observe.watch import Watched

    watched = Watched(run_directory(arguments.run_dir or runs_in(OUTPUTS, "watch")[0]))
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        console.print(watched.picture(time.time(), console.width))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(watched.picture(time.time(), console.width), refresh=True)
            time.sleep(WATCH_S)


def add_plot(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash plot` to `commands`, and return it."""
    parser = commands.add_parser("plot", help="Draw the plots of a run again.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.set_defaults(run=run_plot)
    return parser


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the plots of a run again, for `flash plot`. Prints the names of the files."""
    from flash.observe.plots import write_plots

    paths = write_plots(run_directory(arguments.run_dir).path)
    if not paths:
        raise ConfigError(f"{arguments.run_dir}: there is nothing to draw yet: its run has made no step")
    for path in paths:
        sys.stdout.write(f"{path}\n")
    return 0


def add_compare(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash compare` to `commands`, and return it."""
    parser = commands.add_parser(
        "compare", help="Compare runs: their results, with intervals, and their configurations."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument(
        "other",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="Further runs, each of which is compared with the first one.",
    )
    parser.set_defaults(run=run_compare)
    return parser


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the results of several runs, and the settings in which they differ, for `flash compare`."""
    runs = [read_run(run_directory(path).path) for path in (arguments.run_dir, *arguments.other)]
    # A row of the table is a name, and a text for each run. `apart` has a row for each setting that differs.
    apart = differences(runs)
    rows = [("run", [str(run.path) for run in runs]), *results(runs)]
    rows += [("", [""] * len(runs)), ("configuration", ["" if apart else "the same"] * len(runs)), *apart]
    sys.stdout.writelines(f"{line}\n" for line in table(rows))
    return 0


def add_trace(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash trace` to `commands`, and return it."""
    parser = commands.add_parser(
        "trace", help="Write the timeline of a run as a file that ui.perfetto.dev and chrome://tracing show."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="File to write. Default: RUN_DIR/trace.json.")
    parser.set_defaults(run=run_trace)
    return parser


def run_trace(arguments: argparse.Namespace) -> int:
    """Write the timeline of a run in Chrome's Trace Event Format, which Perfetto opens, for `flash trace`. Prints the
    name of the file."""
    directory = run_directory(arguments.run_dir)
    output: Path = arguments.output or directory.path / "trace.json"
    check_writable(output)
    spans = directory.read_spans()
    if not spans:
        raise ConfigError(f"{arguments.run_dir}: there is nothing to trace yet: its spans.jsonl is empty or missing")
    write_atomically(output, msgspec.json.encode(trace(spans, directory.read_metrics())) + b"\n")
    sys.stdout.write(f"{output}: open it at ui.perfetto.dev, which keeps it in the browser, or in chrome://tracing\n")
    return 0


def add_track(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash track` to `commands`, and return it."""
    parser = commands.add_parser("track", help="Send those rows of a run to a tracker that it does not have yet.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument(
        "--to", choices=TRACKERS, help="Name of the tracker. Default: the trackers of the run's track.to."
    )
    parser.add_argument("--project", help="Project in the tracker. Default: the run's track.project.")
    parser.set_defaults(run=run_track)
    return parser


def run_track(arguments: argparse.Namespace) -> int:
    """Send the rows of a run to each tracker that does not have them yet, for `flash track`. Prints their number."""
    directory = run_directory(arguments.run_dir)
    recorded = settings(directory).get("track", {}).get("to", [])
    # An entry with a colon is the import path of a user's own tracker, which gets rows only during the run.
    names = [arguments.to] if arguments.to else [name for name in recorded if ":" not in name]
    if not names:
        raise ConfigError(
            f"{arguments.run_dir} has no tracker in track.to: name a tracker with --to ({', '.join(TRACKERS)})"
        )
    for name in names:
        sys.stdout.write(f"{name}: sent {_send_rows(directory, name, arguments.project)} rows\n")
    return 0


def _send_rows(directory: RunDirectory, name: TrackerName, project: str | None) -> int:
    """Send the rows that one tracker does not have, and return their number. `run_track` calls this for each tracker.

    Args:
        directory: the run directory, which also records the rows that the tracker has received.
        name: name of the tracker.
        project: project in the tracker; None: the run's track.project.

    Raises:
        ConfigError: the tracker is unknown, not installed or busy, or has failed.
        FlashError: any other error of Flash, such as a file of the run directory that cannot be written.
    """
    if name not in TRACKERS:  # the recorded configuration of a run of another version is not checked
        raise ConfigError(f"track.to: expected one of {', '.join(TRACKERS)}, got {name!r}")
    if (problem := not_installed(name)) is not None:
        raise ConfigError(problem)
    with tracker_lock(directory, name) as alone:
        if not alone:
            raise ConfigError(f"{name}: the run itself or another command is sending rows to it: wait until that ends")
        tracking = Tracking(directory, name)
        rows = tracking.unsent()
        try:
            if rows:
                tracking.send(project)
                tracking.close(failed=False)
        except FlashError:
            raise
        except Exception as error:  # the tracker's package may raise any error
            where = "rows that it has received are written down, and the same command sends the rest"
            raise ConfigError(f"{name} failed: {type(error).__name__}: {error}; {where}") from error
    return rows


def add_export(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash export` to `commands`, and return it."""
    parser = commands.add_parser("export", help="Write the weights of a run as a Hugging Face model folder.")
    parser.add_argument(
        "weights",
        type=Path,
        metavar="RUN_DIR|CHECKPOINT",
        help="Folder of a run, for its newest weights, or of one checkpoint.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="Folder to write. It is empty, or does not exist yet."
    )
    parser.add_argument(
        "--merge", action="store_true", help="Write the whole model of a run with [lora], not only its adapters."
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="Data type of the weights. Default: that of the model with which the run began.",
    )
    parser.set_defaults(run=run_export)
    return parser


def run_export(arguments: argparse.Namespace) -> int:
    """Write the weights of a run or of a checkpoint as a model folder, for `flash export`.

    Prints what the folder contains, and what can read it. A run with `[lora]` gives a folder of adapters, unless
    `--merge` asks for the whole model.
    """
    named: Path = arguments.weights.absolute()
    folder: Path = arguments.folder
    check_folder_writable(folder)
    # Checkpoints are folders of RUN_DIR/checkpoints.
    directory = run_directory(named.parent.parent if (named / MANIFEST).is_file() else named)
    config = load([directory.config], overrides_of_run(str(named)))
    if arguments.dtype is not None and config.lora is not None and not arguments.merge:
        raise ConfigError("--dtype has no effect on adapters, which stay in float32: expected --merge beside it")
    if arguments.merge and config.lora is None:
        raise ConfigError(
            f"--merge has no effect on {directory.path}, which was trained without [lora]: leave it out, the whole "
            "model is written anyway"
        )
    # In `config`, the exported model may have replaced the model with which the run began.
    first_model = read_toml(directory.config)["model"]["path"]
    dtype = arguments.dtype or own_dtype(first_model)
    chosen = export_model(str(named), config, folder, merged=arguments.merge, dtype=dtype)
    what, use = "the weights of", "model.path may name it, as may vLLM"
    if config.lora is not None and not arguments.merge:
        what, use = "the adapters of", f"peft loads them on {config.model.path}, as may vLLM; --merge writes the model"
    sys.stdout.write(f"{folder}: {what} {one_line(str(chosen))}, with their tokenizer; {use}\n")
    return 0


class RhythmWeights(NamedTuple):
    """Weights that `flash rhythm` examines."""

    model: ModelConfig
    """Model settings. Their path is a hub id, or a folder that exists until the command ends."""
    description: str
    """Description of the weights for the output."""


def add_rhythm(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash rhythm` to `commands`, and return it."""
    parser = commands.add_parser(
        "rhythm", help="Show which tokens of a text, or of a run's samples, algorithm.rhythm chooses, and why."
    )
    parser.add_argument("what", metavar="MODEL|RUN_DIR", help="Folder of a run; or, with --text, a model.")
    parser.add_argument("config", nargs="*", metavar="KEY=VALUE", help="Options of algorithm.rhythm, such as top=0.3.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="File with the response to examine.")
    parser.add_argument("--prompt", type=Path, metavar="FILE", help="File with the prompt of that response.")
    parser.add_argument(
        "--model", metavar="PATH", help="Weights that read the run's samples. Default: its newest ones."
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="Step whose recorded batch is examined. Default: the newest one."
    )
    parser.add_argument(
        "--samples", type=int, metavar="K", help=f"Number of samples of the batch. Default: {RHYTHM_SAMPLES}."
    )
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="Number of the response to show, counted from 0. Default: 0."
    )
    parser.add_argument(
        "--at",
        type=int,
        metavar="N",
        help="Token of that response with which the plot begins, counted from 0. Default: 0.",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="Draw the attention maps and signals of that response into this file.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all findings to this file.")
    parser.set_defaults(run=run_rhythm)
    return parser


def run_rhythm(arguments: argparse.Namespace) -> int:
    """Examine the attention of a model in responses, for `flash rhythm`.

    Prints the result, and writes the plot and the JSON file if the user has named them.
    """
    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.run.rhythm import examine_responses, overridden_options

    check_writable(arguments.plot, arguments.json)
    check_plot(arguments.plot)
    config = _rhythm_config(arguments)
    _check_rhythm(arguments, config)
    base = Rhythm() if config is None or config.algorithm.rhythm is None else config.algorithm.rhythm
    options = overridden_options(base, arguments.config)
    with _rhythm_weights(arguments, config) as weights:
        tokenizer = HfTokenizer(weights.model)
        responses = _rhythm_responses(arguments, tokenizer)
        _check_shown(arguments, responses)
        # Number of the response to draw, and number of the token with which the plot begins.
        drawn = (arguments.show, arguments.at or 0) if arguments.plot is not None else None
        measured, picture = examine_responses(
            weights.model, weights.description, responses, options, tokenizer.token_texts, drawn
        )
    if arguments.json is not None:
        write_atomically(arguments.json, msgspec.json.format(msgspec.json.encode(measured), indent=2) + b"\n")
    if arguments.plot is not None and picture is not None:
        from flash.observe.rhythm import rhythm_png

        write_atomically(arguments.plot, rhythm_png(picture))
    _print_rhythm(measured, arguments.show)
    return 0


def _rhythm_config(arguments: argparse.Namespace) -> Config | None:
    """Return the configuration of the run that the user has named for `flash rhythm`; None if it is a model.

    Raises:
        ConfigError: the run's configuration is invalid, or a model is named without a text, so there is nothing to
            examine.
    """
    directory = RunDirectory(Path(arguments.what))
    if directory.config.is_file():
        return load(directory.config, ["run.resume=false"])
    if arguments.text is None:
        raise ConfigError(
            f"{arguments.what} is no run directory, since it holds no config.toml: expected one, or a model and a text "
            "for it (--text FILE)"
        )
    return None


def _check_rhythm(arguments: argparse.Namespace, config: Config | None) -> None:
    """Raise ConfigError for options of `flash rhythm` that would have no effect here, and for less than 1 sample.

    `_check_shown` checks the options about the responses that are shown.
    """
    for override in arguments.config:
        if "=" not in override:
            raise ConfigError(f"{override!r}: expected KEY=VALUE, an option of [algorithm.rhythm]")
    if arguments.prompt is not None and arguments.text is None:
        raise ConfigError("--prompt: expected --text beside it, the response to that prompt")
    if arguments.at is not None and arguments.plot is None:
        raise ConfigError("--at: expected --plot beside it, the plot that begins with that token")
    for name in ("step", "samples"):
        if arguments.text is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} chooses samples of a run, and --text gives another response; leave out one")
    if arguments.model is not None and config is None:
        raise ConfigError(f"--model: the weights are those of {arguments.what} already; leave out one")
    if arguments.samples is not None and arguments.samples < 1:
        raise ConfigError(f"--samples: expected at least 1, got {arguments.samples}")


@contextmanager
def _rhythm_weights(arguments: argparse.Namespace, config: Config | None) -> Generator[RhythmWeights]:
    """Yield the weights to examine. A checkpoint is written to a model folder that exists while the block runs.

    `config` is the configuration of the run; None if the user has named a model.

    Raises:
        ConfigError: there is no such model, or a checkpoint is named without its run.
        CheckpointError: the checkpoint cannot be read.
    """
    from flash.run.models import chosen_model, model_folder
    from flash.trainer.checkpoint_files import MANIFEST, read_manifest

    named = chosen_model(arguments.model or arguments.what)
    if config is None:
        # Only the configuration of its run says which architecture and tokenizer a checkpoint needs.
        if (Path(named) / MANIFEST).is_file():
            raise ConfigError(f"{named} is a checkpoint: name its run, and the checkpoint with --model")
        yield RhythmWeights(ModelConfig(path=named, dtype="float32"), named)
        return
    is_checkpoint = (Path(named) / MANIFEST).is_file()
    description = f"{named}, version {read_manifest(Path(named)).version}" if is_checkpoint else named
    with model_folder(named, config) as path:
        yield RhythmWeights(msgspec.structs.replace(config.model, path=path), description)


def _rhythm_responses(arguments: argparse.Namespace, tokenizer: Any) -> RhythmResponses:
    """Return the responses to examine: the text that the user has named, or recorded samples of the run. Raises
    ConfigError if a file or a recorded batch cannot be read."""
    from flash.run.rhythm import recorded_responses, text_responses

    if arguments.text is not None:
        return text_responses(arguments.text, arguments.prompt, tokenizer)
    return recorded_responses(Path(arguments.what), arguments.step, arguments.samples or RHYTHM_SAMPLES)


def _check_shown(arguments: argparse.Namespace, responses: RhythmResponses) -> None:
    """Raise ConfigError if `--show` names none of the responses, or `--at` none of the tokens of the shown response."""
    count = len(responses.trajectories)
    if not 0 <= arguments.show < count:
        raise ConfigError(f"--show: expected 0 to {count - 1}, one of the responses looked at, got {arguments.show}")
    tokens = responses.trajectories[arguments.show].action_count
    if not 0 <= (arguments.at or 0) < tokens:
        raise ConfigError(f"--at: expected 0 to {tokens - 1}, a token of that response, got {arguments.at}")


def _print_rhythm(seen: MeasuredRhythm, show: int) -> None:
    """Print the findings about all responses, and then response number `show`, from 0, token by token.

    The findings are: the weights; the number of responses and of their tokens; the local and global heads, each with
    its span, the mean distance that it looks back; and the comparisons of plans and anchors with other tokens.
    """
    lines: list[str] = []
    columns = shutil.get_terminal_size().columns
    response = seen.responses[show]
    tokens = sum(len(one.places) for one in seen.responses)
    layers = ", ".join(str(layer) for layer in sorted({one.layer for one in seen.heads}))
    lines.append(f"weights     {one_line(seen.weights)}")
    count = len(seen.responses)
    of = "1 response" if count == 1 else f"{count} responses"
    at = ", ".join(f"{temperature:g}" for temperature in seen.temperatures)
    lines.append(f"looked at   {of} of {tokens} tokens, entropies at temperature {at}")
    lines.append(f"heads       of layers {layers}, as layer.head (span in tokens):")
    lines += head_lines(seen.heads, columns)
    lines.append("")
    lines += coupling_lines(seen.couplings)
    # FAI counts only tokens that are at least `nearest` tokens apart, so in short responses there may be none.
    if not any(any(one.fai) for one in seen.responses):
        lines.append(
            f"FAI is 0: no token has others of its response nearest = {seen.options.nearest} or more after it; lower it"
        )
    lines.append("")
    lines.append(f"response {show}: {one_line(response.name)}; ^ plans, * anchors")
    lines.append("")
    lines += response_lines(response, columns)
    sys.stdout.writelines(f"{line}\n" for line in lines)
