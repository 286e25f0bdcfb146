"""How `.venv`, the environment that Flash runs in, is made: see install.py, which starts this."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import commands
import packages
from commands import ELSEWHERE, ROOT, InstallError, output, phase, run, variables

FIRST_IMPORTS = (
    "torch.distributed.fsdp, transformers.models.qwen3.modeling_qwen3, vllm.v1.engine.async_llm, matplotlib.pyplot"
)
"""Imported once at the end: a broken set shows here, and what a run imports, a few of 22,000 files, is compiled."""

FIRST_IMPORTS_CPU = "vllm.v1.worker.cpu_worker, vllm.v1.engine.core, vllm.model_executor.models.qwen3"
"""The same for the engine's processes on the CPU."""


RECIPE = [Path(__file__).with_name(f"{name}.py") for name in ("install", "environment", "packages", "commands")]
"""Files whose change makes an environment out of date."""


def fingerprint() -> str:
    """What the environment depends on: requirements, the recipe, its folder, the Python and the kind of machine."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", *RECIPE, packages.LOCK, packages.ENGINE_LOCK, packages.COMPILED_LOCK):
        digest.update(path.read_bytes())
    kind = f"{sys.version_info[:2]} {packages.has_nvidia_gpu()} {packages.has_compiler()}"
    digest.update(f"{kind} {ROOT}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def is_current() -> bool:
    """Whether a finished environment of this fingerprint exists."""
    return commands.PYTHON.exists() and commands.STAMP.exists() and commands.STAMP.read_text() == fingerprint()


def made_elsewhere() -> Path | None:
    """Where the environment was made, as its own `bin/activate` has it, if that is another folder.

    Each program in its `bin` begins with that path, and the editable install leads to the sources beside it: moved, it
    is dead, and a copy of it would run the code of the original.
    """
    try:
        lines = (commands.VENV / "bin" / "activate").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        value = line.strip().removeprefix("export ")
        if value.startswith("VIRTUAL_ENV=") and "$" not in value:  # some have another one that is computed, for Windows
            place = Path("".join(shlex.split(value)).removeprefix("VIRTUAL_ENV="))
            return None if place.resolve() == commands.VENV.resolve() else place
    return None


def create_venv(*, anew: bool = False) -> None:
    """Make an empty environment of this Python, unless there is one that works, or in its place.

    Raises:
        InstallError: Python has no `venv`, or the folder cannot be written.
    """
    commands.STAMP.unlink(missing_ok=True)
    version = None if anew else output(commands.PYTHON, "-c", "import sys; print(*sys.version_info[:2])")
    if version is not None and tuple(map(int, version.split())) == sys.version_info[:2]:
        # uv makes environments without pip.
        if output(commands.PYTHON, "-m", "pip", "--version") or output(commands.PYTHON, "-m", "ensurepip"):
            return
    command = [sys.executable, "-m", "venv", "--clear", commands.VENV]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=variables())
    if made.returncode != 0:
        raise InstallError(
            f"`{sys.executable} -m venv` failed:\n{made.stdout}{made.stderr}\n"
            "On Debian and Ubuntu the package python3-venv has what it needs. "
            "Another Python is named so: make env PYTHON=/path/to/python3.12"
        )


def refuse_other_folders() -> None:
    """Stop where pip's files send every package to a folder that is not the environment's.

    Raises:
        InstallError: they do.
    """
    settings = ELSEWHERE.findall(output(commands.PYTHON, "-m", "pip", "config", "list") or "")
    if settings:
        raise InstallError(
            f"pip's configuration sets {' and '.join(settings)}, which installs packages outside of any environment: "
            f"`{commands.PYTHON} -m pip config debug` names the file; or call this with PIP_CONFIG_FILE=/dev/null"
        )


def why_torch_fails() -> str | None:
    """The last line of what torch says when it is imported; None where it can be."""
    command = [commands.PYTHON, "-c", "import torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables(), cwd=commands.VENV)
    if done.returncode == 0:
        return None
    return [f"Python ended with {done.returncode}", *done.stderr.strip().splitlines()][-1]


def import_once(modules: str) -> None:
    """Import what a run imports.

    Raises:
        InstallError: the installed packages do not fit together.
    """
    with phase("first import"):
        try:
            run(commands.PYTHON, "-c", f"import {modules}")
        except InstallError:
            why = why_torch_fails()
            if why is None:
                raise
            raise InstallError(
                f"torch cannot be imported: {why}\n"
                f"The torch in {commands.VENV} is damaged, or needs a library that neither it nor this machine has. "
                f"`rm -rf {commands.VENV}` and the same command make it anew. The whole output is in {commands.LOG}"
            ) from None


@contextmanager
def alone() -> Generator[None]:
    """Wait for other calls to end, and make them wait.

    Raises:
        InstallError: nothing can be written here.
    """
    try:
        descriptor = os.open(__file__, os.O_RDWR)
    except OSError as error:
        raise InstallError(f"{ROOT} cannot be written ({error.strerror}): clone it to a folder of your own") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stdout.write(f"{commands.VENV} is being made by another call: waiting for its end …\n")
            sys.stdout.flush()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def install() -> None:
    """Fill the empty environment, and try whether it works."""
    if packages.has_nvidia_gpu():
        packages.install_for_gpu()
        import_once(FIRST_IMPORTS)
    else:
        packages.install_for_cpu()
        import_once(f"{FIRST_IMPORTS}, {FIRST_IMPORTS_CPU}")


def make(install: Callable[[], None] = install) -> None:
    """Make the environment, or what is missing of it."""
    start = time.monotonic()
    sys.stdout.write(f"Making {commands.VENV} (once), with Python {'.'.join(map(str, sys.version_info[:3]))}:\n")
    if elsewhere := made_elsewhere():
        sys.stdout.write(f"  What is there was made as {elsewhere} and works nowhere else: it is made anew.\n")
    with phase("empty environment"):
        create_venv(anew=elsewhere is not None)
    refuse_other_folders()
    shutil.rmtree(commands.SCRATCH, ignore_errors=True)
    commands.SCRATCH.mkdir()
    install()
    shutil.rmtree(commands.SCRATCH, ignore_errors=True)
    commands.STAMP.write_text(fingerprint())
    sys.stdout.write(f"Ready after {time.monotonic() - start:.0f} s.\n")


def main(make: Callable[[], None] = make) -> int:
    """Make the environment, or leave it as it is when it is current."""
    if is_current():  # also where nothing may be written
        return 0
    with alone():
        if not is_current():
            make()
    return 0
