"""What the fault run takes for a lie, and for late."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from benchmarks.sandbox.faults import Outcome, rows
from benchmarks.sandbox.faults_tally import GRACE_S, Proof, Tally
from envs.sandbox.api import Result
from flash.errors import SandboxLostError

TRUE = Result(
    exit_code=3,
    signal=None,
    timed_out=False,
    oom_killed=False,
    stdout=b"n\n",
    stderr=b"n-3\n",
    stdout_truncated=False,
    stderr_truncated=False,
    wall_s=0.1,
    cpu_s=0.0,
    max_rss=0,
)
PROOF = Proof("n", 3, b"n\n", b"n-3\n")


def test_only_what_the_command_must_give_is_true():
    assert PROOF.fault_of(TRUE, 5.0) == ""
    for change in ({"exit_code": 0}, {"stdout": b""}, {"stderr": b"x"}, {"signal": "SIGKILL", "exit_code": None}):
        assert PROOF.fault_of(msgspec.structs.replace(TRUE, **change), 5.0)
    late = msgspec.structs.replace(TRUE, exit_code=None, signal="SIGTERM", timed_out=True, stderr=b"")
    assert PROOF.fault_of(late, 5.0), "it claims that 5 s were over after 0.1 s"
    assert PROOF.fault_of(msgspec.structs.replace(late, wall_s=5.0), 5.0) == ""


@pytest.mark.anyio
@pytest.mark.virtual
async def test_answers_are_counted_by_kind_and_against_their_deadline():
    async def answer(seconds: float, error: Exception | None = None) -> str:
        await anyio.sleep(seconds)
        if error is not None:
            raise error
        return "x"

    tally = Tally()
    assert await tally.answered("run", 5, lambda: answer(1)) == "x"
    assert await tally.answered("run", 5, lambda: answer(1, SandboxLostError("gone"))) is None
    assert await tally.answered("run", 5, lambda: answer(1, ValueError("a bug"))) is None
    await tally.cancelled("run", 1, lambda: answer(100))
    assert tally.answers == {
        "run: answered": 1,
        "run: SandboxLostError": 1,
        "run: untyped": 1,
        "cancelled run: cancelled": 1,
    }
    assert tally.untyped == ["run: ValueError: a bug"]
    tally.check(False, "a lie")
    whole = Tally()
    whole.add(tally)
    whole.add(tally)
    assert (len(whole.false), whole.checks, whole.answers["run: answered"]) == (2, 2, 2)


def test_the_goals_are_missed_by_one():
    outcome = Outcome(
        tally=Tally(false=["x"], late=["x"], untyped=["x"], overtime_s=GRACE_S + 1),
        faults={"kills_of_agent": 3},
        leaked=["x"],
        leftovers=["x"],
        settled_s=1.0,
        seconds=10.0,
    )
    missed = {row.metric for row in rows(outcome) if row.met is False}
    assert missed == {
        "leaked",
        "processes_leaked",
        "false_successes",
        "late_answers",
        "untyped_errors",
        "worst_lateness_s",
    }
