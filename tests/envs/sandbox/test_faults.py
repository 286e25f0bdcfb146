"""Real containers under load, with everything killed at random; and what the run counts as false, and as late."""

from __future__ import annotations

import os
import shutil

import anyio
import msgspec
import pytest

from envs.sandbox.api import Result
from flash.errors import SandboxLostError
from tests.envs.sandbox.fault_run import SETTLE_S, Plan, faults
from tests.envs.sandbox.fault_tally import GRACE_S, Proof, Tally

PLAN = Plan(seconds=20, seed=1, processes=2, users=2, container_every_s=1.5, service_every_s=7, engine_every_s=7)


@pytest.fixture
def _own_engine(engine_url) -> None:
    """Images can be made here; the engine itself is the run's own, because it is killed."""
    if shutil.which("podman") is None or os.geteuid() != 0:
        reason = "an engine that may be killed needs root and podman"
        if os.environ.get("FLASH_REQUIRE_CONTAINERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.mark.anyio
@pytest.mark.integration
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("_own_engine")
async def test_kills_of_everything_leak_nothing_lie_to_nobody_and_keep_nobody_waiting():
    outcome = await faults(PLAN)
    assert outcome.leaked == []
    assert outcome.leftovers == []
    assert outcome.tally.false == []
    assert outcome.tally.late == []
    assert outcome.tally.untyped == []
    assert outcome.tally.done > 0
    assert {"kills_of_service", "kills_of_engine"} <= set(outcome.faults)
    assert outcome.tally.overtime_s <= GRACE_S
    assert outcome.settled_s <= SETTLE_S


# -- the counts -----------------------------------------------------------------------------------------------------

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
