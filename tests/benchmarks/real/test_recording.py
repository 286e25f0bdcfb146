"""What recording costs is counted once for each call, by thread."""

from __future__ import annotations

import pytest

from benchmarks.real.recording import PARTS, WRITER, compared
from benchmarks.real.recording_probe import TIMED, sums_of, timed


def test_calls_inside_of_others_count_once() -> None:
    inner = timed("test inner", lambda: 1)
    outer = timed("test outer", lambda: inner() + inner())
    assert (outer(), inner()) == (2, 1)
    assert (sums_of.pop("test outer")["calls"], sums_of.pop("test inner")["calls"]) == (1, 1)


def test_every_call_that_is_timed_belongs_to_one_part() -> None:
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(name for _, name in TIMED)
    assert set(WRITER) <= set(named)


def test_parts_add_up_to_the_whole() -> None:
    calls = {
        name: {"calls": 1, "seconds": 1.0, "processor_s": 0.5, "longest_s": 0.002 * place, "longest_processor_s": 0.001}
        for place, (_, name) in enumerate(TIMED)
    }
    found = compared({"calls": calls, "process_s": 50.0}, 100.0, 300.0)
    whole, loop, thread, trainer = (row.ours for row in found[:4])
    assert trainer == pytest.approx(0.3 / 100.0)
    assert whole == pytest.approx(0.005 * len(TIMED) + trainer)
    assert whole == pytest.approx(loop + thread + trainer)
    assert whole == pytest.approx(trainer + sum(row.ours for row in found if row.case.startswith("  ")))
    assert [row.met for row in found if row.goal is not None] == [False, False, True]
    assert not any(row.higher_is_better for row in found)
