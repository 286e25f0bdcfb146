"""Try the installation and a dry run like a new user: each Python of this machine, a fresh clone, pip without settings.

    python3 scripts/try_install.py                    # each Python found, with a compiler and without; hours
    python3 scripts/try_install.py --other            # only the newest Python that is not this one
    python3 scripts/try_install.py --short            # a few unit tests instead of `make check`; minutes
    sudo python3 scripts/try_install.py --user nobody # as an ordinary user, whom root can become

Each trial has a temporary folder, at most 10 GB, with a clone of the last commit and an empty home folder. It is
removed after the trial. Only the settings of pip that are needed to reach the registry are kept. The script exits with
1 if a step failed, and with 2 if an argument is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from install import OLDEST_PYTHON

ROOT = Path(__file__).parents[1]
"""Root folder of the repository, from which Flash is imported."""
sys.path.insert(0, str(ROOT))

from flash.install.commands import output  # noqa: E402 - needs the line above
from flash.install.packages import gigabytes  # noqa: E402

REGISTRY = ("index-url", "cert", "client-cert", "proxy", "trusted-host", "timeout", "default-timeout", "retries")
"""Settings of pip that are kept. They determine how the registry is reached, but not which packages are taken."""

KEPT = re.compile(r"(?i)(.*_proxy|ssl_cert_.*|requests_ca_bundle|user|logname|lang|lc_.*|term|tz)")
"""Pattern of the environment variables that are kept."""

COMPILERS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|c89|c99|clang|clang\+\+|tcc)(-[0-9.]+)?")
"""Pattern of the programs that are hidden in a trial without a compiler."""

PLACES = (
    "~/.pyenv/versions/*/bin",
    "~/.local/share/uv/python/*/bin",
    "/opt/python/*/bin",
    "/usr/local/bin",
    "/usr/bin",
)
"""Patterns of the folders that are searched for Pythons, beside PATH."""

SHORT_TESTS = (
    *("tests/test_imports.py", "tests/test_lock.py", "tests/algorithms", "tests/transport"),
    *("tests/simulate/test_clock.py", "tests/trainer/test_model.py"),
)
"""Unit tests that `--short` runs: a few that depend on torch and on the interpreter. They take less than a minute. They
run in one process, because the imports of each further process would take longer than the tests."""


SHOWN_LINES, SHOWN_AFTER_FAILURE = 12, 60
"""Numbers of last lines of a step's output that are printed: after a success, and after a failure."""


class Python(NamedTuple):
    """An interpreter that Flash may run with."""

    version: tuple[int, ...]
    """Three numbers, such as (3, 11, 7)."""
    path: Path
    """Program of the interpreter."""


class Step(NamedTuple):
    """A command of a trial, which is run in the clone."""

    name: str
    """Name of the step in the table."""
    command: list[str]
    """Program and its arguments."""


class Row(NamedTuple):
    """The result of a trial, as a row of the table."""

    columns: list[str]
    """Name of the trial, version of torch, size of the environment, and the seconds of each step."""
    good: bool
    """True if all steps succeeded."""


def on_path() -> Iterator[Path]:
    """Yield the folders on PATH, as absolute paths, since relative ones mean other folders in a link or a command."""
    yield from (Path(os.path.abspath(place)) for place in os.environ.get("PATH", "").split(os.pathsep))


def folders() -> Iterator[Path]:
    """Yield the folders to search for Pythons, those on PATH first."""
    yield from on_path()
    for place in PLACES:
        pattern = Path(place).expanduser()
        yield from sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))), reverse=True)


def probe(path: Path) -> Python | None:
    """Return the interpreter at `path`; None if it is too old, broken, a virtual environment, or cannot make one."""
    code = "import sys, venv, ensurepip; print(*sys.version_info[:3], sys.prefix == sys.base_prefix)"
    found = (output(path, "-c", code, timeout=30) or "").split()
    if found[-1:] != ["True"]:
        return None
    version = tuple(map(int, found[:3]))
    return Python(version, path) if version >= OLDEST_PYTHON else None


def listed(folder: Path) -> list[Path]:
    """Return the files in a folder, sorted; none if there is no such folder, or if this user may not list it."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def pythons() -> list[Python]:
    """Return an interpreter for each minor version, the oldest first."""
    found: dict[tuple[int, ...], Python] = {}
    for folder in folders():
        for path in listed(folder):
            if re.fullmatch(r"python3\.\d+", path.name) and (python := probe(path)):
                found.setdefault(python.version[:2], python)
    return [found[version] for version in sorted(found)]


def variables(home: Path, path: str) -> dict[str, str]:
    """Return the environment variables of a new user whose pip reaches the registry as this machine does.

    `home` is the user's home folder, and `path` the value of PATH.
    """
    seen = {key: value for key, value in os.environ.items() if KEPT.fullmatch(key)}
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, errors="replace", check=False
    )
    for name, value in re.findall(r"^[\w:.]+?\.([\w-]+)='(.*)'$", listing.stdout, flags=re.MULTILINE):
        if name in REGISTRY:
            seen[f"PIP_{name.upper().replace('-', '_')}"] = value
    return seen | {"PATH": path, "HOME": str(home), "PIP_CONFIG_FILE": os.devnull}


def without_compilers(folder: Path) -> str:
    """Return a PATH with all programs of the present one except compilers: the new folder `folder`, with links."""
    folder.mkdir()
    # The first program of a name on PATH wins, as in a shell.
    for place in on_path():
        for program in listed(place):
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def steps(python: Python, short: bool) -> list[Step]:
    """Return the commands of a trial, in order. `short` replaces `make check` by SHORT_TESTS."""
    tests = [".venv/bin/python", "-m", "pytest", "-q", "-m", "not integration", *SHORT_TESTS]
    return [
        Step("env", ["make", "env", f"PYTHON={python.path}"]),
        Step("again", ["make", "env"]),  # must find the environment up to date
        Step("dry run", ["./launch.sh", "--dry-run"]),
        Step("tests", tests) if short else Step("make check", ["make", "check"]),
    ]


def can_run(python: Python, user: str | None) -> bool:
    """Return True if `user` may start this interpreter, which may be in a folder that is closed to other users."""
    command = [python.path, "-c", ""]
    try:
        return subprocess.run(command, check=False, cwd="/", **identity(user)).returncode == 0
    except PermissionError:
        return False


def identity(user: str | None) -> dict[str, Any]:
    """Return the arguments that make `subprocess.run` run a command as `user`, without the caller's groups.

    None: no arguments, so the command runs as the caller. Raises KeyError if there is no such user.
    """
    return {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": ()}


def give(folder: Path, user: str) -> None:
    """Make `user` the owner of a folder and of everything in it. Only root may do that. Links are not followed."""
    account = pwd.getpwnam(user)
    for place in (folder, *folder.rglob("*")):
        os.lchown(place, account.pw_uid, account.pw_gid)


def attempt(python: Python, compiler: bool, short: bool, work: Path, user: str | None) -> Row:
    """Clone the repository, run the steps until one fails, and return a row with the seconds of each step.

    Args:
        python: interpreter of the trial.
        compiler: False hides the machine's compilers.
        short: True for a few unit tests instead of `make check`.
        work: empty folder of the trial, for the clone, the home folder and the log.
        user: ordinary user who runs the steps; None: the caller.

    Raises:
        subprocess.CalledProcessError: the repository cannot be cloned.
    """
    clone, home = work / "clone", work / "home"
    home.mkdir()
    path = os.environ.get("PATH", os.defpath) if compiler else without_compilers(work / "bin")
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", clone], check=True)
    if user is not None:
        give(work, user)
    name = f"{'.'.join(map(str, python.version))} {'with' if compiler else 'without'} a compiler"
    if user is not None:
        name += f", as {user}"
    sys.stdout.write(f"\n== {name}: {python.path}\n")
    columns, good = [name], True
    for step in steps(python, short):
        sys.stdout.write(f"-- {step.name}\n")
        sys.stdout.flush()
        start = time.monotonic()
        with (work / "log").open("w+", errors="replace") as log:  # tests may print bytes that are no text
            environment = variables(home, path) | ({} if user is None else {"USER": user, "LOGNAME": user})
            done = subprocess.run(
                step.command,
                **identity(user),
                cwd=clone,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
            log.seek(0)
            lines = log.read().splitlines()
        shown = SHOWN_AFTER_FAILURE if done.returncode else SHOWN_LINES
        sys.stdout.write("\n".join(lines[-shown:]) + "\n")
        columns.append(f"{step.name} {time.monotonic() - start:.0f} s")
        if done.returncode:
            columns[-1] += f" FAILED ({done.returncode})"
            good = False
            break
    venv = clone / ".venv"
    code = "import importlib.metadata as m; print(m.version('torch'))"
    torch = (output(venv / "bin" / "python", "-c", code) or "none").strip()
    columns[1:1] = [f"torch {torch}", f"{gigabytes(venv):.1f} GB"]  # behind the name
    return Row(columns, good)


def main() -> int:
    """Run the trials that the arguments select, and print a table.

    Returns 1 if one failed, else 0. Ends the process with an error message if an argument is wrong.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help="try this one (may be repeated), not all found")
    parser.add_argument("--other", action="store_true", help="only the newest whose version is not this Python's")
    parser.add_argument("--short", action="store_true", help="some of the unit tests instead of `make check`")
    parser.add_argument("--compiler", choices=("both", "with", "without"), default="both")
    parser.add_argument("--user", help="become this ordinary user for the trial; only root can")
    options = parser.parse_args()
    if options.user is not None and os.geteuid() != 0:
        parser.error("--user: only root can become another user; use sudo")
    try:
        identity(options.user)
    except KeyError:
        parser.error(f"--user {options.user}: this machine has no user of this name")
    found = [] if options.python else pythons()
    for name in options.python or ():
        # The steps run in other folders, so a relative path would name another program there.
        python = probe(Path(os.path.abspath(shutil.which(name) or name)))
        if python is None:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            parser.error(
                f"--python {name}: expected a program of Python {oldest} or newer that is not in a virtual environment "
                "and has the modules venv and ensurepip"
            )
        found.append(python)
    if options.other:
        found = sorted(python for python in found if python.version[:2] != sys.version_info[:2])[-1:]
    closed = [python for python in found if not can_run(python, options.user)]
    if closed:
        paths = ", ".join(str(python.path) for python in closed)
        parser.error(f"{options.user or 'this user'} may not run {paths}: open its folders to others with chmod o+x")
    if not found:
        sys.stdout.write("not tried: no other Python that Flash could run with was found on this machine\n")
        return 0
    forms = {"both": (True, False), "with": (True,), "without": (False,)}[options.compiler]
    if options.other:  # a short trial: one form is enough
        forms = forms[:1]
    rows: list[Row] = []
    for python, compiler in itertools.product(found, forms):
        with tempfile.TemporaryDirectory(prefix="flash try ") as work:  # Paths with a space are part of the trial.
            rows.append(attempt(python, compiler, options.short, Path(work), options.user))
    sys.stdout.write("\n" + "\n".join(" | ".join(row.columns) for row in rows) + "\n")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
