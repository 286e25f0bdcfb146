"""Trainers on two hosts, and nodes that come and go, over a wire that is slow, loses packets and is cut."""

from __future__ import annotations

import re
import signal
from itertools import permutations
from pathlib import Path

import pytest

from tests.cluster.hosts import FaultyHosts, Way
from tests.cluster.job import HUB_PORT, Job
from tests.integration.held_env import held
from tests.integration.whole_run import CONFIG, given_up

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 32
BATCH = 8
GROUP = 4
COLLECTIVE_S = 10
"""More than a busy machine keeps a trainer rank from a collective; the cut lasts longer."""
WAIT = r"(?im)^(?!\[W).*(?:waited [\d.]+ s for|timed out|silent for|the trainer ranks start again, and).*$"
"""A line that says that a wait has ended, or what it was that ended one; warnings of torch itself aside."""
PEER = r"\bhub\b|node \d|rank \d|10\.77\.0\.\d"


def set_ways(hosts: FaultyHosts, way: Way) -> None:
    """Between all hosts; what was cut is whole again."""
    for source, target in permutations(range(len(hosts.names)), 2):
        hosts.set_way(source, target, way)


@pytest.mark.parametrize("hosts", [("node9", "node10", "node11")], indirect=True)
def test_trainers_on_two_hosts_go_on_over_a_bad_wire_and_come_back_alone_after_each_cut(
    hosts: FaultyHosts, tmp_path: Path, model: Path
) -> None:
    """Gloo does not connect again: what a cut has kept from one rank for too long ends the incarnation of all ranks."""
    gate, bad = tmp_path / "gate", Way(delay_s=0.01, loss=0.005)
    job = Job(
        *(hosts, tmp_path, model, "cluster.trainer_nodes=2", f"cluster.hub=:{HUB_PORT}"),
        *(f"run.steps={STEPS}", f"train.batch_size={BATCH}", f"deadlines.collective={COLLECTIVE_S}"),
        text=held(CONFIG, gate),
    )
    set_ways(hosts, bad)
    gate.write_text(str(2 * BATCH))
    trainers = [job.train(host) for host in range(2)]
    job.until(lambda: len(job.rows("metrics.jsonl")) >= 2, "two steps")

    guest = job.start(2, "join", str(job.run))
    job.until_said(2, "makes samples after")
    gate.write_text(str(4 * BATCH))
    job.until_engines(3)

    # One direction alone: what node 1 sends arrives and it hears nothing, then the other way round.
    for still, batches in (("hears", 6), ("sends", 9)):
        told = job.text(0)
        hosts.cut(1, **{still: True})
        gate.write_text(str(batches * BATCH))
        job.until_more(0, "The trainer ranks start again, and the engines go on meanwhile", told)
        set_ways(hosts, bad)
        job.until_more(0, "the trainer ranks are back at version ", told)
        gate.write_text(str((batches + 1) * BATCH))
        job.until_engines(3)

    guest.send_signal(signal.SIGTERM)
    assert guest.wait(60) == 0, job.told()
    job.until_said(0, "has left, and 1 of 3 engines with it: the other 2 do its work")
    set_ways(hosts, Way())
    gate.write_text(str(STEPS * BATCH))
    assert [trainer.wait(120) for trainer in trainers] == [0, 0], job.told()

    job.nothing_lost()
    summary, told = job.summary(), job.text(0)
    # At most the rest of a group, of which the last steps have trained a part, was on its way when the run ended.
    assert given_up(summary["ledger"]) <= {"stale", "cancelled"}
    assert summary["ledger"].get("given_up_cancelled", 0) < GROUP
    assert len({row["group_id"] for row in job.rows("samples.jsonl")}) == STEPS * BATCH // GROUP
    assert len(job.rows("metrics.jsonl")) == STEPS
    assert summary["restarts"] == 0, told
    # A start that the cut wire keeps from its end is told of, too, and is made anew.
    backs = told.count("the trainer ranks are back at version ")
    assert 2 <= backs <= summary["trainer_restarts"] <= told.count("The trainer ranks start again"), told
    # They are compared where the version was published before the cut.
    assert "other weights than before" not in told, told
    waits = re.findall(WAIT, job.told())
    assert [wait for wait in waits if not re.search(PEER, wait)] == []
    job.nothing_left(0, 1, 2)
