"""Python environment of TRL, which is made once under `build/trl`, with pinned versions.

`benchmarks.versus_trl.run` starts TRL's half of the comparison with the Python of this environment. The environment is
separate from Flash's own. Only torch, transformers and the packages that Flash's environments need have the same
versions in both. On machines without a GPU, torch comes from the place that scripts/packages.py finds. The environment
takes about 1.3 GB with torch's build for CPUs, and 6 GB with another build.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks.form import ROOT, make_python

FOLDER = ROOT / "build" / "trl"
"""Folder of the Python environment of TRL."""
PINNED = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
"""Packages that only TRL's environment needs."""
SHARED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "anyio", "tomli-w")
"""Packages that are taken in the version that Flash runs with."""
INSTALL_TIMEOUT_S = 1800
"""Longest wait for pip, in seconds."""


def requirements() -> list[str]:
    """Return the requirements that pip installs."""
    # Without the local part of a version: one index calls a release `2.13.0+cpu`, another one `2.13.0`.
    return [*PINNED, *(f"{name}=={metadata.version(name).partition('+')[0]}" for name in SHARED)]


def python() -> Path:
    """Return the environment's Python; make the environment first, unless it exists.

    Raises:
        subprocess.CalledProcessError: pip could not install it; its output was shown.
    """
    return make_python(FOLDER, requirements(), _install)


def _install(executable: Path) -> None:
    """Install TRL into a new environment, with torch's build for CPUs on a machine without a GPU."""
    pip = [executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    packages = installer()
    if not packages.has_nvidia_gpu():
        torch = packages.find_torch(executable)
        if torch.size == packages.CPU:  # the other one comes below, with what it requires
            where = packages.commands.variables(dict(torch.variables))
            command = [*pip, "--no-deps", torch.requirement]
            subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, env=where)
    subprocess.run([*pip, *requirements()], check=True, timeout=INSTALL_TIMEOUT_S)


def installer() -> Any:
    """Import scripts/packages.py, which is found by its folder like the scripts beside it."""
    sys.path.append(str(ROOT / "scripts"))
    return import_module("packages")


def variables(threads: int) -> dict[str, str]:
    """Return the environment variables of TRL's process, which has the repository on its path and no network."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
