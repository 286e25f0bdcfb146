"""Counts of the fault run: answers, and the three things that must not happen.

A *false success* is an answer that claims what is not so: another result than the command must give, or a file that was
reported as written and is not there. A *late* answer comes more than `GRACE_S` after the deadline of its call. An
*untyped* error is no `SandboxError`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import msgspec

from envs.sandbox.api import Result
from flash.errors import SandboxError

_T = TypeVar("_T")

GRACE_S = 30.0
"""Seconds after its deadline within which a call must have its answer: what the client allows the network and the
service (`httpcalls.MARGIN_S`)."""
HANG_S = 60.0
"""Seconds after which a late call is given up, so that the run ends."""
KEPT = 20
"""Descriptions kept of each thing that must not happen."""


class Tally(msgspec.Struct):
    """Counts of one process, or of all together."""

    answers: dict[str, int] = {}
    """By operation and outcome: `run: answered`, `fork: SandboxLostError`."""
    done: int = 0
    """Commands whose result came and was checked."""
    checks: int = 0
    false: list[str] = []
    late: list[str] = []
    untyped: list[str] = []
    overtime_s: float = 0.0
    """Longest time that an answer took beyond its deadline."""
    latest: str = ""
    """Kind and outcome of that answer."""

    def add(self, other: Tally) -> None:
        """Add the counts of another process."""
        for name, number in other.answers.items():
            self.answers[name] = self.answers.get(name, 0) + number
        self.done += other.done
        self.checks += other.checks
        self.false += other.false
        self.late += other.late
        self.untyped += other.untyped
        if other.overtime_s > self.overtime_s:
            self.overtime_s, self.latest = other.overtime_s, other.latest

    def check(self, ok: bool, what: str) -> None:
        """Count a proof; unless `ok`, record `what` as a false success."""
        self.checks += 1
        if not ok:
            self.false.append(f"{time.strftime('%H:%M:%S')} {what}")

    async def answered(self, kind: str, deadline: float, work: Callable[[], Awaitable[_T]]) -> _T | None:
        """Return the result of a call, or None after an error; count it, and compare its time with its deadline."""
        begin = time.monotonic()
        outcome, value = "never", None
        with anyio.move_on_after(deadline + GRACE_S + HANG_S):
            try:
                value = await work()
                outcome = "answered"
            except SandboxError as error:
                outcome = type(error).__name__
            except Exception as error:  # a boundary: what is not typed is what this run looks for
                outcome = "untyped"
                self.untyped.append(f"{kind}: {type(error).__name__}: {error}")
        self._book(kind, outcome, time.monotonic() - begin - deadline)
        return value

    async def cancelled(self, kind: str, after: float, work: Callable[[], Awaitable[object]]) -> None:
        """Make a call and cancel it after a while: it must return in time, too."""
        begin, outcome = time.monotonic(), "cancelled"
        with anyio.move_on_after(after):
            try:
                await work()
                outcome = "answered"
            except SandboxError as error:
                outcome = type(error).__name__
        self._book(f"cancelled {kind}", outcome, time.monotonic() - begin - after)

    def _book(self, kind: str, outcome: str, overtime_s: float) -> None:
        name = f"{kind}: {outcome}"
        self.answers[name] = self.answers.get(name, 0) + 1
        if overtime_s > self.overtime_s:
            self.overtime_s, self.latest = overtime_s, name
        if overtime_s > GRACE_S:
            self.late.append(f"{time.strftime('%H:%M:%S')} {name}, {overtime_s:.1f} s after its deadline")


class Proof(msgspec.Struct, frozen=True):
    """The result that a command must have."""

    nonce: str
    exit_code: int
    stdout: bytes
    stderr: bytes

    def fault_of(self, result: Result, timeout: float) -> str:
        """Say what is wrong with a result; "" if it is right.

        A command that timed out on a busy machine is answered rightly with the output that it wrote until then.
        """
        if result.timed_out:
            fits = self.stdout.startswith(result.stdout) and self.stderr.startswith(result.stderr)
            return "" if fits and result.wall_s >= timeout * 0.9 else f"timed out after {result.wall_s:.2f} s: {result}"
        said = (result.exit_code, result.signal, result.stdout, result.stderr)
        must = (self.exit_code, None, self.stdout, self.stderr)
        return "" if said == must and not result.stdout_truncated else f"must be {must}, but is {result}"
