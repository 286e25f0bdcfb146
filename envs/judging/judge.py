"""Programs judged by tests in sandboxes: languages, tests, and the verdict on a program.

Two kinds of tests. *Input and output*: the program runs with an input, and what it printed is compared here, outside of
the sandbox, so that the expected output is never where the program could find it. *Test programs*: code of the same
language that loads the program and checks it. They pass when they reach their end: a text drawn for each run, which is
in no file, argument or variable, must be their last line, and the exit code 0; so neither an early exit nor a printed
"passed" counts. But such a test shares its process with the program, and a program written to deceive it could find
that text. Prefer inputs and outputs where programs are rewarded.

Law: a verdict is about the program. Whatever goes wrong with a sandbox is an error of `flash.errors.SandboxError`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import msgspec

from envs.judging.options import Bench, Language, Limits, Suite, spec_of
from envs.judging.tests import Verdict, find_program, run_tests
from envs.sandbox.api import Sandbox, SandboxProvider
from envs.sandbox.open import Location, open_sandboxes
from envs.sandbox.reuse.pool import ReusePool, open_reuse_pool
from flash.environment.shared import run_name, shared
from flash.errors import (
    SandboxBusyError,
    SandboxError,
    SandboxRefusedError,
)

PAUSE_S = 0.5
"""Before another sandbox is tried; twice as long each time."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._:/-]")
"""What an owner of sandboxes may not be called."""


class Judge:
    """Judges programs in the sandboxes of a stock. Shared by all episodes of a node: see `shared_judge`."""

    def __init__(self, stock: ReusePool, bench: Bench) -> None:
        self.stock = stock
        self._bench = bench
        self._usable: set[Language] = set()

    async def judge(
        self, answer: str, suite: Suite, languages: Mapping[str, Language], limits: Limits, *, every: bool
    ) -> Verdict:
        """The verdict on the program in an answer. A sandbox that fails is replaced, a few times.

        Raises:
            SandboxError: every attempt failed, or there was no room.
        """
        language = languages[suite.language]
        program = find_program(answer, (suite.language, *language.fences))
        limits = msgspec.structs.replace(
            limits,
            timeout=suite.timeout or limits.timeout,
            memory_mib=suite.memory_mib or limits.memory_mib,
        )
        spec = spec_of(language, limits)
        for attempt in range(self._bench.attempts):
            try:
                async with self.stock.borrow(spec, self._bench.wait) as box:
                    await self._look_for(language, box)
                    return await run_tests(box, program, language, suite, limits, every=every)
            except (SandboxBusyError, SandboxRefusedError):
                raise
            except SandboxError:
                if attempt + 1 == self._bench.attempts:
                    raise
            await anyio.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("at least one attempt")

    async def try_out(self, language: Language, limits: Limits) -> None:
        """Start one sandbox of a language.

        Raises:
            SandboxError: it cannot be made, or its image lacks what the language needs.
        """
        async with self.stock.borrow(spec_of(language, limits), self._bench.wait) as box:
            await self._look_for(language, box)

    async def _look_for(self, language: Language, box: Sandbox) -> None:
        """Refuse an image without the language, which would make every program crash."""
        if language in self._usable:
            return
        for words in (language.compile, language.run, language.test):
            # What begins with a dot is what compiling leaves.
            if words is not None and not words[0].startswith("."):
                found = await box.run(["/bin/sh", "-c", 'command -v "$1"', "sh", words[0]], timeout=10)
                if not found.ok:
                    raise SandboxRefusedError(f"the image {language.image} has no `{words[0]}`; use another one")
        self._usable.add(language)


SupplyOpener = Callable[[Location, str], AbstractAsyncContextManager[SandboxProvider]]


async def shared_judge(bench: Bench, opener: SupplyOpener = open_sandboxes) -> Judge:
    """This node's judge with these sandboxes. Its pool is opened by the first who asks and closed with the node.

    Raises:
        ConfigError: there is no engine, a package or a token is missing.
        SandboxError: the engine or the service does not answer.
    """

    @asynccontextmanager
    async def open_judge() -> AsyncGenerator[Judge]:
        owner = _NO_NAME.sub("-", run_name())[:64]
        async with (
            opener(bench, owner) as supply,
            open_reuse_pool(supply, owner=owner, most=bench.parallel, reuse=bench.reuse) as stock,
        ):
            yield Judge(stock, bench)

    return await shared((bench, opener), open_judge)
