"""A machine whose name leads nowhere, as that of a laptop without a network may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
os.write(1, ("met " + os.environ["MASTER_ADDR"] + os.linesep).encode())  # in one piece, as both write here
dist.destroy_process_group()
"""
AGENT = """
import sys
from flash.run.processes.agents import stay_on_this_machine
stay_on_this_machine()
from flash.foreign.torch import torchrun
from flash.run.processes.agents import STANDALONE
class Overseer:
    def hanging(self, processes): return []
    def failed(self, ended, restarts_left): return True
options = [*STANDALONE, "--nproc-per-node=2", "--log-dir=" + sys.argv[1]]
sys.exit(not torchrun([*options, sys.argv[1] + "/worker.py"], Overseer(), 5))
"""
NAMELESS = ["unshare", "--net", "--uts", "sh", "-c", 'ip link set lo up && hostname leads-nowhere && exec "$@"', "sh"]


@pytest.mark.integration
def test_processes_of_a_machine_whose_name_leads_nowhere_meet_and_nothing_is_said(tmp_path: Path) -> None:
    if subprocess.run([*NAMELESS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network of a test's own can be made here")
    (tmp_path / "worker.py").write_text(WORKER)
    own = {name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")}
    command = [*NAMELESS, sys.executable, "-c", AGENT, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, env=own | {"OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "met 127.0.0.1\n" * 2
