"""Errors that torch raises on a rank whose peers are gone or late are recognised as failed collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

RANK = """if True:
    import os, signal, sys
    from datetime import timedelta
    import torch, torch.distributed as dist
    from flash.foreign.torch import collective_failed

    folder, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    impatient = dist.new_group(timeout=timedelta(seconds=0.5))

    def outcome(group):
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except Exception as error:
            return f"{collective_failed(error)} {error}"

    if rank == 0:
        print(outcome(impatient))
        dist.send(torch.zeros(1), 1)
        print(outcome(None))
        print(collective_failed(RuntimeError("expected Float but found Long")))
    else:
        dist.recv(torch.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(100)
def test_the_errors_of_gloo_when_a_rank_is_late_or_killed_are_those_of_collectives(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in (0, 1)
    ]
    try:
        late, killed, other = ranks[0].communicate(timeout=90)[0].splitlines()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert late.startswith("True "), late
    assert killed.startswith("True "), killed
    assert other == "False"
