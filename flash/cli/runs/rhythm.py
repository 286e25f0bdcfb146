"""`flash rhythm`: show the attention of a model in a text, or in responses that a run has trained."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from algorithms.rhythm import Rhythm
from flash.cli.arguments import CommandParsers, check_writable
from flash.config.load import load
from flash.config.tree import Config, ModelConfig
from flash.errors import ConfigError
from flash.observe.rhythm import RhythmSeen, coupling_lines, head_lines, response_lines
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.text import one_line

if TYPE_CHECKING:
    from flash.run.rhythm import RhythmResponses

SAMPLES = 8
"""Default number of recorded samples that are examined."""


class Under(NamedTuple):
    """Weights that are examined."""

    model: ModelConfig
    """Model settings. Their path is a hub id, or a folder that exists until the command ends."""
    named: str
    """Description of the weights for the output."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "rhythm", help="Show which tokens of a text, or of a run's samples, algorithm.rhythm chooses, and why."
    )
    parser.add_argument("what", metavar="MODEL|RUN_DIR", help="Folder of a run; or, with --text, a model.")
    parser.add_argument("config", nargs="*", metavar="KEY=VALUE", help="Options of algorithm.rhythm, such as window=5.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="File with the response to examine.")
    parser.add_argument("--prompt", type=Path, metavar="FILE", help="File with the prompt of that response.")
    parser.add_argument(
        "--model", metavar="PATH", help="Weights that read the run's samples. Default: its newest ones."
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="Step whose recorded batch is examined. Default: the newest one."
    )
    parser.add_argument("--samples", type=int, metavar="K", help=f"Number of samples of the batch. Default: {SAMPLES}.")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="Number of the response to show, counted from 0. Default: 0."
    )
    parser.add_argument(
        "--at",
        type=int,
        default=0,
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
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Examine the responses, print the result, and write the plot and the JSON file if named."""
    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.run.rhythm import look_at, options_with

    check_writable(arguments.plot, arguments.json)
    config = _config(arguments)
    _check(arguments, config)
    base = Rhythm() if config is None or config.algorithm.rhythm is None else config.algorithm.rhythm
    options = options_with(base, arguments.config)
    with _weights(arguments, config) as under:
        tokenizer = HfTokenizer(under.model)
        given = _responses(arguments, config, tokenizer)
        _check_shown(arguments, given)
        drawn = (arguments.show, arguments.at) if arguments.plot is not None else None
        seen, picture = look_at(under.model, under.named, given, options, tokenizer.token_texts, drawn)
    if arguments.json is not None:
        write_atomically(arguments.json, msgspec.json.format(msgspec.json.encode(seen), indent=2) + b"\n")
    if arguments.plot is not None and picture is not None:
        from flash.observe.rhythm import rhythm_png

        write_atomically(arguments.plot, rhythm_png(picture))
    _tell(seen, arguments.show)
    return 0


def _config(arguments: argparse.Namespace) -> Config | None:
    """Return the configuration of the run; None if the user has named a model."""
    directory = RunDirectory(Path(arguments.what))
    if directory.config.is_file():
        return load(directory.config, ["run.resume=false"])
    if arguments.text is None:
        raise ConfigError(
            f"{arguments.what} is no run directory, since it holds no config.toml: expected one, or a model and a text "
            "for it (--text FILE)"
        )
    return None


def _check(arguments: argparse.Namespace, config: Config | None) -> None:
    """Refuse options that would have no effect, and numbers without a meaning."""
    for override in arguments.config:
        if "=" not in override:
            raise ConfigError(f"{override!r}: expected KEY=VALUE, an option of [algorithm.rhythm]")
    if arguments.prompt is not None and arguments.text is None:
        raise ConfigError("--prompt: expected --text beside it, the response to that prompt")
    for name in ("step", "samples"):
        if arguments.text is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name}: of a run's samples, and --text names another response; leave out one")
    if arguments.model is not None and config is None:
        raise ConfigError(f"--model: the weights are those of {arguments.what} already; leave out one")
    if arguments.samples is not None and arguments.samples < 1:
        raise ConfigError(f"--samples: expected at least 1, got {arguments.samples}")


@contextmanager
def _weights(arguments: argparse.Namespace, config: Config | None) -> Generator[Under]:
    """Yield the weights to examine. A checkpoint is written as a model folder, which exists while the context is
    open."""
    from flash.run.models import chosen_model, model_folder
    from flash.trainer.checkpoint_files import MANIFEST, read_manifest

    named = chosen_model(arguments.model or arguments.what)
    if config is None:
        if (Path(named) / MANIFEST).is_file():
            raise ConfigError(f"{named} is a checkpoint: name its run, and the checkpoint with --model")
        yield Under(ModelConfig(path=named, dtype="float32"), named)
        return
    whole = (Path(named) / MANIFEST).is_file()
    told = f"{named}, version {read_manifest(Path(named)).version}" if whole else named
    with model_folder(named, config) as path:
        yield Under(msgspec.structs.replace(config.model, path=path), told)


def _responses(arguments: argparse.Namespace, config: Config | None, tokenizer: Any) -> RhythmResponses:
    from flash.run.rhythm import recorded_responses, text_responses

    if arguments.text is not None:
        return text_responses(arguments.text, arguments.prompt, tokenizer.render)
    assert config is not None, "without a text a run was named"
    return recorded_responses(
        Path(arguments.what),
        arguments.step,
        arguments.samples or SAMPLES,
        max_tokens=config.train.max_tokens_per_microbatch,
    )


def _check_shown(arguments: argparse.Namespace, given: RhythmResponses) -> None:
    count = len(given.trajectories)
    if not 0 <= arguments.show < count:
        raise ConfigError(f"--show: expected 0 to {count - 1}, one of the responses looked at, got {arguments.show}")
    tokens = given.trajectories[arguments.show].action_count
    if not 0 <= arguments.at < tokens:
        raise ConfigError(f"--at: expected 0 to {tokens - 1}, a token of that response, got {arguments.at}")


def _tell(seen: RhythmSeen, show: int) -> None:
    """Print what was seen, and the response of number `show`."""
    columns = shutil.get_terminal_size().columns
    response = seen.responses[show]
    tokens = sum(len(one.places) for one in seen.responses)
    layers = ", ".join(str(layer) for layer in sorted({one.layer for one in seen.heads}))
    _say(f"weights     {one_line(seen.weights)}")
    count = len(seen.responses)
    of = "1 response" if count == 1 else f"{count} responses"
    at = ", ".join(f"{temperature:g}" for temperature in seen.temperatures)
    _say(f"looked at   {of} of {tokens} tokens, entropies at temperature {at}")
    _say(f"heads       of layers {layers}, as layer.head (span in tokens):")
    for line in head_lines(seen.heads, columns):
        _say(line)
    _say("")
    for line in coupling_lines(seen.couplings):
        _say(line)
    if not any(any(one.fai) for one in seen.responses):
        _say(
            f"FAI is 0: no token has others of its response nearest = {seen.options.nearest} or more after it; lower it"
        )
    _say("")
    _say(f"response {show}: {one_line(response.name)}; ^ plans, * anchors")
    _say("")
    for line in response_lines(response, columns):
        _say(line)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
