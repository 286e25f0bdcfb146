"""What all tests share: the clock they run on, and the law that no test may block its event loop.

An async test is marked `anyio`; it runs on the real clock, or, marked `virtual` too, on the virtual one, where waiting
takes no time. A synchronous test reaches the virtual clock through `flash.simulate.clock.run_virtual`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings

from flash.simulate.clock import VirtualLoop

BLOCKED_SECONDS = 0.5
"""CPU time of one callback from which the loop counts as blocked. CPU, not wall time: a busy machine blocks nothing."""

# Examples are not timed: how long one takes says more about the machine than about the code.
settings.register_profile("flash", deadline=None)
settings.load_profile("flash")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual: the async test runs on the virtual clock")
    config.addinivalue_line("markers", "may_block: the test may block its event loop")


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """asyncio, on the clock that the test's markers ask for."""
    if request.node.get_closest_marker("virtual"):
        return "asyncio", {"loop_factory": VirtualLoop}
    return "asyncio"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a test that blocked an event loop."""
    if pyfuncitem.get_closest_marker("may_block"):
        return (yield)
    with blocking_callbacks() as blocking:
        result = yield
    assert not blocking, (
        f"an event loop was blocked for over {BLOCKED_SECONDS:g} s of CPU time by {'; '.join(blocking)}. Move the "
        "work to a process or thread pool; mark the test `may_block` only where a third-party library leaves no choice"
    )
    return result


@contextmanager
def blocking_callbacks() -> Generator[list[str]]:
    """Gather the callbacks, of any event loop, that take too long."""
    found: list[str] = []
    run = asyncio.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        owner = getattr(handle._callback, "__self__", handle)
        start = time.thread_time()
        try:
            run(handle)
        finally:
            seconds = time.thread_time() - start
            if seconds > BLOCKED_SECONDS:
                found.append(f"{owner!r} ({seconds:.2f} s)")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed_run)
        yield found
