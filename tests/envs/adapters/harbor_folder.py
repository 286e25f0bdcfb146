"""A task in Harbor's format, made by hand."""

from __future__ import annotations

from pathlib import Path

TESTS = """#!/bin/bash
if [ "$(cat greeting.txt 2>/dev/null)" = "hello $LEVEL" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
"""Run in the folder in which the shell of the policy began."""


def write_task(
    folder: Path,
    instruction: str,
    *,
    top: str = "",
    environment: str = 'cpus = 1\nmemory = "2G"\nstorage = "10G"',
    verifier: str = 'timeout_sec = 120.0\nenv = { LEVEL = "3" }',
    dockerfile: str = "FROM debian:bookworm\nWORKDIR /app\nRUN true\nworkdir src\n",
) -> None:
    """Write the task's folder, as the format's documentation describes it."""
    (folder / "environment").mkdir(parents=True, exist_ok=True)
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "task.toml").write_text(
        f'version = "1.0"\n{top}\n[metadata]\nauthor_name = "N. N."\ntags = ["small"]\n[verifier]\n{verifier}\n'
        f"[agent]\ntimeout_sec = 120.0\n[environment]\nbuild_timeout_sec = 600.0\n{environment}\n"
    )
    (folder / "instruction.md").write_text(f"{instruction}\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "tests" / "test.sh").write_text(TESTS)
