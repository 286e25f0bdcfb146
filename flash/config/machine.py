"""Machine: its GPUs, the C++ compiler for the engines' graphs, and the division of cores between engines and
trainers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flash.config.tree import Config
from flash.errors import ConfigError

NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder with one entry per GPU, which NVIDIA's kernel driver provides."""


NVIDIA_SMI_TIMEOUT = 30.0
"""Timeout of `nvidia-smi`, in seconds. The tool takes a few seconds if the driver is not loaded yet."""


def count_gpus(driver: Path = NVIDIA_DRIVER) -> int:
    """Return the number of NVIDIA GPUs that CUDA would show to a process of this machine, without using CUDA.

    Raises:
        ConfigError: `nvidia-smi` did not answer in time.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = 0
        for name in visible.split(","):
            if not name.strip() or name.strip().startswith("-"):  # CUDA ignores what follows an invalid entry
                break
            count += 1
        return count
    if driver.is_dir():
        return sum(1 for _ in driver.iterdir())
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"`nvidia-smi -L` did not answer within {NVIDIA_SMI_TIMEOUT:g} s; set cluster.gpus_per_node"
        ) from None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


COMPILER = "g++"
"""Compiler that torch's inductor calls on Linux, unless CXX names another one."""

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
"""Header file of Python that is included first; it is missing if Python's headers are not installed."""

COMPILER_TIMEOUT_S = 20.0
"""Timeout for asking a compiler for its version, in seconds. The file system that holds it may be slow at first."""


def engine_cpus(config: Config, node: int, cpus: Sequence[int]) -> list[int]:
    """Return the cores on which a node's loop and its CPU engines run. `cpus`: the cores that the loop may use."""
    contested = _contested(config, node, cpus, config.cluster.trainer_cpus)
    given_up = contested[(len(contested) + 1) // 2 :]
    return [cpu for cpu in cpus if cpu not in given_up]


def trainer_threads(config: Config, node: int, cpus: Sequence[int]) -> int:
    """Return the number of threads of each trainer rank on the CPU, if the ranks of a node may use these cores."""
    contested = _contested(config, node, cpus, config.cluster.node_cpus)
    return max(1, (len(cpus) - (len(contested) + 1) // 2) // config.cluster.trainer_ranks)


def _contested(config: Config, node: int, own: Sequence[int], others: Sequence[int] | None) -> list[int]:
    """Return the cores that both the engines and the trainer ranks of a node would use at the same time.

    Each side gets half of them: one thread that waits for its core delays its whole operation. If engines and trainers
    take turns, no core is contested, and each side may use all.
    """
    take_turns = config.train.async_ratio == 0
    if config.gpus_per_node > 0 or take_turns or not config.cluster.trainer_ranks_on(node):
        return []
    return [cpu for cpu in own if others is None or cpu in others]


def runs_eagerly(config: Config) -> bool:
    """Return True if engines of this configuration run without compiled graphs on this machine."""
    return config.engine.enforce_eager or why_eager(config) is not None


def why_eager(config: Config) -> str | None:
    """Return the warning for engines that run eagerly although the configuration did not ask for it; None if none do.

    The warning says what would make the engines compile their graphs.
    """
    if config.gpus_per_node > 0 or config.engine.enforce_eager or (lacking := lacks()) is None:
        return None
    return (
        f"engines run without compiled graphs, as if it were true: {lacking}. Their steps are slower. To have them "
        f"compiled {remedy()}"
    )


def lacks(headers: Path = HEADERS) -> str | None:
    """Return what is missing on this machine to compile graphs for the CPU; None if nothing is missing."""
    name = compiler()
    if not _answers(name, os.environ.get("PATH", os.defpath)):
        named = f"{name!r}, which CXX names, is none" if "CXX" in os.environ else f"{name} is not on PATH"
        return f"torch finds no C++ compiler ({named})"
    if not headers.is_file():
        return f"Python's headers are not installed ({headers})"
    return None


def remedy() -> str:
    """Return the advice how to install what `lacks` names."""
    return f"install {COMPILER} and Python's headers (Debian, Ubuntu: apt install g++ python3-dev), or set CXX"


def compiler() -> str:
    """Return the compiler that torch calls, chosen as `torch._inductor.config.cpp.cxx` chooses it."""
    return os.environ.get("CXX", COMPILER)


@cache
def _answers(name: str, path: str) -> bool:
    """Return True if a program found on `path` prints its version, which is how torch checks for a compiler."""
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
