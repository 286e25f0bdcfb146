"""A profile in words."""

from __future__ import annotations

from flash.profile.order import RecordingFacts
from flash.profile.parts import Measured
from flash.profile.report import report
from flash.types import Activity

TRAINER = RecordingFacts("trainer 0", 100.0, 110.0, 3, 3 << 30)


def measured(facts: RecordingFacts, **more: object) -> Measured:
    empty = {"cpu": {}, "gpu": {}, "grown": 0}
    return Measured(facts, **(empty | more))  # pyright: ignore[reportArgumentType]


def test_a_rank_shows_its_shares_and_its_dearest_operators() -> None:
    spans = [
        Activity("trainer 0", "train", 90.0, 104.0),
        Activity("trainer 0", "train", 102.0, 106.0),
        Activity("trainer 0", "wait", 106.0, 130.0),
        Activity("trainer 1", "publish", 100.0, 110.0),
    ]
    cpu = {f"op{rank}": (rank, float(rank)) for rank in range(10)} | {"x" * 100: (1, 20.0)}
    lines = report([measured(TRAINER, cpu=cpu, gpu={"gemm": (7, 5.0)})], spans)
    assert lines[0] == "trainer 0: 3 training steps in 10.00 s: train 60%, wait 40%"
    assert lines[2].split() == ["x" * 61 + "…", "20.000", "200.0%", "1"]
    assert lines[3].split() == ["op9", "9.000", "90.0%", "9"]
    assert any(line.split() == ["gemm", "5.000", "50.0%", "7"] for line in lines)
    assert not any("op1 " in line for line in lines), "the table is short"
    assert all(len(line) <= 100 for line in lines)


def test_memory_says_what_there_is() -> None:
    device = RecordingFacts("engine 0", 0.0, 1.0, 1, 1 << 30, device=5 << 30, snapshot="engine-0.memory.pickle")
    lines = report([measured(TRAINER, grown=50 << 20)], [])
    assert "  trainer 0: process at most 3.00 GiB so far; torch at most 50 MiB beyond what it began with" in lines
    assert "snapshots of GPUs only" in lines[-1]
    assert report([measured(device)], [])[-1] == (
        "  engine 0: process at most 1.00 GiB so far; torch on the GPU at most 5.00 GiB; "
        "engine-0.memory.pickle: open it at pytorch.org/memory_viz"
    )
