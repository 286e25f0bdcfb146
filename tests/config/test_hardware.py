"""Counting GPUs without CUDA, and sharing cores."""

import os
from typing import Any

import msgspec
import pytest

from flash.config.machine import count_gpus, engine_cpus, trainer_threads
from flash.config.tree import Config


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("0", 1),
        ("0, 1,3", 3),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-a,MIG-b", 2),
        ("NoDevFiles", 0),
        ("0,none,1", 1),
        ("0,0", 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_reads_them(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_gpus_are_counted_from_the_driver(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus, devices = tmp_path / "gpus", tmp_path / "dev"
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (gpus / bus).mkdir(parents=True)
    devices.mkdir()
    for name in ("nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    assert count_gpus(gpus, devices) == 0  # a container without GPUs
    (devices / "nvidia1").touch()
    assert count_gpus(gpus, devices) == 1  # a container with one of the GPUs
    (devices / "nvidia0").touch()
    assert count_gpus(gpus, devices) == 2


@pytest.mark.parametrize(
    ("script", "count"), [("echo 'GPU 0: A (UUID: x)'; echo 'GPU 1: A (UUID: y)'", 2), ("echo GPU 0; exit 9", 0)]
)
def test_gpus_are_counted_by_nvidia_smi(monkeypatch, tmp_path, script, count):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    assert count_gpus(tmp_path / "no-driver") == count


def test_a_machine_without_nvidia_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus(tmp_path / "no-driver") == 0


@pytest.mark.parametrize(
    ("cores", "async_ratio", "cluster", "engines", "threads"),
    [
        (1, 1, {}, [0], 1),
        (2, 1, {}, [0], 1),
        (3, 1, {}, [0, 1], 1),
        (8, 1, {}, [0, 1, 2, 3], 4),
        (64, 1, {}, list(range(32)), 32),
        (64, 1, {"trainer_ranks": 4}, list(range(32)), 8),
        (8, 0, {}, list(range(8)), 8),
        (8, 0, {"trainer_ranks": 2}, list(range(8)), 4),
        (8, 1, {"node_cpus": [0, 1, 2], "trainer_cpus": [3, 4, 5, 6, 7]}, [0, 1, 2], 5),
        (8, 1, {"node_cpus": [0, 1], "trainer_cpus": [1, 2]}, [0, 1], 1),
        (8, 1, {"node_cpus": [0, 1, 2, 3]}, [0, 1], 6),
        (8, 1, {"trainer_cpus": [4, 5, 6, 7]}, [0, 1, 2, 3, 4, 5], 2),
        (8, 1, {"gpus_per_node": 2}, list(range(8)), 8),
    ],
)
def test_engines_and_trainer_ranks_that_work_at_once_share_the_cores_that_both_may_use(
    cores: int, async_ratio: float, cluster: dict[str, Any], engines: list[int], threads: int
) -> None:
    tree = {
        "run": {"name": "test"},
        "model": {"path": "org/model"},
        "env": {"path": "module:Class"},
        "train": {"async_ratio": async_ratio},
        "cluster": {"gpus_per_node": 0} | cluster,
    }
    config = msgspec.convert(tree, Config)
    every = list(range(cores))
    assert engine_cpus(config, 0, config.cluster.node_cpus or every) == engines
    assert trainer_threads(config, 0, config.cluster.trainer_cpus or every) == threads
    assert engine_cpus(config, 1, every) == every, "no trainer rank is there"
