"""What a machine has: GPUs, a compiler for the engine's kernels, and the cores that engines and trainer ranks share."""

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
"""One folder per GPU, kept by NVIDIA's kernel driver."""


NVIDIA_SMI_TIMEOUT = 30.0
"""Seconds; the tool takes a few where the driver has to wake up."""


def count_gpus(driver: Path = NVIDIA_DRIVER) -> int:
    """NVIDIA GPUs that CUDA would show to a process of this machine, found without CUDA."""
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
"""What torch's inductor calls on Linux, unless CXX names another program."""

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
"""The first of Python's headers, where there are any."""

COMPILER_TIMEOUT_S = 20.0
"""For a compiler's version; it may lie on a file system that is slow to wake up."""


def engine_cpus(config: Config, node: int, cpus: Sequence[int]) -> list[int]:
    """Of the cores that a node's loop may use, those that its engines on the CPU and the loop itself work on."""
    contested = _contested(config, node, cpus, config.cluster.trainer_cpus)
    given_up = contested[(len(contested) + 1) // 2 :]
    return [cpu for cpu in cpus if cpu not in given_up]


def trainer_threads(config: Config, node: int, cpus: Sequence[int]) -> int:
    """Threads of each trainer rank on the CPU, where the ranks of a node may use these cores."""
    contested = _contested(config, node, cpus, config.cluster.node_cpus)
    return max(1, (len(cpus) - (len(contested) + 1) // 2) // config.cluster.trainer_ranks)


def _contested(config: Config, node: int, own: Sequence[int], others: Sequence[int] | None) -> list[int]:
    """Cores that engines and trainer ranks of a node would both work on at once. They get a half each: a thread that
    waits for its core is waited for by all of its operation. Where they take turns each may use all."""
    take_turns = config.train.async_ratio == 0
    if config.gpus_per_node > 0 or take_turns or not config.cluster.trainer_ranks_on(node):
        return []
    return [cpu for cpu in own if others is None or cpu in others]


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


def lacks(headers: Path = HEADERS) -> str | None:
    """What this machine lacks to compile graphs for the CPU; None: nothing."""
    name = compiler()
    if not _answers(name, os.environ.get("PATH", os.defpath)):
        named = f"{name!r}, which CXX names, is none" if "CXX" in os.environ else f"{name} is not on PATH"
        return f"torch finds no C++ compiler ({named})"
    if not headers.is_file():
        return f"Python's headers are not installed ({headers})"
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
