"""Judge: judges programs on one node. It borrows a sandbox for each answer, and another one if the first fails.

Environments and verifiers get the judge of their node from `shared_judge`, and wait for its verdict. A suite is the
list of tests of one problem.

`envs.judging.tests` describes the tests. If every sandbox fails, the answer gets an error (`flash.errors.SandboxError`)
instead of a verdict. There is one exception: if the program loses each of its sandboxes while a harmless program keeps
its own, the program has failed. It has found a way to end sandboxes, and without a verdict it would be retried forever.
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

HARMLESS_S = 5.0
"""Longest time for which a harmless program must keep its sandbox, to show that another program has ended its own."""
LOOK_UP_S = 10.0
"""Seconds that the search for a program in an image may take: far more than it needs."""
PAUSE_S = 0.5
"""Seconds before another sandbox is tried. The pause doubles each time."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._:/-]")
"""Characters that the name of a sandboxes' owner may not have."""

SandboxOpener = Callable[[Location], AbstractAsyncContextManager[SandboxProvider]]
"""Function that opens a provider of sandboxes for the time of a block: `open_sandboxes`, or a fake of a test."""


class Judge:
    """Judge of programs, each answer in a new sandbox. All episodes of a node share it: see `shared_judge`."""

    def __init__(self, sandboxes: BoundedSandboxes, settings: JudgePool) -> None:
        """Create a judge that borrows from `sandboxes`. `settings` has the waits and the number of attempts."""
        self.sandboxes = sandboxes
        """Lender of the node's sandboxes. Environments such as `envs.swe.env` borrow the policy's sandbox from it."""
        self._settings = settings
        self._usable: set[Language] = set()
        """Languages whose images have all programs that they need."""

    async def judge(
        self, answer: str, suite: Suite, languages: Mapping[str, Language], limits: JudgingLimits, *, every: bool
    ) -> SuiteVerdict:
        """Return the verdict on the program in an answer. A sandbox that fails is replaced, a few times.

        Args:
            answer: text of the policy, which contains the program.
            suite: tests of the problem.
            languages: known languages by name; `suite` names the one of the program.
            limits: limits of the program, unless the suite sets its own.
            every: True if all tests run, for the share that passes; False if none runs after the first that fails.

        Raises:
            SandboxError: every attempt failed, and not because of the program; or no sandbox was free in time; or the
                image of the language lacks a program.
        """
        language = languages[suite.language]
        found = find_blocks(answer, (suite.language, *language.fences))
        limits = msgspec.structs.replace(
            limits, timeout=suite.timeout or limits.timeout, memory_mib=suite.memory_mib or limits.memory_mib
        )

        async def judged(sandbox: Sandbox) -> SuiteVerdict:
            """Judge the program in a new sandbox."""
            await self.check_image(language, sandbox)
            program = await choose_program(sandbox, found, language, suite, limits)
            return await run_tests(sandbox, program, language, suite, limits, every=every)

        return await self.try_in(spec_of(language, limits), judged, len(suite.tests), limits.total)

    def stock(self) -> Stock:
        """Return the numbers of sandboxes in use and of callers that wait for one, for the node's metrics."""
        return self.sandboxes.stock()

    async def try_in(
        self, spec: Spec, judged: Callable[[Sandbox], Awaitable[SuiteVerdict]], tests: int, total: float
    ) -> SuiteVerdict:
        """Return the verdict of `judged` in a new sandbox. A sandbox that fails is replaced, a few times.

        Args:
            spec: description of the sandbox.
            judged: coroutine function that runs the tests in a sandbox.
            tests: number of tests.
            total: seconds after which a second sandbox that was lost in a test is not replaced.

        Raises:
            SandboxError: every attempt failed, and not because of the program; or no sandbox was free in time, or a
                sandbox refused a request.
        """
        begin, losses = anyio.current_time(), 0  # `losses`: sandboxes that were lost while a test ran
        for attempt in range(self._settings.attempts):
            last = attempt + 1 == self._settings.attempts
            start = anyio.current_time()
            try:
                async with self.sandboxes.borrow(spec, self._settings.wait) as sandbox:
                    return await judged(sandbox)
            except (SandboxBusyError, SandboxRefusedError):
                # Another attempt would not help: the wait for a free sandbox was long already, or the image is wrong.
                raise
            except LostInTestError as error:
                losses += 1
                # A program that waits before it ends each sandbox must not take more time than all tests may.
                last = last or (losses > 1 and anyio.current_time() - begin > total)
                # The program is suspected only if every sandbox, at least two, was lost during its tests.
                program_at_fault = (
                    last
                    and 1 < losses == attempt + 1
                    and await self._harmless_program_survives(spec, anyio.current_time() - start)
                )
                if program_at_fault:
                    return SuiteVerdict(error.passed, tests, "sandbox lost", str(error))
                if last:
                    raise
            except SandboxError:
                if last:
                    raise
            await anyio.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("at least one attempt")

    async def _harmless_program_survives(self, spec: Spec, seconds: float) -> bool:
        """Return True if a harmless program keeps such a sandbox for `seconds`, at most for `HARMLESS_S`.

        `seconds` is the time that the last attempt took until its sandbox was lost. If the result is True, the
        sandboxes work, and the judged program has ended its own. Otherwise the machine may be at fault.
        """
        pause = str(math.ceil(min(seconds, HARMLESS_S)))
        try:
            async with self.sandboxes.borrow(spec, self._settings.wait) as sandbox:
                return (await sandbox.run(["sleep", pause], timeout=2 * HARMLESS_S)).ok
        except SandboxError:
            return False

    async def try_out(self, language: Language, limits: JudgingLimits) -> None:
        """Start one sandbox of a language, and check its image. Environments call this in `prepare`, before a run.

        Raises:
            SandboxError: the sandbox cannot be made, or its image lacks a program that the language needs.
        """
        async with self.sandboxes.borrow(spec_of(language, limits), self._settings.wait) as sandbox:
            await self.check_image(language, sandbox)

    async def check_image(self, language: Language, sandbox: Sandbox) -> None:
        """Refuse an image without the programs of the language, in which every answer would crash.

        A judge checks each language once. `sandbox` runs the language's image.

        Raises:
            SandboxRefusedError: a program is missing.
        """
        if language in self._usable:
            return
        for words in (language.compile, language.run, language.call, language.test):
            # A path that begins with a dot is a result of compiling, so it does not exist yet. `choose` is not checked:
            # if it fails, the most likely block is taken.
            if words is not None and not words[0].startswith("."):
                found = await sandbox.run(["/bin/sh", "-c", 'command -v "$1"', "sh", words[0]], timeout=LOOK_UP_S)
                if not found.ok:
                    raise SandboxRefusedError(f"the image {language.image} has no `{words[0]}`; use another one")
        self._usable.add(language)


async def shared_judge(pool: JudgePool, opener: SandboxOpener = open_sandboxes) -> Judge:
    """Return this node's judge for a judge pool. The first call opens it, and it is closed with the node.

    Each pair of `pool` and `opener` has one judge. `opener` opens the provider of sandboxes; tests give a fake.

    Raises:
        ConfigError: there is no engine, or a package or a token is missing.
        SandboxError: the engine or the service does not answer.
    """

    @asynccontextmanager
    async def open_judge() -> AsyncGenerator[Judge]:
        """Open the sandboxes of the node, under the name of the run, and a judge over them."""
        owner = _NO_NAME.sub("-", run_name())[:64]
        async with opener(pool) as provider:
            yield Judge(BoundedSandboxes(provider, owner=owner, most=pool.parallel), pool)

    return await shared((pool, opener), open_judge)
