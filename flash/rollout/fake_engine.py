"""Engines for tests and benchmarks: one that needs no model, and one that wraps another engine.

`FakeEngine` answers with the tokens that a function returns, each after a set time on the loop's clock. It keeps the
contract of `Engine`, which `tests/rollout/engine_contract.py` checks for it and for vLLM. The tokens of a response come
one by one, and the last one with the completion. Requests beyond the engine's slots wait in order. A swap (the load of
a version) pauses the engine after the running step, and changes the version of later tokens only. A request that began
on another engine continues after its own tokens. A dead engine fails every request at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from flash.errors import EngineDeadError, EngineError, EngineRefusal
from flash.rollout.engine import Engine, Pressure, Progress, ResponseRequest
from flash.types import Completion, Published, VersionRun, append_versions

UNLIMITED = 1 << 30
"""Number of slots that lets an engine run all its requests at once."""

EngineT = TypeVar("EngineT", bound=Engine)


class FakeEngine:
    """An `Engine` without a model, whose failures and death a test can cause. The log-prob of every token is −1.

    Args:
        answer: returns the tokens of the response to a prompt.
        seconds_per_token: seconds of one step, in which each running request gets one token.
        swap_seconds: seconds of a `load`.
        slots: largest number of requests that run at once.
        start_seconds: seconds of `start`.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[int]], list[int]],
        seconds_per_token: float = 0.01,
        swap_seconds: float = 0.05,
        slots: int = UNLIMITED,
        start_seconds: float = 0.0,
    ) -> None:
        self._answer = answer
        self._seconds_per_token = seconds_per_token
        self._swap_seconds = swap_seconds
        self._slots = anyio.Semaphore(slots)
        self.start_seconds = start_seconds
        self.start_error: Exception | None = None
        """Error that `start` raises; None to start."""
        self.load_error: Exception | None = None
        """Error that each `load` raises while this is set."""
        self.closed = False
        """True after `close`."""
        self._version = -1
        self._death: EngineDeadError | None = None
        """Error of all calls of a dead or closed engine; None while it lives."""
        self._died = anyio.Event()
        """Event that is set by `kill`, but not by `close`."""
        self._resumed = anyio.Event()
        """Event that is set unless a swap pauses the engine."""
        self._resumed.set()
        self._failures: list[EngineError] = []
        """Errors that `fail_next` or `refuse_next` has prepared. Each fails the request that would get the next
        token."""
        self.aborted = 0
        """Number of requests that ended before their completion, without those that still waited for a slot."""
        self.running = 0
        """Number of requests that have a slot."""
        self.waiting = 0
        """Number of requests that wait for a slot."""
        self.requests: list[ResponseRequest] = []
        """All requests that the engine has accepted, for tests."""
        self.numbers: list[int] = []
        """Numbers that `reassign` has set, for tests."""
        self.kept_cache: list[bool] = []
        """Argument `keep_cache` of each load, for tests."""
        # The next three fields are parts of the reported pressure, which tests set.
        self.kv_used = 0.0
        self.preemptions = 0
        self.kv_tokens = 0

    @property
    def version(self) -> int:
        """Version that the last successful `load` has set; -1 before the first one."""
        return self._version

    @property
    def pressure(self) -> Pressure:
        """Numbers of running and waiting requests, and the numbers that a test has set."""
        return Pressure(self.running, self.waiting, self.kv_used, self.preemptions, self.kv_tokens)

    async def start(self) -> None:
        """Wait `start_seconds`, then raise `start_error` if a test has set it."""
        await anyio.sleep(self.start_seconds)
        if self.start_error is not None:
            raise self.start_error

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Yield the tokens of the answer, each after one step. The last token is only in the completion.

        Raises:
            EngineRefusal: the prompt is empty, or a test has called `refuse_next`.
            EngineDeadError: the engine is dead.
            EngineError: a test has called `fail_next`.
        """
        self._check_alive()
        if not request.prompt:
            raise EngineRefusal("a prompt of 0 tokens does not fit")
        self.requests.append(request)
        prompt_length = len(request.prompt) - request.generated
        answer = self._answer(request.prompt[:prompt_length])[request.generated :]
        tokens = answer[: request.max_new_tokens]
        finish = "length" if len(answer) > len(tokens) else "stop"
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        finished = False
        versions: list[VersionRun] = []
        try:
            for token in tokens:
                await self._step()
                newest = [VersionRun(self._version, 1)]
                append_versions(versions, newest)
                # The last token is only in the completion.
                if sum(run.count for run in versions) < len(tokens):
                    yield Progress([token], [-1.0], newest)
            finished = True
        finally:
            self.running -= 1
            self._slots.release()
            self.aborted += not finished
        yield Completion(tokens, [-1.0] * len(tokens), versions, finish)

    async def _step(self) -> None:
        """Let the time of one token pass, after any pause for a swap. Raises a prepared error, if there is one."""
        await self._resumed.wait()
        await self._pass(self._seconds_per_token)
        if self._failures:
            raise self._failures.pop()

    async def _pass(self, seconds: float) -> None:
        """Wait for some seconds. Raises EngineDeadError as soon as the engine dies."""
        with anyio.move_on_after(seconds):
            await self._died.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        """Raise the EngineDeadError of a dead engine."""
        if self._death is not None:
            raise self._death

    def reassign(self, number: int) -> None:
        """Add the number to `numbers`."""
        self.numbers.append(number)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Load a version. After an error the engine stays paused until a load succeeds, like a real engine.

        Raises:
            EngineDeadError: the engine is dead.
            Exception: `load_error`, if a test has set it.
        """
        self._check_alive()
        self.kept_cache.append(keep_cache)
        if self._resumed.is_set():
            self._resumed = anyio.Event()
        # The running step ends first.
        await self._pass(self._seconds_per_token if self.running else 0.0)
        await self._pass(self._swap_seconds)
        if self.load_error is not None:
            raise self.load_error
        assert published.version > self._version, "an engine never goes back"
        self._version = published.version
        self._resumed.set()
        return 0.0

    def kill(self) -> None:
        """Die like a killed process: running and later requests fail, and `wait_dead` returns."""
        self._death = self._death or EngineDeadError("the fake engine was killed")
        self._died.set()
        self._resumed.set()

    def fail_next(self, requests: int = 1) -> None:
        """Make `requests` requests fail, each at its next token. Replaces failures that were prepared before."""
        self._failures = [EngineError("the fake engine was told to fail")] * requests

    def refuse_next(self, requests: int = 1) -> None:
        """Make the engine refuse `requests` requests, each at its next token. Replaces failures that were prepared
        before."""
        self._failures = [EngineRefusal("the fake engine was told to refuse")] * requests

    async def wait_dead(self) -> EngineDeadError:
        """Wait for `kill`, and return the error that says how the engine died."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def close(self) -> None:
        """End the engine. Later requests fail. `wait_dead` does not return: the engine has not died by itself."""
        self._death = self._death or EngineDeadError("the fake engine is closed")
        self.closed = True
        await anyio.lowlevel.checkpoint()


class FakeLine:
    """Makes the fake engines of one place, one after another. It is the `make_engine` of a place in tests.

    Args:
        make: returns a new engine.
    """

    def __init__(self, make: Callable[[], FakeEngine]) -> None:
        self._make = make
        self.made: list[FakeEngine] = []
        """All engines so far, the newest last."""

    def __call__(self, number: int = 0) -> FakeEngine:
        """Make and return the next engine of the place. Its number in the run does not matter."""
        self.made.append(self._make())
        return self.made[-1]

    @property
    def newest(self) -> FakeEngine:
        """The engine that was made last."""
        return self.made[-1]


class WrappedEngine(Generic[EngineT]):
    """An `Engine` that passes all calls on to another engine. A subclass overrides the methods that it changes."""

    def __init__(self, engine: EngineT) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        """Version of the wrapped engine."""
        return self._engine.version

    @property
    def pressure(self) -> Pressure:
        """Load of the wrapped engine."""
        return self._engine.pressure

    async def start(self) -> None:
        """Start the wrapped engine."""
        await self._engine.start()

    def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream a response of the wrapped engine."""
        return self._engine.generate(request)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Load a version into the wrapped engine."""
        return await self._engine.load(published, keep_cache=keep_cache)

    def reassign(self, number: int) -> None:
        """Set the number of the wrapped engine."""
        self._engine.reassign(number)

    async def wait_dead(self) -> EngineDeadError:
        """Wait for the death of the wrapped engine."""
        return await self._engine.wait_dead()

    async def close(self) -> None:
        """Close the wrapped engine."""
        await self._engine.close()
