"""Reports about the end of a trainer rank, for the hub and for the user."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr

import pytest
from torch.distributed import DistBackendError

from flash.errors import CollectiveError, DeadlineError, PeerLostError, TransportError, WeightsError, error_of
from flash.hub import protocol as p
from flash.run.trainer_rank import describe_peers, report_error, send_heartbeats
from tests.run.test_launcher import make_config

PEER = "rank 3 on node 1"
"""Phrase for the other rank of a collective."""


class FakeHub:
    """Connection to a hub that keeps the reports of a rank, and raises an error in place of a reply."""

    def __init__(self, then: TransportError | None = None) -> None:
        self.told: list[p.Fatal] = []
        self._then = then or PeerLostError("the hub closed the connection")

    def call(self, request: p.Fatal, timeout: float) -> p.Ack:
        """Keep the report, and raise the error with which the connection ends."""
        self.told.append(request)
        raise self._then


@pytest.mark.parametrize(
    "error",
    [
        DeadlineError("4 engine workers to take version 3", 300, "the engines"),
        TransportError("the reply cannot be read"),
        WeightsError("tensor a is damaged"),
    ],
)
def test_every_error_of_a_rank_is_reported_to_the_hub_with_its_type(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    hub = FakeHub()
    assert report_error(hub, 2, error, seconds=1, peers=PEER), "the hub has it"
    (told,) = hub.told
    assert told.message == f"trainer rank 2: {error}"
    assert type(error_of(told.error, told.message)) is type(error)
    assert caplog.records == []


def test_a_bug_is_reported_with_its_class_and_printed_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    hub = FakeHub()
    report_error(hub, 0, KeyError("lm_head"), seconds=1, peers=PEER)
    assert hub.told == [p.Fatal("KeyError", "trainer rank 0 failed with KeyError: 'lm_head'")]
    assert "KeyError: 'lm_head'" in capsys.readouterr().err


class Unread(io.StringIO):
    """Output whose reader is gone."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_the_hub_gets_a_bug_also_if_nobody_reads_the_output() -> None:
    hub = FakeHub()
    with redirect_stderr(Unread()):
        report_error(hub, 0, KeyError("lm_head"), seconds=1, peers=PEER)
    assert hub.told == [p.Fatal("KeyError", "trainer rank 0 failed with KeyError: 'lm_head'")]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:533] Connection closed by peer [::1]:77"),
        DistBackendError("NCCL communicator was aborted on rank 1"),
    ],
)
def test_a_failed_collective_is_reported_as_an_error_that_a_restart_may_mend(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = FakeHub()
    report_error(hub, 1, error, seconds=1, peers=PEER)
    (told,) = hub.told
    kept = error_of(told.error, told.message)
    assert isinstance(kept, CollectiveError)
    assert not kept.fatal
    assert told.message.startswith(
        "trainer rank 1: a collective with rank 3 on node 1 failed, as when one is gone or cut off: "
    )
    assert str(error) in told.message
    assert capsys.readouterr().err == "", "its traceback says nothing of the cause"


def test_a_rank_that_lost_the_hub_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hub = FakeHub()
    with caplog.at_level(logging.INFO):
        assert not report_error(hub, 0, PeerLostError("the connection to hub ended"), seconds=1, peers=PEER)
    assert (hub.told, caplog.records) == ([], [])


def test_a_rank_whose_hub_does_not_react_logs_the_error_itself(caplog: pytest.LogCaptureFixture) -> None:
    hub = FakeHub(DeadlineError("the reply to Fatal from hub", 1, "the log of that process"))
    error = DeadlineError("the reply to Commit from hub", 60, "the log of that process")
    assert not report_error(hub, 1, error, seconds=1, peers=PEER), "the hub does not have it"
    (record,) = caplog.records
    assert "trainer rank 1: waited 60 s for the reply to Commit" in record.getMessage()
    assert "the hub could not be notified" in record.getMessage()


@pytest.mark.parametrize(
    ("nodes", "ranks", "index", "words"),
    [
        (1, 1, 0, "nobody"),
        (2, 1, 1, "rank 0 on node 0"),
        (1, 2, 0, "rank 1 on node 0"),
        (1, 8, 3, "7 other ranks on node 0"),
        (2, 4, 0, "7 other ranks on nodes 0 to 1"),
    ],
)
def test_a_rank_names_the_other_ranks_of_a_collective(nodes: int, ranks: int, index: int, words: str) -> None:
    assert (
        describe_peers(index, make_config(cluster={"nodes": nodes, "trainer_nodes": nodes, "trainer_ranks": ranks}))
        == words
    )


class Beaten:
    """Connection to a hub that answers a number of heartbeats, and then ends."""

    def __init__(self, answers: int) -> None:
        self.heard: list[p.RankHeartbeat] = []
        self._answers = answers

    def call(self, request: p.RankHeartbeat, timeout: float) -> p.Ack:
        """Answer a heartbeat; raise an error after `answers` of them."""
        self.heard.append(request)
        if len(self.heard) > self._answers:
            raise PeerLostError("the hub is gone")
        return p.Ack()


def test_a_rank_sends_heartbeats_until_the_hub_is_gone() -> None:
    hub = Beaten(3)
    send_heartbeats(hub, 2)
    assert hub.heard == [p.RankHeartbeat(2)] * 4
