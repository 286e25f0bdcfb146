"""Sandboxes for the tests of environments: scripted ones, and local processes behind a real pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from envs.sandbox.api import Result, Spec
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.pool.local_host import open_maker
from envs.sandbox.pool.pool import open_pool
from flash.errors import SandboxError, SandboxLostError
from tests.envs.sandbox.pools import host

FINE = Result(0, None, False, False, b"", b"", False, False, 0.01, 0.01, 0)


def result(**changes) -> Result:
    return msgspec.structs.replace(FINE, **changes)


class ScriptedSandbox:
    """Answers `run` by a function of the command and its input; keeps all that it was given."""

    def __init__(self, spec: Spec, answer: Callable[[list[str], bytes], Result] | None = None) -> None:
        self.spec = spec
        self.state = "ready"
        self.files: dict[str, bytes] = {}
        self.seen: list[bytes] = []
        self._answer = answer or (lambda command, stdin: FINE)

    async def write(self, path, data, *, mode=0o644, append=False):
        self.files[path] = data
        self.seen.append(data)

    async def run(self, command, *, timeout, patience=None, stdin=b"", env=None, cwd=None):
        self.seen += [*(word.encode() for word in command), stdin]
        if self.state == "lost":
            raise SandboxLostError("it is gone")
        return self._answer(list(command), stdin)


class ScriptedProvider:
    """Gives scripted sandboxes, and knows what is out. The first `failures` requests or uses fail with `error`."""

    def __init__(
        self, answer=None, *, start_s: float = 0.0, failures: int = 0, error: SandboxError | None = None
    ) -> None:
        self.answer = answer
        self.start_s = start_s
        self.failures = failures
        self.error = error or SandboxLostError("the engine lost it")
        self.sandboxes: list[ScriptedSandbox] = []
        self.out = 0
        self.most = 0
        self.owners: set[str] = set()

    @asynccontextmanager
    async def acquire(self, spec, *, owner="", priority=0, deadline=600.0, on_lost="fail"):
        self.owners.add(owner)
        await anyio.sleep(self.start_s)
        if self.failures:
            self.failures -= 1
            raise self.error
        sandbox = ScriptedSandbox(spec, self.answer)
        self.sandboxes.append(sandbox)
        self.out += 1
        self.most = max(self.most, self.out)
        try:
            yield sandbox
        finally:
            self.out -= 1

    @asynccontextmanager
    async def open(self, source):
        yield self


@asynccontextmanager
async def local_processes(source):
    """A pool whose sandboxes are local processes."""
    async with FakeBackend() as backend:
        async with open_maker(backend) as maker, open_pool([host("here", maker)]) as pool:
            yield pool
        assert not backend.containers.kept, "leaked"
