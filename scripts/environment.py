"""Steps that make `.venv`, the environment that Flash runs in. install.py calls `main`."""

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
"""Modules that are imported once at the end. This reveals packages that do not fit together, and compiles the modules
that a run imports, which are few of the 22,000 files."""

FIRST_IMPORTS_CPU = "vllm.v1.worker.cpu_worker, vllm.v1.engine.core, vllm.model_executor.models.qwen3"
"""Modules of the engine's processes on the CPU, which are imported too on a machine without a GPU."""

RECIPE = [Path(__file__).with_name(f"{name}.py") for name in ("install", "environment", "packages", "commands")]
"""Scripts that make the environment. After a change of one of them, an environment is out of date."""


def fingerprint() -> str:
    """Return a digest of everything that the environment depends on.

    It covers the requirements, the scripts in `RECIPE`, the folder, the version of Python, and whether the machine has
    an NVIDIA GPU and a compiler.
    """
    digest = hashlib.sha256()
    locks = (packages.LOCK, packages.ENGINE_LOCK, packages.INSTALLER_LOCK, packages.COMPILED_LOCK)
    for path in (ROOT / "pyproject.toml", *RECIPE, *locks):
        digest.update(path.read_bytes())
    kind = f"{sys.version_info[:2]} {packages.has_nvidia_gpu()} {packages.has_compiler()}"
    digest.update(f"{kind} {ROOT}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def is_current() -> bool:
    """Return True if a finished environment with the present fingerprint exists."""
    return commands.PYTHON.exists() and commands.STAMP.exists() and commands.STAMP.read_text() == fingerprint()


def made_elsewhere() -> Path | None:
    """Return the folder in which the environment was made, from its `bin/activate`; None if that is this folder.

    An environment does not work in another folder. Each program in its `bin` begins with the old path. The editable
    install refers to the sources beside the old folder, so a copy would run the code of the original.
    """
    try:
        lines = (commands.VENV / "bin" / "activate").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        value = line.strip().removeprefix("export ")
        # Some versions of `activate` have a second assignment, for Windows, with a computed value.
        if value.startswith("VIRTUAL_ENV=") and "$" not in value:
            place = Path("".join(shlex.split(value)).removeprefix("VIRTUAL_ENV="))
            return None if place.resolve() == commands.VENV.resolve() else place
    return None


def create_venv(*, keep: bool = True) -> None:
    """Make an empty environment with this Python. An environment that works is kept, unless `keep` is False.

    Raises:
        InstallError: Python has no `venv`, or the folder cannot be written.
    """
    commands.STAMP.unlink(missing_ok=True)
    version = output(commands.PYTHON, "-c", "import sys; print(*sys.version_info[:2])") if keep else None
    if version is not None and tuple(map(int, version.split())) == sys.version_info[:2]:
        # An environment that uv has made has no pip.
        if output(commands.PYTHON, "-m", "pip", "--version") or output(commands.PYTHON, "-m", "ensurepip"):
            return
    command = [sys.executable, "-m", "venv", "--clear", commands.VENV]
    made = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=variables())
    if made.returncode != 0:
        raise InstallError(
            f"`{sys.executable} -m venv` failed:\n{made.stdout}{made.stderr}\n"
            "On Debian and Ubuntu the package python3-venv has what it needs. "
            "To use another Python: make env PYTHON=/path/to/python3.12"
        )


def refuse_other_folders() -> None:
    """Check that pip's configuration files do not make it install into another folder.

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
    """Import torch in the environment, and return the last line of the error; None if the import succeeds."""
    command = [commands.PYTHON, "-c", "import torch"]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=variables(), cwd=commands.VENV
    )
    if done.returncode == 0:
        return None
    return [f"Python ended with {done.returncode}", *done.stderr.strip().splitlines()][-1]


def import_once(modules: str) -> None:
    """Import modules, separated by commas, in the environment.

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
                f"`rm -rf {commands.VENV}` and the same command make another. The whole output is in {commands.LOG}"
            ) from None


@contextmanager
def alone() -> Generator[None]:
    """Hold a lock during the block, so that only one call at a time makes the environment.

    Raises:
        InstallError: this file cannot be written.
    """
    # The lock is on this file, which every clone has. To open it for writing fails where `.venv` cannot be made either.
    try:
        descriptor = os.open(__file__, os.O_RDWR)
    except OSError as error:
        why = f"{__file__} cannot be written ({error.strerror})"
        raise InstallError(f"{why}: clone {ROOT} to a folder of your own, or make the file writable") from None
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
    """Install all packages into the empty environment, and check that they can be imported."""
    if packages.has_nvidia_gpu():
        packages.install_for_gpu()
        import_once(FIRST_IMPORTS)
    else:
        packages.install_for_cpu()
        import_once(f"{FIRST_IMPORTS}, {FIRST_IMPORTS_CPU}")


def make(install: Callable[[], None] = install) -> None:
    """Make the environment, or complete one whose installation was interrupted. Tests replace `install`."""
    start = time.monotonic()
    sys.stdout.write(f"Making {commands.VENV} (once), with Python {'.'.join(map(str, sys.version_info[:3]))}:\n")
    if elsewhere := made_elsewhere():
        sys.stdout.write(f"  The present one was made as {elsewhere} and works nowhere else: it is replaced.\n")
    with phase("empty environment"):
        create_venv(keep=elsewhere is None)
    refuse_other_folders()
    shutil.rmtree(commands.SCRATCH, ignore_errors=True)
    commands.SCRATCH.mkdir()
    install()
    shutil.rmtree(commands.SCRATCH, ignore_errors=True)
    commands.STAMP.write_text(fingerprint())
    sys.stdout.write(f"Ready after {time.monotonic() - start:.0f} s.\n")


def main(make: Callable[[], None] = make) -> int:
    """Make the environment, unless it is up to date. Returns the exit code 0. Tests replace `make`.

    Raises:
        InstallError: `.venv` is a symbolic link, or the environment cannot be made.
    """
    if is_current():  # Checked before the lock, which fails in a folder that cannot be written.
        return 0
    # An installation through the link would change the environment of another clone, and make its `flash` run the
    # sources of this folder.
    if commands.VENV.is_symlink():
        raise InstallError(
            f"{commands.VENV} is a symbolic link to {commands.VENV.resolve()}, which belongs to another folder. "
            f"Remove the link (`rm {commands.VENV}`), and the same command makes an environment here; or call the "
            "programs in its `bin` yourself, with PYTHONPATH set to this folder"
        )
    with alone():
        if not is_current():
            make()
    return 0
