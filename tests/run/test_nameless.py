"""Ranks meet on a machine whose own name cannot be resolved, as on a laptop without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash.run.processes.launcher import ON_ONE_MACHINE

RANKS = """
import multiprocessing
import torch.distributed as dist
from flash.foreign.torch import open_store, reach_store

def rank(index, store):
    dist.init_process_group("gloo", store=store, rank=index, world_size=2)
    dist.barrier()
    print("met\\n", end="", flush=True)
    dist.destroy_process_group()

def other(port):
    rank(1, reach_store("127.0.0.1", port, 60))

if __name__ == "__main__":
    store, port = open_store("127.0.0.1", 60)
    process = multiprocessing.get_context("spawn").Process(target=other, args=(port,))
    process.start()
    rank(0, store)
    process.join()
"""
"""Program with two ranks that meet in a store."""
NAMELESS = ["unshare", "--net", "--uts", "sh", "-c", 'ip link set lo up && hostname leads-nowhere && exec "$@"', "sh"]
"""Command before another command, which then runs on a machine whose own name cannot be resolved."""


@pytest.mark.integration
def test_processes_of_a_machine_whose_name_leads_nowhere_meet_and_nothing_is_said(tmp_path: Path) -> None:
    if subprocess.run([*NAMELESS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network of a test's own can be made here")
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [*NAMELESS, sys.executable, str(tmp_path / "ranks.py")]
    own = os.environ | ON_ONE_MACHINE | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=own)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "met\n" * 2
