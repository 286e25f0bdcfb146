"""`flash doctor`: find out what this machine lacks for a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flash.cli.arguments import CommandParsers
from flash.config.load import load, split_arguments
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.text import harmless

if TYPE_CHECKING:
    from flash.run.checks.doctor import Finding

IN_SANDBOXES = ("envs.code:", "envs.swe:", "envs.rewards.code:", "envs.tools.sandboxed:")
"""Beginnings of the import paths of objects that run programs in sandboxes."""
OF_SANDBOXES = {"sandboxes", "box"}
"""Names of options that describe sandboxes."""
CONFIG_S = 90.0
"""Time limit for reading the configuration, which imports its environment, in seconds."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "doctor", help="Report what this machine lacks for a run: cores, GPUs, packages, containers, …"
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG|KEY=VALUE",
        help="Configuration files and settings of the run, as for `flash train`. Default: any small run.",
    )
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make the checks and print the findings. Returns 1 if something is missing."""
    from flash.run.checks.doctor import CHECKS, examine, missing, ok

    config: list[Config] = []
    findings: list[Finding] = []
    if arguments.config:
        paths, overrides = split_arguments(arguments.config)

        def read(_: Config | None) -> Finding:
            from flash.run.checks.preflight import start_problems

            try:
                config.append(load(paths, overrides, also=start_problems))
            except ConfigError as error:
                return missing(str(error), "mend that; what follows is what any small run needs")
            return ok("every key is right, and what it names is there")

        findings += examine({"config": read}, None, CONFIG_S)
    findings += examine({**CHECKS, "containers": containers}, config[0] if config else None)
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")
    else:
        sys.stdout.writelines(f"{harmless(line)}\n" for line in lines(findings))
    return int(any(finding.state == "missing" for finding in findings))


def lines(findings: list[Finding]) -> Iterator[str]:
    """Yield the lines of a table of the findings."""
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        first, *more = finding.text.splitlines() or [""]
        yield f"{finding.state:10}  {finding.check.ljust(width)}  {first}"
        indent = " " * (width + 14)
        yield from (indent + line for line in more)
        if finding.advice:
            yield f"{indent}→ {finding.advice}"


def containers(config: Config | None) -> Finding:
    """Check for a container engine, which environments need that run programs in sandboxes."""
    import anyio

    from flash.run.checks.doctor import missing, not_needed, ok

    wanted, remote = False, None
    if config is not None:
        wanted = any(uses_sandboxes(item) for item in _items({"path": config.env.path, **config.env.options}))
        remote = next((text for key, text in _items(config.env.options) if key == "at" and text != "local"), None)
    if remote:
        return not_needed(f"the sandboxes come from the service at {remote}")
    try:
        from envs.sandbox.doctor import engine_name

        return ok(anyio.run(engine_name))
    except ModuleNotFoundError as error:
        found, advice = f"{error.name} is not installed", "pip install -e '.[sandbox]' in Flash's folder"
    except Exception as error:  # a container engine that does not work may raise any error
        found, advice = str(error), "start Docker or Podman, or set DOCKER_HOST (docs/sandboxes.md)"
    if wanted:
        return missing(found, advice)
    return not_needed("no engine answers, and nothing asks for one")


def uses_sandboxes(item: tuple[str, str]) -> bool:
    """Return True if an option, or an import path, of an environment asks for sandboxes."""
    key, text = item
    return key in OF_SANDBOXES or text.startswith(IN_SANDBOXES)


def _items(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in a table with the key that holds it, and the key of each inner table with an empty text."""
    if isinstance(value, Mapping):
        yield key, ""
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield from _items(inner, name)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _items(inner, key)
    elif isinstance(value, str):
        yield key, value
