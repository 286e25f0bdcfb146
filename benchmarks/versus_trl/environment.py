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
import venv
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks.form import ROOT

FOLDER = ROOT / "build" / "trl"
STAMP = "requirements.txt"
"""Written last: an environment without it is not finished."""

PINNED = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
SHARED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "anyio", "tomli-w")
"""Taken in the version that Flash runs with."""

INSTALL_TIMEOUT_S = 1800


def requirements() -> list[str]:
    """Return the requirements that pip installs."""
    return [*PINNED, *(f"{name}=={_version(name)}" for name in SHARED)]


def python() -> Path:
    """Return the environment's Python; make the environment first, unless it exists.

    Raises:
        subprocess.CalledProcessError: pip could not install it; its output was shown.
    """
    wanted = "\n".join(requirements()) + "\n"
    executable, stamp = FOLDER / "bin" / "python", FOLDER / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return executable
    print(f"making {FOLDER} (once): {', '.join(PINNED)}", flush=True)
    venv.create(FOLDER, clear=True, with_pip=True)
    pip = [executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    packages = installer()
    if not packages.has_nvidia_gpu():
        torch = packages.find_torch(executable)
        if torch.size == packages.CPU:  # the other one comes below, with what it requires
            where = packages.commands.variables(dict(torch.variables))
            command = [*pip, "--no-deps", torch.requirement]
            subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, env=where)
    subprocess.run([*pip, *requirements()], check=True, timeout=INSTALL_TIMEOUT_S)
    stamp.write_text(wanted)
    return executable


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


def _version(name: str) -> str:
    """Return the version without its local part: one index calls a release `2.13.0+cpu`, another one `2.13.0`."""
    return metadata.version(name).partition("+")[0]
