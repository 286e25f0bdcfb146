"""`flash view`: show runs on a page in the browser, in progress or finished."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from flash.cli.arguments import OUTPUTS, CommandParsers, run_directory, runs_in
from flash.errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette

PORT = 8710
"""Default TCP port of the page."""
NEEDED = ("starlette", "uvicorn", "plotly")
"""Packages that the page needs."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("view", help="Show runs in the browser, while they run and afterwards.")
    parser.add_argument(
        "run_dir",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help=f"Folders of runs. Default: all runs in {OUTPUTS}, of which the newest is shown first.",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"Port of the page. 0: any free port. Default: {PORT}.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the address of the page, and serve it until an interrupt."""
    named: list[Path] = arguments.run_dir
    paths = [run_directory(path).path for path in named] or runs_in(OUTPUTS, "view")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {arguments.port}")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"flash view needs {' and '.join(missing)}: `make env` makes an environment that has them, "
            "`pip install -e '.[view]'` in Flash's folder adds them to another one"
        )
    from flash.view.app import make_app
    from flash.view.runs import open_runs

    runs = open_runs(paths)
    shown = "; ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs"
    anyio.run(_serve, make_app(runs, len(runs) if named else 1), arguments.port, shown)
    return 0


async def _serve(app: Starlette, port: int, shown: str) -> None:
    from flash.http.server import HttpAddress, open_socket, serving

    address = HttpAddress(port=port)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as stops:
        async with serving(app, open_socket(address), address) as url:
            sys.stdout.write(f"[showing {shown} at {url}/ - Ctrl-C ends it]\n")
            sys.stdout.flush()
            async for _ in stops:
                return
