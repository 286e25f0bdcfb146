"""The cluster file: its size is bounded, it covers all restarts of a run, and it never delays the run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from flash.observe.cluster import (
    FAILURE_TEXT,
    HUB_VANISHED,
    MOST_EVENTS,
    MOST_KINDS,
    ClusterFile,
    FailureTally,
    read_cluster,
)
from flash.observe.rundir.rundir import RunDirectory
from tests.observe.clusters import cluster, hub_now

NOW = 1_700_000_000.0


def test_failures_are_counted_by_kind_with_the_last_message_in_full() -> None:
    tally = FailureTally()
    tally.failed("env_error", "first", 1.0)
    tally.failed("engine_died", "it died", 2.0)
    tally.failed("env_error", 300 * "a long story\n", 3.0)
    newest, other = tally.failures
    assert (newest.kind, newest.count, newest.first, newest.last) == ("env_error", 2, 1.0, 3.0)
    assert newest.message == 300 * "a long story\n"
    assert (other.kind, other.count, other.message) == ("engine_died", 1, "it died")


def test_what_is_kept_is_bounded_whatever_fails() -> None:
    tally = FailureTally()
    for number in range(1000):
        tally.failed(f"kind {number}", FAILURE_TEXT * "xy", float(number))
        tally.event(FAILURE_TEXT * "z", float(number))
    assert len(tally.failures) == MOST_KINDS + 1
    assert sum(each.count for each in tally.failures) == 1000
    assert max(len(each.message) for each in tally.failures) < FAILURE_TEXT + 100
    assert tally.failures[0].message.endswith(f"and {FAILURE_TEXT:,} characters more")
    assert len(tally.events) == MOST_EVENTS
    assert tally.events[-1].at == 999.0


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Return the directory of a new run."""
    return RunDirectory.open(tmp_path / "run", "")


def test_each_picture_replaces_the_one_before(directory: RunDirectory) -> None:
    with ThreadPoolExecutor(1) as writer:
        file = ClusterFile(directory, writer, lambda: NOW)
        assert read_cluster(directory) is None
        for version in (1, 2):
            assert file.show(hub_now(NOW, version=version)) == ""
            writer.submit(int).result()
        kept = read_cluster(directory)
        assert kept is not None
        assert kept.hub is not None
        assert (kept.hub.version, kept.lives, kept.ended) == (2, 1, "")
        file.failed("env_error", "boom")
        file.end("finished")
    kept = read_cluster(directory)
    assert kept is not None
    assert (kept.ended, [each.message for each in kept.failures]) == ("finished", ["boom"])
    assert [file.name for file in directory.path.glob("cluster*")] == ["cluster.json"]


def test_while_a_picture_is_written_the_next_ones_are_left_out_and_the_loop_goes_on(directory: RunDirectory) -> None:
    may = threading.Event()
    with ThreadPoolExecutor(1) as writer:
        file = ClusterFile(directory, writer, lambda: NOW)
        writer.submit(may.wait, 10)
        for version in range(100):
            file.show(hub_now(NOW, version=version))
        may.set()
        writer.submit(int).result()
        kept = read_cluster(directory)
        assert kept is not None
        assert kept.hub is not None
        assert kept.hub.version == 0
        file.end("interrupted")
    kept = read_cluster(directory)
    assert kept is not None
    assert kept.hub is not None
    assert kept.hub.version == 99


def test_a_state_after_the_end_of_the_run_does_not_replace_the_end(directory: RunDirectory) -> None:
    with ThreadPoolExecutor(1) as writer:
        file = ClusterFile(directory, writer, lambda: NOW)
        file.end("finished")
        assert file.show(hub_now(NOW)) == ""
        writer.submit(int).result()
    kept = read_cluster(directory)
    assert kept is not None
    assert kept.ended == "finished"


def test_that_it_cannot_be_written_is_told_once_and_ends_nothing(directory: RunDirectory) -> None:
    directory.cluster.mkdir()
    with ThreadPoolExecutor(1) as writer:
        file = ClusterFile(directory, writer, lambda: NOW)
        told: list[str] = []
        for _ in range(4):
            told.append(file.show(hub_now(NOW)))
            writer.submit(int).result()
        file.end("finished")
    (warning,) = filter(None, told)
    assert "cluster.json" in warning


def test_failures_of_all_incarnations_are_kept_and_a_death_without_a_word_is_one(directory: RunDirectory) -> None:
    with ThreadPoolExecutor(1) as writer:
        first = ClusterFile(directory, writer, lambda: NOW)
        first.failed("env_error", "boom")
        first.event("node 1 is gone")
        first.show(hub_now(NOW))
        writer.submit(int).result()
        second = ClusterFile(directory, writer, lambda: NOW + 100)
        second.show(hub_now(NOW))
        writer.submit(int).result()
        kept = read_cluster(directory)
        assert kept is not None
        assert [(each.kind, each.message) for each in kept.failures] == [
            ("hub_lost", HUB_VANISHED),
            ("env_error", "boom"),
        ]
        second.end("failed", "PeerLostError: trainer rank 1 is gone")
        third = ClusterFile(directory, writer, lambda: NOW + 200)
        third.end("finished")
    kept = read_cluster(directory)
    assert kept is not None
    assert (kept.lives, kept.error, kept.hub) == (3, "", None)
    assert sorted(each.kind for each in kept.failures) == ["env_error", "hub_lost", "run_failed"]
    assert [each.text for each in kept.events] == ["node 1 is gone"]


@pytest.mark.parametrize("text", [b"", b"{", b'{"at": 1}', b"\xff\x00", b"[" * 100_000, b'{"at": "now"}'])
def test_what_is_no_picture_is_none(text: bytes, directory: RunDirectory) -> None:
    directory.cluster.write_bytes(text)
    assert read_cluster(directory) is None
    with ThreadPoolExecutor(1) as writer:
        ClusterFile(directory, writer, lambda: NOW).end("finished")
    kept = read_cluster(directory)
    assert kept is not None
    assert kept.lives == 1


def test_a_picture_of_many_nodes_stays_small() -> None:
    assert len(msgspec.json.encode(cluster(NOW, hub_now(NOW, nodes=128)))) < 200_000
