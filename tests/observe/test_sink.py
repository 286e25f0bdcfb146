"""Sink of a tracker: the run passes every row to it, never waits for it, and does not fail if it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import BreakerError
from flash.observe.alarms import RaisedAlarm
from flash.observe.recorder import Recorder
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.trackers.feed import SILENT_S, WAITING, Feed
from flash.observe.trackers.receivers import Receivers, SinkReceiver
from flash.simulate.clock import run_virtual
from tests.observe.sample_rows import eval_row, metrics_row

WAIT_S = 10.0
"""Longest wait for the other thread, in seconds."""


class Good:
    """Sink that keeps the rows that it is given."""

    def __init__(self, config: dict[str, Any], resumed_at: int | None) -> None:
        self.config, self.resumed_at = config, resumed_at
        self.rows: list[tuple[str, dict[str, Any]]] = []
        made.append(self)

    def __call__(self, kind: str, row: dict[str, Any]) -> None:
        self.rows.append((kind, row))


class Failing(Good):
    """Sink that fails on the steps 1 and 2, but keeps their rows."""

    def __call__(self, kind: str, row: dict[str, Any]) -> None:
        super().__call__(kind, row)
        if kind == "step" and row["step"] in (1, 2):
            raise ConnectionError(f"no tracker for step {row['step']}")


class Slow(Good):
    """Sink that takes no row before the test allows it."""

    may = threading.Event()

    def __call__(self, kind: str, row: dict[str, Any]) -> None:
        assert self.may.wait(WAIT_S)
        super().__call__(kind, row)


def broken(config: dict[str, Any], resumed_at: int | None) -> Good:
    """Raise an error in place of making a sink."""
    raise OSError("no key for the tracker")


def nothing(config: dict[str, Any], resumed_at: int | None) -> None:
    """Factory that fails to return a sink."""


made: list[Good] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forget the sinks of other tests, and let `Slow` wait again."""
    made.clear()
    Slow.may.clear()


class NoText:
    """Tokenizer without texts."""

    def token_texts(self, token_ids: Any) -> list[str]:
        return []


def make_config(folder: Path, sink: str, **more: Any) -> Config:
    """Return the configuration of a run in `folder` with one of the sinks of this file."""
    return msgspec.convert(
        {
            "run": {"name": "run", "output_dir": str(folder)},
            "model": {"path": "none"},
            "env": {"path": "none:None"},
            "track": {"to": [f"{__name__}:{sink}"]},
            "cluster": {"gpus_per_node": 0},
            **more,
        },
        Config,
    )


def play(
    folder: Path, sink: str, *, steps: int = 4, resume_at: int | None = None, end: Callable[[Recorder], None]
) -> float:
    """Record steps of one second each on the virtual clock. Returns the seconds that the loop took."""
    config = make_config(folder, sink)

    async def go() -> float:
        """Record the steps, and return the time at the end."""
        now = anyio.current_time
        with Recorder(config, NoText(), now=now, resume_at=resume_at, restarts=0) as recorder:
            recorder.evaluation(eval_row(0, 0.5))
            for step in range(steps):
                await anyio.sleep(1)
                recorder.step(metrics_row(step))
            end(recorder)
        return now()

    return run_virtual(go)


def finish(recorder: Recorder) -> None:
    """End the run in order."""
    recorder.finish({"issued": 4, "trained": 4}, {}, interrupted=True)


def test_a_sink_gets_the_rows_of_the_run_directory_in_order_and_then_the_summary(tmp_path: Path) -> None:
    play(tmp_path, "Good", end=finish)
    (sink,) = made
    assert [kind for kind, _ in sink.rows] == ["evaluation", *["step"] * 4, "summary"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row for kind, row in sink.rows if kind == "step"] == [json.loads(line) for line in lines]
    assert all(row["sink_lost"] == 0 for kind, row in sink.rows if kind == "step")
    assert sink.rows[-1][1] == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sink.config["run"]["name"] == "run"
    assert sink.resumed_at is None


def test_a_sink_is_told_where_a_resumed_run_goes_on_and_what_ended_it(tmp_path: Path) -> None:
    play(tmp_path, "Good", end=finish)

    def fail(recorder: Recorder) -> None:
        raise BreakerError("64 samples in a row were given up")

    with pytest.raises(BreakerError):
        play(tmp_path, "Good", resume_at=2, end=fail)
    assert made[1].resumed_at == 2
    assert made[1].rows[-1] == ("error", {"error": "BreakerError", "message": "64 samples in a row were given up"})


def test_a_failing_sink_is_told_once_and_counted_and_gets_the_next_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, "Failing", end=finish)
    (sink,) = made
    assert [row["step"] for kind, row in sink.rows if kind == "step"] == [0, 1, 2, 3]
    assert sink.rows[-1][0] == "summary"
    told = capsys.readouterr().out
    assert told.count("no tracker for step") == told.count("no tracker for step 1") == 1
    assert "Failing missed 2 of 6: 2 failed, 0 dropped" in told


@pytest.mark.parametrize(
    ("sink", "why"), [("broken", "OSError: no key for the tracker"), ("nothing", "TypeError: it returned None, which")]
)
def test_a_run_goes_on_without_a_sink_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sink: str, why: str
) -> None:
    play(tmp_path, sink, end=finish)
    told = capsys.readouterr().out
    assert told.count(why) == 1
    assert f"{sink} missed 6 of 6: 6 failed, 0 dropped" in told
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_slow_sink_holds_nothing_up_and_what_it_has_no_room_for_is_told_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = WAITING + 50

    def end(recorder: Recorder) -> None:
        Slow.may.set()
        finish(recorder)

    assert play(tmp_path, "Slow", steps=steps, end=end) == steps
    (sink,) = made
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == steps
    taken = [row["step"] for kind, row in sink.rows if kind == "step"]
    assert taken == list(range(len(taken)))
    dropped = steps - len(taken)
    assert dropped in (49, 50, 51)  # the thread may hold one row, and wait for the next
    assert json.loads(lines[-1])["sink_lost"] == dropped - 1
    assert sink.rows[-1][0] == "summary"
    told = capsys.readouterr().out
    assert told.count("rows behind") == 1
    assert f"Slow missed {dropped} of {steps + 2}: 0 failed, {dropped} dropped" in told


def test_a_sink_that_never_ends_is_left_behind_after_its_deadline() -> None:
    feed = Feed(SinkReceiver("mine", lambda: Slow({}, None)))
    for step in range(3):
        feed.put("step", {"step": step})
    feed.end(0.01)
    told = feed.close()
    Slow.may.set()
    assert told == [
        "the sink mine did not take the rest in 0.01 s and still runs",
        "the sink mine missed 3 of 3: 0 failed, 3 dropped",
    ]
    feed.end(WAIT_S)
    assert feed.close() == []


def hanging_sink_and(folder: Path, command: str) -> Receivers:
    """Return the receivers of a run whose sink takes no row. An alarm was raised, for which `command` is started."""
    receivers = Receivers(
        make_config(folder, "Slow", alarms={"command": command}), RunDirectory.open(folder / "run", ""), None
    )
    receivers.row("step", {"step": 0})
    receivers.alarm(RaisedAlarm("stale", "text"))
    return receivers


def test_a_receiver_that_hangs_takes_no_time_from_the_others(tmp_path: Path) -> None:
    told = hanging_sink_and(tmp_path, "sh -c 'cat > /dev/null'").close(2.0)
    Slow.may.set()
    assert told == [
        f"the sink {__name__}:Slow did not take the rest in 2 s and still runs",
        f"the sink {__name__}:Slow missed 1 of 1: 0 failed, 1 dropped",
    ]


def test_the_warning_about_each_receiver_that_hangs_names_the_time_that_all_of_them_had(tmp_path: Path) -> None:
    receivers = hanging_sink_and(tmp_path, f"sh -c 'echo > {tmp_path}/started; sleep 1000'")
    deadline = time.monotonic() + WAIT_S
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = receivers.close(0.1)
    Slow.may.set()
    assert told[::2] == [
        f"the sink {__name__}:Slow did not take the rest in 0.1 s and still runs",
        "alarms.command did not take the rest in 0.1 s and was ended",
    ]


def test_a_sink_that_hangs_is_told_of_once_while_the_run_goes_on() -> None:
    clock, inside = [1000.0], threading.Event()

    class Hanging(Good):
        """Sink that hangs until the test lets it go on."""

        def __call__(self, kind: str, row: dict[str, Any]) -> None:
            inside.set()
            assert Slow.may.wait(WAIT_S)

    feed = Feed(SinkReceiver("mine", lambda: Hanging({}, None)), lambda: clock[0])
    feed.put("step", {"step": 0})
    assert inside.wait(WAIT_S)
    assert feed.warnings() == []
    clock[0] += SILENT_S + 10
    (line,) = feed.warnings()
    assert line.startswith("the sink mine has not answered for 70 s: it hangs, or cannot be reached; the run goes on")
    assert feed.warnings() == []
    Slow.may.set()
    feed.end(WAIT_S)
    assert feed.close() == []
