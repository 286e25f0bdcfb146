"""Contract of every engine, real or fake: the checks, and the interface to the engine under test.

`test_engine_contract.py` runs them on the fakes, on the virtual clock; `test_vllm_engine.py` and
`test_vllm_engine_death.py` on vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anyio
import pytest

from flash.errors import EngineDeadError, EngineRefusal
from flash.rollout.engine import Engine, Progress, ResponseRequest
from flash.types import Completion, Published, VersionRun

LONG = 400
"""Number of tokens of a response that lasts over a swap."""
ENDLESS = 8000
"""Number of tokens of a response that is aborted. A busy machine must not complete it before its first piece is
read."""
PATIENCE_S = 60.0


class Subject(Protocol):
    """An engine under test, and the trainer's end of its weights."""

    @property
    def engine(self) -> Engine:
        """The engine, which has started. Its responses end at their limit only."""
        ...

    def publish(self) -> Published:
        """Publish the next version of the weights, and return its announcement."""
        ...


def ask(count: int, first: int = 5) -> ResponseRequest:
    """Return a request for `count` tokens, after a prompt of three tokens that begins with `first`, which is also its
    key."""
    return ResponseRequest([first, 6, 7], count, key=first)


def each(versions: list[VersionRun]) -> list[int]:
    """Return the version of each token."""
    return [run.version for run in versions for _ in range(run.count)]


async def complete(engine: Engine, request: ResponseRequest, began: Callable[[], object] = lambda: None) -> Completion:
    """Consume a stream and check that its pieces add up. `began` is called at each piece."""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    async for piece in engine.generate(request):
        began()
        if isinstance(piece, Completion):
            assert piece.token_ids[: len(tokens)] == tokens
            assert piece.logprobs[: len(tokens)] == logprobs
            assert each(piece.versions)[: len(tokens)] == versions
            assert len(each(piece.versions)) == len(piece.token_ids) == len(piece.logprobs)
            assert len(tokens) < len(piece.token_ids), "the last tokens come with the completion alone"
            return piece
        assert piece.token_ids, "a piece holds tokens"
        assert len(each(piece.versions)) == len(piece.token_ids) == len(piece.logprobs)
        tokens += piece.token_ids
        logprobs += piece.logprobs
        versions += each(piece.versions)
    raise AssertionError("a stream ended without a completion")


async def begin(engine: Engine, count: int = 4) -> list[Any]:
    """Return streams of endless responses, which have given their first piece. The caller aborts them."""
    streams = [engine.generate(ask(ENDLESS, 2 + number)) for number in range(count)]
    with anyio.fail_after(PATIENCE_S):
        for stream in streams:
            assert isinstance(await anext(stream), Progress)
    return streams


async def empty(engine: Engine) -> None:
    """Wait until the engine reports that it runs nothing. It reports after each step, so steps are asked for."""
    with anyio.fail_after(PATIENCE_S):
        while (engine.pressure.running, engine.pressure.waiting) != (0, 0):
            await complete(engine, ask(2))
            await anyio.sleep(0.01)


# -- while it lives ------------------------------------------------------------------------------------------------


async def a_response_streams_and_ends_at_its_limit(subject: Subject) -> None:
    """Check that a response has exactly its limit of tokens, all finite log-probs, and one version."""
    await subject.engine.load(subject.publish(), keep_cache=False)
    completion = await complete(subject.engine, ask(40))
    assert (len(completion.token_ids), completion.finish) == (40, "length")
    assert all(math.isfinite(value) and value <= 0 for value in completion.logprobs)
    assert completion.versions == [VersionRun(subject.engine.version, 40)]


async def an_empty_prompt_is_refused_and_the_engine_is_well(subject: Subject) -> None:
    """Check that an empty prompt is an EngineRefusal, and that the next request is served."""
    with pytest.raises(EngineRefusal):
        await complete(subject.engine, ResponseRequest([], 4, key=0))
    assert len((await complete(subject.engine, ask(4))).token_ids) == 4


async def an_aborted_response_leaves_and_its_late_tokens_reach_nobody(subject: Subject) -> None:
    """Check that closed streams leave the engine, and that a later response has only its own tokens."""
    await subject.engine.load(subject.publish(), keep_cache=False)
    streams = await begin(subject.engine)
    assert subject.engine.pressure.running == 4
    for stream in streams:
        await stream.aclose()
    assert len((await complete(subject.engine, ask(20))).token_ids) == 20
    await empty(subject.engine)


async def a_cancelled_response_leaves(subject: Subject) -> None:
    """Check that a response whose reader is cancelled leaves the engine."""
    await subject.engine.load(subject.publish(), keep_cache=False)
    (stream,) = await begin(subject.engine, 1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(stream)
    await stream.aclose()
    await empty(subject.engine)


async def a_swap_in_flight_loses_nothing_and_stamps_later_tokens(subject: Subject) -> None:
    """Check that eight running responses are complete after a swap, with the new version from some token on."""
    engine = subject.engine
    await engine.load(subject.publish(), keep_cache=False)
    before, published = engine.version, subject.publish()
    done: list[Completion] = []
    running: set[int] = set()
    all_run = anyio.Event()

    async def one(number: int) -> None:
        def began() -> None:
            running.add(number)
            if len(running) == 8:
                all_run.set()

        done.append(await complete(engine, ask(LONG, 2 + number), began))

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(one, number)
        with anyio.fail_after(PATIENCE_S):
            await all_run.wait()
        await engine.load(published, keep_cache=False)
        assert engine.version == published.version
    assert len(done) == 8
    for completion in done:
        assert [run.version for run in completion.versions] == [before, published.version]
        assert len(completion.token_ids) == LONG


async def a_request_in_a_pause_waits_and_gets_the_new_version(subject: Subject) -> None:
    """Check that a request that comes during a swap is answered, in the end under the new version."""
    engine = subject.engine
    await engine.load(subject.publish(), keep_cache=False)
    streams = await begin(engine, 1)
    published = subject.publish()
    versions: list[int] = []

    async def later() -> None:
        await anyio.sleep(0.001)
        versions.extend(each((await complete(engine, ask(4))).versions))

    async with anyio.create_task_group() as group:
        group.start_soon(later)
        await engine.load(published, keep_cache=False)
    assert versions[-1] == published.version
    for stream in streams:
        await stream.aclose()


async def it_does_not_say_that_it_is_dead(subject: Subject) -> None:
    """Check that `wait_dead` does not return while the engine lives."""
    with anyio.move_on_after(0.2) as waited:
        await subject.engine.wait_dead()
    assert waited.cancelled_caught


WHILE_IT_LIVES = (
    a_response_streams_and_ends_at_its_limit,
    an_empty_prompt_is_refused_and_the_engine_is_well,
    an_aborted_response_leaves_and_its_late_tokens_reach_nobody,
    a_cancelled_response_leaves,
    a_swap_in_flight_loses_nothing_and_stamps_later_tokens,
    a_request_in_a_pause_waits_and_gets_the_new_version,
    it_does_not_say_that_it_is_dead,
)


# -- its first version, and its end --------------------------------------------------------------------------------


async def tokens_before_the_first_load_carry_no_version(subject: Subject) -> None:
    """Check that tokens that are sampled before the first load have the version −1."""
    assert subject.engine.version == -1
    assert (await complete(subject.engine, ask(5))).versions == [VersionRun(-1, 5)]


async def a_death_ends_everything_at_once(subject: Subject, kill: Callable[[], Awaitable[object]]) -> str:
    """Check that running requests, later requests and a later load fail for the same reason, and return it."""
    engine = subject.engine
    await engine.load(subject.publish(), keep_cache=False)
    streams = await begin(engine)
    late = subject.publish()
    reasons: list[str] = []

    async def fails(what: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(EngineDeadError) as caught:
            await what()
        reasons.append(str(caught.value))

    async def drain(stream: Any) -> None:
        async for _ in stream:
            pass

    with anyio.fail_after(PATIENCE_S):
        await kill()
        async with anyio.create_task_group() as group:
            for stream in streams:
                group.start_soon(fails, lambda stream=stream: drain(stream))
            reason = str(await engine.wait_dead())
        assert str(await engine.wait_dead()) == reason
        await fails(lambda: complete(engine, ask(3)))
        await fails(lambda: engine.load(late, keep_cache=False))
    assert set(reasons) == {reason}
    return reason


async def a_death_in_a_swap_ends_the_swap(subject: Subject, kill: Callable[[], Awaitable[object]]) -> None:
    """Check that a load raises an EngineDeadError when `kill` ends the engine during it."""
    await subject.engine.load(subject.publish(), keep_cache=False)
    streams = await begin(subject.engine)
    published = subject.publish()
    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        with anyio.fail_after(PATIENCE_S), pytest.raises(EngineDeadError):
            await subject.engine.load(published, keep_cache=False)
    for stream in streams:
        await stream.aclose()


async def a_closed_engine_serves_nobody(subject: Subject) -> None:
    """Check that an engine may be closed twice, and raises an EngineDeadError for later requests."""
    await subject.engine.close()
    await subject.engine.close()
    with pytest.raises(EngineDeadError):
        await complete(subject.engine, ask(3))
