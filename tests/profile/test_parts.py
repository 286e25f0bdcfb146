"""One trace of many files, and where their time went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.errors import ConfigError
from flash.profile.order import RecordingFacts
from flash.profile.parts import own_times, parts_in, read_part, whole_trace

BASE_NS = 1_700_000_000_000_000_000
FACTS = {"who": "trainer 0", "begin": 1_700_000_001.0, "end": 1_700_000_003.0, "steps": 2, "resident": 1 << 30}


def event(name: str, ts: float, dur: float, *, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur, **more}


def write_part(file: Path, events: list[dict[str, Any]], **facts: Any) -> Path:
    made = {"baseTimeNanoseconds": BASE_NS, "flash": FACTS | facts, "traceEvents": events}
    file.write_bytes(gzip.compress(json.dumps(made).encode()))
    return file


def read_whole(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_parts_keep_apart_what_each_numbers_for_itself_and_share_one_time(tmp_path: Path) -> None:
    flow = {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 3, "pid": 7, "tid": 7, "ts": 1e6}
    label = {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 9.0, "args": {"labels": "GPU 0"}}
    thread = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "ts": 9.0, "args": {"name": "main"}}
    own = {"ph": "X", "name": "PyTorch Profiler", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1.0, "dur": 1.0}
    kernel = event("gemm", 1.5e6, 10.0, cat="kernel", pid=0, tid=20)
    shared = [event("aten::mm", 1e6, 100.0), flow, label, thread, own, kernel]
    files = [
        write_part(tmp_path / "trainer-0.json.gz", shared),
        write_part(tmp_path / "engine-0.json.gz", shared, who="engine 0"),
    ]
    whole = tmp_path / "trace.json.gz"
    with whole_trace(whole, begin=1_699_999_990.0) as trace:
        trace.put({"ph": "X", "name": "train", "pid": 1, "tid": 1, "ts": 11_000_000, "dur": 5})
        for file in files:
            trace.add(*read_part(file))
    events = read_whole(whole)
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert sorted(names.values()) == ["engine 0", "engine 0, GPU 0", "trainer 0", "trainer 0, GPU 0"]
    assert {each["ts"] for each in events if each["name"] in ("aten::mm", "train")} == {11_000_000}
    assert len({each["id"] for each in events if each["ph"] == "s"}) == 2
    assert all(isinstance(each["pid"], int) for each in events)
    assert {names[each["pid"]] for each in events if each["name"] == "gemm"} == {"engine 0, GPU 0", "trainer 0, GPU 0"}
    assert [each for each in events if each["ph"] == "M" and "ts" in each] == []


def test_a_part_comes_down_to_the_own_times_of_operators_and_kernels(tmp_path: Path) -> None:
    memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 7, "tid": 7, "ts": 1.0}
    file = write_part(
        tmp_path / "trainer-0.json.gz",
        [
            event("outer", 0.0, 10e6),
            event("inner", 1e6, 4e6),
            event("inner", 5e6, 1e6),
            event("inner", 2e6, 1e6, tid=8),
            event("gemm", 3e6, 2e6, cat="kernel"),
            memory | {"args": {"Device Type": 0, "Total Allocated": 10}},
            memory | {"args": {"Device Type": 0, "Total Allocated": 30}},
            memory | {"args": {"Device Type": 1, "Total Allocated": 900}},
        ],
    )
    with whole_trace(tmp_path / "trace.json.gz", begin=0.0) as trace:
        measured = trace.add(*read_part(file))
    assert measured.facts == RecordingFacts("trainer 0", 1_700_000_001.0, 1_700_000_003.0, 2, 1 << 30)
    assert measured.cpu == {"outer": (1, 5.0), "inner": (3, 6.0)}
    assert measured.gpu == {"gemm": (1, 2.0)}
    assert measured.grown == 30


whole_numbers = st.integers(0, 20)


@given(st.lists(st.tuples(whole_numbers, whole_numbers), max_size=20))
def test_own_times_add_up_to_the_time_in_which_there_was_any(bars: list[tuple[int, int]]) -> None:
    times = list(own_times([(start * 1e6, length * 1e6, "x") for start, length in bars]))
    assert len(times) == len(bars)
    covered = {moment for start, length in _nested(bars) for moment in range(start, start + length)}
    assert sum(seconds for _, seconds in times) == pytest.approx(len(covered))


def _nested(bars: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of bars when each is cut where the one around it ends, as of calls."""
    cut: list[tuple[int, int]] = []
    opened: list[int] = []
    for start, length in sorted(bars, key=lambda bar: (bar[0], -bar[1])):
        while opened and opened[-1] <= start:
            opened.pop()
        stop = min([start + length, *opened[-1:]])
        opened.append(stop)
        cut.append((start, stop - start))
    return cut


CUT_OFF = {
    "empty": b"",
    "else": b"no gzip",
    "half": gzip.compress(b'{"traceEvents": [{"a'),
    "bare": gzip.compress(b"{}"),
}


@pytest.mark.parametrize("content", CUT_OFF.values(), ids=CUT_OFF)
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trainer-0.json.gz"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trainer-0\.json\.gz cannot be read: "):
        read_part(file)


def test_a_trace_of_somebody_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trainer-0.json.gz"
    file.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(ConfigError, match="does not say what was recorded"):
        read_part(file)


def test_a_trace_that_fails_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), whole_trace(tmp_path / "trace.json.gz", begin=0.0):
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError), whole_trace(tmp_path / "gone" / "trace.json.gz", begin=0.0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_parts_are_ranks_then_engines_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["trainer-2", "trainer-10", "engine-0", "engine-0-worker-1"]
    for name in [*reversed(names), "trace", ".trainer-3"]:
        (tmp_path / f"{name}.json.gz").touch()
    assert [file.name.partition(".")[0] for file in parts_in(tmp_path)] == names
