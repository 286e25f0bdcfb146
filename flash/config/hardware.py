"""What the machine has, found without CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from flash.errors import ConfigError

NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
"""One folder per GPU, kept by NVIDIA's kernel driver."""


NVIDIA_SMI_TIMEOUT = 30.0
"""Seconds; the tool takes a few where the driver has to wake up."""


def count_gpus() -> int:
    """NVIDIA GPUs that CUDA would show to a process of this machine, found without CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = 0
        for name in visible.split(","):
            if not name.strip() or name.strip().startswith("-"):  # CUDA ignores what follows an invalid entry
                break
            count += 1
        return count
    if NVIDIA_DRIVER.is_dir():
        return sum(1 for _ in NVIDIA_DRIVER.iterdir())
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
