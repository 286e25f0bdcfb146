"""Counting GPUs without CUDA."""

import os

import pytest

from flash.config.machine import count_gpus


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("0", 1), ("0,1,3", 3), ("-1", 0), ("0,-1,1", 1), ("GPU-a,MIG-b", 2)]
)
def test_visible_devices_are_counted_as_cuda_reads_them(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_gpus_are_counted_from_the_driver(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    assert count_gpus(tmp_path / "gpus") == 2


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
