"""Whether engines on the CPU can run compiled graphs, or run eagerly although nobody asked for that.

torch makes C++ of a model, and a compiler and Python's headers make a library of it. Without them an engine would fail
minutes after its start, so it then runs as with `engine.enforce_eager`. On GPUs nothing of this is needed.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

from flash.config.tree import Config

COMPILER = "g++"
"""What torch's inductor calls on Linux, unless CXX names another program."""

COMPILER_TIMEOUT_S = 20.0
"""For a compiler's version; it may lie on a file system that is slow to wake up."""


def runs_eagerly(config: Config) -> bool:
    """Whether engines of this configuration run without compiled graphs on this machine."""
    return config.engine.enforce_eager or why_eager(config) is not None


def why_eager(config: Config) -> str | None:
    """What people are told where engines run eagerly though nobody asked for it, and what would have them compiled."""
    if config.gpus_per_node > 0 or config.engine.enforce_eager or (lacking := lacks()) is None:
        return None
    return (
        f"engines run without compiled graphs, as if it were true: {lacking}. Their steps are slower. To have them "
        f"compiled {remedy()}"
    )


def lacks() -> str | None:
    """What this machine lacks to compile graphs for the CPU; None: nothing."""
    name = compiler()
    if not _answers(name, os.environ.get("PATH", os.defpath)):
        named = f"{name!r}, which CXX names, is none" if "CXX" in os.environ else f"{name} is not on PATH"
        return f"torch finds no C++ compiler ({named})"
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        return f"Python's headers are not installed ({folder / 'Python.h'})"
    return None


def remedy() -> str:
    """How a machine gets what it lacks."""
    return f"install {COMPILER} and Python's headers (Debian, Ubuntu: apt install g++ python3-dev), or set CXX"


def compiler() -> str:
    """The program that torch calls, as `torch._inductor.config.cpp.cxx` chooses it."""
    return os.environ.get("CXX", COMPILER)


@cache
def _answers(name: str, path: str) -> bool:
    """Whether a program found on `path` tells its version, as torch asks it."""
    try:
        asked = subprocess.run(
            [name, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=COMPILER_TIMEOUT_S,
            env=os.environ | {"PATH": path},
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return False
    return asked.returncode == 0
