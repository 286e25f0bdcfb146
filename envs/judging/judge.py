"""A node's judge: borrows a sandbox of the judge pool for each answer, and another one where the first fails.

What is judged, and how, is in `envs.judging.tests`. Where no sandbox could do it, the answer has no verdict but an
error, of `flash.errors.SandboxError`. But a program that loses each of its sandboxes while a harmless one keeps its own
has failed: it has found a way to end them, and would otherwise never be scored.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import msgspec

from envs.judging.options import JudgePool, JudgingLimits, Language, Suite, spec_of
from envs.judging.programs import find_blocks
from envs.judging.tests import LostInTestError, SuiteVerdict, choose_program, run_tests
from envs.sandbox.api import Spec
from envs.sandbox.open import BoundedSandboxes, Location, SandboxProvider, open_sandboxes
from envs.sandbox.sandbox import Sandbox
from flash.environment import run_name, shared
from flash.errors import SandboxBusyError, SandboxError, SandboxRefusedError
from flash.types import Stock

WITNESS_S = 5.0
"""Longest time for which a harmless program has to keep its sandbox, where another one has lost all of its own."""
PAUSE_S = 0.5
"""Before another sandbox is tried; twice as long each time."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._:/-]")
"""What an owner of sandboxes may not be called."""

SandboxOpener = Callable[[Location, str], AbstractAsyncContextManager[SandboxProvider]]
"""Opens sandboxes for an owner, for the time of a block: `envs.sandbox.open.open_sandboxes`, or a test's own."""


class Judge:
    """Judges programs, each answer in a new sandbox. Shared by all episodes of a node: see `shared_judge`."""

    def __init__(self, sandboxes: BoundedSandboxes, settings: JudgePool) -> None:
        self.sandboxes = sandboxes
        self._settings = settings
        self._usable: set[Language] = set()

    async def judge(
        self, answer: str, suite: Suite, languages: Mapping[str, Language], limits: JudgingLimits, *, every: bool
    ) -> SuiteVerdict:
        """The verdict on the program in an answer. A sandbox that fails is replaced, a few times.

        Raises:
            SandboxError: every attempt failed, and not by the program; or there was no room.
        """
        language = languages[suite.language]
        found = find_blocks(answer, (suite.language, *language.fences))
        limits = msgspec.structs.replace(
            limits, timeout=suite.timeout or limits.timeout, memory_mib=suite.memory_mib or limits.memory_mib
        )

        async def judged(sandbox: Sandbox) -> SuiteVerdict:
            await self.look_for(language, sandbox)
            program = await choose_program(sandbox, found, language, suite, limits)
            return await run_tests(sandbox, program, language, suite, limits, every=every)

        return await self.try_in(spec_of(language, limits), judged, len(suite.tests), limits.total)

    def stock(self) -> Stock:
        """How many sandboxes it has."""
        return self.sandboxes.stock()

    async def try_in(
        self, spec: Spec, judged: Callable[[Sandbox], Awaitable[SuiteVerdict]], tests: int, total: float
    ) -> SuiteVerdict:
        """Return the verdict of `judged` in a new sandbox. A sandbox that fails is replaced, a few times.

        Args:
            spec: of the sandbox.
            judged: runs the tests.
            tests: how many there are.
            total: seconds after which no sandbox is replaced that was lost in a test.

        Raises:
            SandboxError: every attempt failed, and not by the program; or there was no room.
        """
        begin, losses = anyio.current_time(), 0
        for attempt in range(self._settings.attempts):
            last = attempt + 1 == self._settings.attempts
            start = anyio.current_time()
            try:
                async with self.sandboxes.borrow(spec, self._settings.wait) as sandbox:
                    return await judged(sandbox)
            except (SandboxBusyError, SandboxRefusedError):
                raise
            except LostInTestError as error:
                losses += 1
                # A program that waits before each end must not take more time than a step has.
                last = last or (losses > 1 and anyio.current_time() - begin > total)
                own = last and 1 < losses == attempt + 1 and await self._others_live(spec, anyio.current_time() - start)
                if own:
                    return SuiteVerdict(error.passed, tests, "sandbox lost", str(error))
                if last:
                    raise
            except SandboxError:
                if last:
                    raise
            await anyio.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("at least one attempt")

    async def _others_live(self, spec: Spec, seconds: float) -> bool:
        """Whether a harmless program keeps such a sandbox for as long."""
        pause = str(math.ceil(min(seconds, WITNESS_S)))
        try:
            async with self.sandboxes.borrow(spec, self._settings.wait) as sandbox:
                return (await sandbox.run(["sleep", pause], timeout=2 * WITNESS_S)).ok
        except SandboxError:
            return False

    async def try_out(self, language: Language, limits: JudgingLimits) -> None:
        """Start one sandbox of a language.

        Raises:
            SandboxError: it cannot be made, or its image lacks what the language needs.
        """
        async with self.sandboxes.borrow(spec_of(language, limits), self._settings.wait) as sandbox:
            await self.look_for(language, sandbox)

    async def look_for(self, language: Language, sandbox: Sandbox) -> None:
        """Refuse an image without the language, which would make every program crash."""
        if language in self._usable:
            return
        for words in (language.compile, language.run, language.call, language.test):
            # What begins with a dot is what compiling leaves.
            if words is not None and not words[0].startswith("."):
                found = await sandbox.run(["/bin/sh", "-c", 'command -v "$1"', "sh", words[0]], timeout=10)
                if not found.ok:
                    raise SandboxRefusedError(f"the image {language.image} has no `{words[0]}`; use another one")
        self._usable.add(language)


async def shared_judge(pool: JudgePool, opener: SandboxOpener = open_sandboxes) -> Judge:
    """This node's judge with this judge pool, which is opened by the first who asks and closed with the node.

    Raises:
        ConfigError: there is no engine, a package or a token is missing.
        SandboxError: the engine or the service does not answer.
    """

    @asynccontextmanager
    async def open_judge() -> AsyncGenerator[Judge]:
        owner = _NO_NAME.sub("-", run_name())[:64]
        async with opener(pool, owner) as provider:
            yield Judge(BoundedSandboxes(provider, owner=owner, most=pool.parallel), pool)

    return await shared((pool, opener), open_judge)
