"""The command line. It parses and validates first; torch and vllm are imported only when something starts."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash import configfile, sandboxcli
from flash.config import Config, TinyModelConfig
from flash.errors import ConfigError, FlashError

DESCRIPTION = "Asynchronous reinforcement-learning post-training for language models."


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Config files and `key.path=value` overrides, told apart by the equals sign. Raises ConfigError."""
    overrides = [argument for argument in arguments if "=" in argument]
    paths = [Path(argument) for argument in arguments if "=" not in argument]
    if not paths:
        raise ConfigError("no config file was given; the smallest one is examples/quickstart.toml")
    return paths, overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flash", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a config: rollouts and training at the same time")
    train.add_argument("config", nargs="+", metavar="CONFIG|KEY=VALUE", help="TOML files, then dotted overrides")
    train.add_argument("--dry-run", action="store_true", help="validate, print the resolved config, start nothing")
    train.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")

    simulate = commands.add_parser("simulate", help="predict a config's speed on a virtual clock: no GPU, no model")
    simulate.add_argument("config", nargs="+", metavar="CONFIG|KEY=VALUE", help="as for train, with a [simulate] table")
    simulate.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V1,V2,…", help="try each value; more than one makes a grid"
    )
    simulate.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the result")

    calibrate = commands.add_parser("calibrate", help="fit a [simulate] table to a run directory")
    calibrate.add_argument("run_dir", type=Path)
    calibrate.add_argument("--output", type=Path, metavar="FILE.toml", help="default: RUN_DIR/fitted.toml")

    plot = commands.add_parser("plot", help="draw the plots of a run directory again")
    plot.add_argument("run_dir", type=Path)

    tiny = commands.add_parser("tiny-model", help="make a small Qwen3, warm-started on an environment's examples")
    tiny.add_argument("path", type=Path, help="folder to write")
    tiny.add_argument("--env", default="envs.arithmetic:Arithmetic", metavar="MODULE:CLASS")
    tiny.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the environment")
    defaults = TinyModelConfig()
    tiny.add_argument("--layers", type=int, default=defaults.layers)
    tiny.add_argument("--width", type=int, default=defaults.width)
    tiny.add_argument("--steps", type=int, default=defaults.warm_start_steps, help="supervised steps")
    tiny.add_argument("--seed", type=int, default=defaults.seed)
    tied = tiny.add_mutually_exclusive_group()
    tied.add_argument("--tied", dest="tied", action="store_true", default=True, help="share the embeddings (default)")
    tied.add_argument("--untied", dest="tied", action="store_false")

    sandboxcli.add_parser(commands)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; files and overrides may also stand behind options, where argparse alone does not look for them."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [argument for argument in rest if argument.startswith("-") or "config" not in arguments]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.config += rest
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `flash`; the exit code. 2 means wrong input, 130 an interrupt."""
    arguments = _parse(argv)
    try:
        if arguments.command == "train":
            return _train(arguments)
        if arguments.command == "simulate":
            return _simulate(arguments)
        if arguments.command == "calibrate":
            return _calibrate(arguments)
        if arguments.command == "sandbox":
            return sandboxcli.main(arguments)
        if arguments.command == "plot":
            return _plot(arguments.run_dir)
        return _tiny_model(arguments)
    except FlashError as error:
        sys.stderr.write(f"flash: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _train(arguments: argparse.Namespace) -> int:
    paths, overrides = split_arguments(arguments.config)
    if arguments.resume:
        overrides.append("run.resume=true")
    config = configfile.load(paths, overrides)
    if arguments.dry_run:
        sys.stdout.write(configfile.dump(config))
        return 0
    from flash.launcher import launch

    make_missing_model(config)
    return launch(config, [str(path) for path in paths], overrides)


def _simulate(arguments: argparse.Namespace) -> int:
    from flash.simulate.command import simulate_command

    paths, overrides = split_arguments(arguments.config)
    simulate_command(paths, overrides, sweeps=arguments.sweep, plot=arguments.plot, json=arguments.json)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from flash.simulate.command import calibrate_command

    calibrate_command(arguments.run_dir, arguments.output)
    return 0


def make_missing_model(config: Config) -> None:
    """Make the tiny model a config asks for, unless it is there already."""
    if config.tiny_model is None:
        return
    from flash import tiny_model

    path = Path(config.model.path)
    if not tiny_model.is_current(path, config.tiny_model, config.env.path, config.env.options):
        tiny_model.make_tiny_model(path, config.tiny_model, config.env.path, config.env.options, _progress)


def _progress(step: int, steps: int, loss: float) -> None:
    if step == steps or step % 50 == 0:
        sys.stdout.write(f"tiny model: supervised step {step}/{steps}, loss {loss:.3f}\n")
        sys.stdout.flush()


def _plot(run_dir: Path) -> int:
    from flash.observe.plots import write_plots

    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    for path in write_plots(run_dir):
        sys.stdout.write(f"{path}\n")
    return 0


def _option(text: str) -> tuple[str, Any]:
    """`key=value`, with the value read as TOML where it is TOML. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text!r}: expected KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _tiny_model(arguments: argparse.Namespace) -> int:
    import msgspec

    from flash.tiny_model import make_tiny_model

    wanted = {
        "layers": arguments.layers,
        "width": arguments.width,
        "tied": arguments.tied,
        "warm_start_steps": arguments.steps,
        "seed": arguments.seed,
    }
    try:
        config = msgspec.convert(wanted, TinyModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tiny-model: {error}") from None
    make_tiny_model(arguments.path, config, arguments.env, dict(map(_option, arguments.option)), _progress)
    sys.stdout.write(f"{arguments.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
