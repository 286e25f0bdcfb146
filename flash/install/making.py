"""Steps that make `.venv`, the environment of a clone, or that complete an environment which has Flash's wheel.

`scripts/install.py` calls `make_clone`, and `flash install` calls `complete`. Both fill the environment with
`flash.install.packages`.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from flash.install import packages
from flash.install.commands import InstallError, VirtualEnvironment, output, phase, variables

FIRST_IMPORTS = "torch.distributed.fsdp, transformers.models.qwen3.modeling_qwen3, matplotlib.pyplot"
"""Modules that are imported once at the end. This reveals packages that do not fit together, and compiles the modules
that a run imports, which are few of the 22,000 files."""

FIRST_IMPORTS_ENGINE = "vllm.v1.engine.async_llm"
"""Modules of the engine, which are imported too, unless vLLM needs a GPU and this machine has none."""

FIRST_IMPORTS_CPU = "vllm.v1.worker.cpu_worker, vllm.v1.engine.core, vllm.model_executor.models.qwen3"
"""Modules of the engine's processes on the CPU, which are imported too on a machine without a GPU."""

RECIPE = sorted(Path(__file__).parent.glob("*.py"))
"""Modules that make the environment. After a change of one of them, an environment is out of date."""


def stamp(environment: VirtualEnvironment) -> Path:
    """Return the path of the file with the fingerprint of a finished environment of a clone. Without the file the
    environment is not finished."""
    return environment.folder / "flash-installed"


def fingerprint(clone: Path) -> str:
    """Return a digest of everything that the environment of a clone depends on.

    It covers the requirements, the modules in `RECIPE`, the folder, the version of Python, and whether the machine has
    an NVIDIA GPU and a compiler.
    """
    digest = hashlib.sha256()
    locks = sorted(packages.LOCKS.glob("*.txt"))
    for path in (clone / "pyproject.toml", clone / "scripts" / "install.py", *RECIPE, *locks):
        digest.update(path.read_bytes())
    kind = f"{sys.version_info[:2]} {packages.has_nvidia_gpu()} {packages.has_compiler()}"
    digest.update(f"{kind} {clone}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def is_current(clone: Path) -> bool:
    """Return True if the clone has a finished environment with the present fingerprint."""
    environment = environment_of(clone)
    done = stamp(environment)
    return environment.python.exists() and done.exists() and done.read_text() == fingerprint(clone)


def environment_of(clone: Path) -> VirtualEnvironment:
    """Return the environment of a clone, which need not exist yet: `.venv` in the clone's root folder."""
    return VirtualEnvironment(clone / ".venv")


def made_elsewhere(environment: VirtualEnvironment) -> Path | None:
    """Return the folder in which the environment was made, from its `bin/activate`; None if it was made here, or if
    there is no such file.

    An environment does not work in another folder. Each program in its `bin` begins with the old path. The editable
    install refers to the sources beside the old folder, so a copy would run the code of the original.
    """
    try:
        lines = (environment.folder / "bin" / "activate").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        value = line.strip().removeprefix("export ")
        # Some versions of `activate` have a second assignment, for Windows, with a computed value.
        if value.startswith("VIRTUAL_ENV=") and "$" not in value:
            place = Path("".join(shlex.split(value)).removeprefix("VIRTUAL_ENV="))
            return None if place.resolve() == environment.folder.resolve() else place
    return None


def create_venv(environment: VirtualEnvironment, *, keep: bool = True) -> None:
    """Make an empty environment with this Python. An environment that works is kept, unless `keep` is False.

    An environment works if its Python has this version and has pip, or gets it here. Otherwise it is emptied.

    Raises:
        InstallError: Python has no `venv`, or the folder cannot be written.
    """
    stamp(environment).unlink(missing_ok=True)  # from now on the environment does not count as finished
    version = output(environment.python, "-c", "import sys; print(*sys.version_info[:2])") if keep else None
    if version is not None and tuple(map(int, version.split())) == sys.version_info[:2]:
        # An environment that uv has made has no pip.
        command = (environment.python, "-m")
        if output(*command, "pip", "--version") or output(*command, "ensurepip"):
            return
    command = [sys.executable, "-m", "venv", "--clear", environment.folder]
    made = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=variables())
    if made.returncode != 0:
        raise InstallError(
            f"`{sys.executable} -m venv` failed:\n{made.stdout}{made.stderr}\n"
            "On Debian and Ubuntu the package python3-venv has what it needs. "
            "To use another Python: make env PYTHON=/path/to/python3.12"
        )


def why_torch_fails(environment: VirtualEnvironment) -> str | None:
    """Import torch in an environment, and return the last line of the error; None if the import succeeds."""
    command = [environment.python, "-c", "import torch"]
    # The working folder is on the import path of `-c`. The environment's own folder has no module to hide torch.
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=variables(), cwd=environment.folder
    )
    if done.returncode == 0:
        return None
    return [f"Python ended with {done.returncode}", *done.stderr.strip().splitlines()][-1]


def import_once(environment: VirtualEnvironment, modules: str) -> None:
    """Import modules, separated by commas, in an environment.

    Raises:
        InstallError: the installed packages do not fit together. If torch alone cannot be imported, the message says
            that, because its own error is more precise.
    """
    with phase("first import"):
        try:
            environment.run(environment.python, "-c", f"import {modules}")
        except InstallError:
            why = why_torch_fails(environment)
            if why is None:
                raise
            raise InstallError(
                f"torch cannot be imported: {why}\n"
                f"The torch in {environment.folder} is damaged, or needs a library that neither it nor this machine "
                f"has. An environment that is made again after `rm -rf {environment.folder}` has another one. The "
                f"whole output is in {environment.log}"
            ) from None


@contextmanager
def alone(environment: VirtualEnvironment, file: Path) -> Generator[None]:
    """Hold a lock on a file during the block, so that only one call at a time changes the environment.

    Waits without a limit, with a line for the user, while another call holds the lock. The kernel releases the lock
    when a call dies. `file` exists and is not changed.

    Raises:
        InstallError: the file cannot be opened for writing.
    """
    try:
        descriptor = os.open(file, os.O_RDWR)
    except OSError as error:
        why = f"{file} cannot be written ({error.strerror})"
        raise InstallError(f"{why}: make the environment in a folder of your own, or make the file writable") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stdout.write(f"{environment.folder} is being made by another call: waiting for its end …\n")
            sys.stdout.flush()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fill(environment: VirtualEnvironment, cuda: bool, clone: Path | None, *, dry_run: bool = False) -> None:
    """Print what is to be fetched, install it into an environment, and check that it can be imported.

    Args:
        environment: an environment that exists.
        cuda: True for NVIDIA GPUs, False for a machine without.
        clone: root folder of the clone that Flash is installed from; None if Flash is installed already.
        dry_run: True: print only, and install nothing.

    Raises:
        InstallError: the disk has too little space, a package cannot be installed, or the packages do not fit together.
    """
    environment.prepare()
    try:
        plan = packages.make_plan(environment, cuda, development=clone is not None)
        packages.announce(plan, listed=clone is None)
        if dry_run:
            return
        packages.install(environment, plan, clone)
        modules = [FIRST_IMPORTS]
        # An image for GPUs may be built on a machine without one.
        if not cuda or packages.has_nvidia_gpu():
            modules.append(FIRST_IMPORTS_ENGINE)
        if not cuda:
            modules.append(FIRST_IMPORTS_CPU)
        import_once(environment, ", ".join(modules))
    finally:
        shutil.rmtree(environment.scratch, ignore_errors=True)


def make_clone(clone: Path, fill: Callable[[VirtualEnvironment, bool, Path], None] = fill) -> None:
    """Make the environment of a clone, or complete one whose installation was interrupted, unless it is up to date.

    `clone` is the root folder. `fill` installs the packages; tests replace it.

    Raises:
        InstallError: `.venv` is a symbolic link, or the environment cannot be made.
    """
    environment = environment_of(clone)
    if is_current(clone):  # Checked before the lock, which fails in a folder that cannot be written.
        return
    # An installation through the link would change the environment of another clone, and make its `flash` run the
    # sources of this folder.
    if environment.folder.is_symlink():
        raise InstallError(
            f"{environment.folder} is a symbolic link to {environment.folder.resolve()}, which belongs to another "
            f"folder. Remove the link (`rm {environment.folder}`), and the same command makes an environment here; or "
            "call the programs in its `bin` yourself, with PYTHONPATH set to this folder"
        )
    # Every clone has this file. To open it for writing fails where `.venv` cannot be made either.
    with alone(environment, clone / "scripts" / "install.py"):
        if is_current(clone):  # another call has made it while this one waited for the lock
            return
        start = time.monotonic()
        python = ".".join(map(str, sys.version_info[:3]))
        sys.stdout.write(f"Making {environment.folder} (once), with Python {python}:\n")
        if elsewhere := made_elsewhere(environment):
            sys.stdout.write(f"  The present one was made as {elsewhere} and works nowhere else: it is replaced.\n")
        with phase("empty environment"):
            create_venv(environment, keep=elsewhere is None)
        fill(environment, packages.has_nvidia_gpu(), clone)
        stamp(environment).write_text(fingerprint(clone))
        sys.stdout.write(f"Ready after {time.monotonic() - start:.0f} s.\n")


def complete(cuda: bool | None, *, dry_run: bool, prefix: str = sys.prefix, base: str = sys.base_prefix) -> None:
    """Install torch, vLLM and all other packages into the environment of this process, for `flash install`.

    Args:
        cuda: True for NVIDIA GPUs, False for a machine without; None: as this machine is.
        dry_run: True only prints what would be fetched.
        prefix: folder of this process's Python; tests replace it.
        base: folder of the Python that `prefix` was made from; tests replace it.

    Raises:
        InstallError: this process runs in no virtual environment, or a package cannot be installed.
    """
    if prefix == base:
        raise InstallError(
            f"{sys.executable} belongs to no virtual environment, and Flash changes no Python that other programs use. "
            "Make an environment with `python3 -m venv .venv`, activate it with `. .venv/bin/activate`, and install "
            "Flash there"
        )
    environment = VirtualEnvironment(Path(prefix))
    cuda = packages.has_nvidia_gpu() if cuda is None else cuda
    start = time.monotonic()
    with alone(environment, environment.folder / "pyvenv.cfg"):
        sys.stdout.write(f"Installing into {environment.folder}:\n")
        fill(environment, cuda, None, dry_run=dry_run)
    done = (
        "This was a dry run: none of them was installed" if dry_run else f"Ready after {time.monotonic() - start:.0f} s"
    )
    sys.stdout.write(f"{done}.\n")


def report(install: Callable[[], None]) -> int:
    """Call `install`, and print its error if it fails. Returns the exit code of the command.

    That is 0, or 1 after an InstallError or OSError, or 130 after Ctrl-C, as in shells.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The output may lack some characters of our lines, as in a locale of Latin-1, or of a path that is not UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        install()
    except (InstallError, OSError) as error:
        sys.stdout.write("\n")
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: the same command continues from here\n")
        return 130
    return 0
