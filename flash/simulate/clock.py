"""VirtualLoop: the virtual clock, an asyncio event loop on which waiting takes no real time.

`flash simulate` runs on a subclass of it, and so do runs with faults (`flash.simulate.faults.loop`). Tests and
benchmarks call `run_virtual`. So they take little time and give the same result each time. The loop's `time()` is a
counter. Where another loop would sleep until the next timer, this one advances the counter to that timer. Between two
timers the order of tasks is asyncio's own, so a run is reproducible.

Nothing outside the process advances this clock, so nothing can wait for the outside: a socket is refused when it is
awaited, `run_in_executor` when it is called, and any other thread when it reports its result. If no timer is left and
no task can run, the tasks wait for each other. The loop then raises an error that lists these tasks and the lines at
which they wait.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import selectors
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

import anyio

from flash.errors import ContractError

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

_RESOLUTION_S = 1e-9
"""Seconds: timers that are closer together are due at the same time, as on the loops of asyncio."""
_SHOWN_TASKS = 20
"""Most waiting tasks that the error message of a deadlock lists."""


def run_virtual(function: Callable[[*ArgsT], Awaitable[ResultT]], *args: *ArgsT) -> ResultT:
    """Run an async function like `anyio.run`, but on a virtual clock that starts at 0. Returns its result.

    Errors of the function are raised as they are.

    Raises:
        ContractError: the tasks wait for each other, or for something outside the process.
    """
    return anyio.run(function, *args, backend="asyncio", backend_options={"loop_factory": VirtualLoop})


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time, in seconds, jumps to the next timer as soon as no task can run."""

    def __init__(self) -> None:
        self._now = 0.0
        self._thread = threading.get_ident()
        """Id of the thread that runs the loop."""
        self._error: BaseException | None = None
        """Error that the next jump raises: something was refused, or a callback has failed; None if there is none."""
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback. A call from another thread makes the loop raise ContractError."""
        # The moment at which another thread makes this call depends on real time.
        if threading.get_ident() != self._thread:
            self.refuse(f"the work of thread {threading.current_thread().name!r}")
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call `callback` at the time `when`; never if that is infinity."""
        # `anyio.sleep_forever` sets such a timer. On the way to it, the clock would advance day after day, and `jump`
        # would never report that the tasks wait for each other.
        if when == math.inf:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)

    # asyncio calls the next three methods when a task starts work in a thread or in another process.

    def run_in_executor(self, executor: object, func: object, *args: object) -> Any:
        """Raise ContractError, because a thread takes real time."""
        raise self.refuse(f"{func} in a thread")

    async def subprocess_exec(self, *args: object, **options: object) -> Any:
        """Raise ContractError, because a process takes real time."""
        raise self.refuse(f"the process {args[1]!r}")  # the argument after the protocol is the program

    async def subprocess_shell(self, *args: object, **options: object) -> Any:
        """Raise ContractError, because a process takes real time."""
        raise self.refuse(f"the process {args[1]!r}")

    def refuse(self, what: str) -> ContractError:
        """Return the error for a task that would wait for `what`, and keep it for the next jump.

        Callers in the thread of the loop raise it.
        """
        # The loop raises the error at its next jump too, because code between the task and the loop may swallow it.
        self._error = error = ContractError(
            f"{what} cannot be waited for on the virtual clock, which does not advance meanwhile; simulate it, or use "
            "the real clock"
        )
        return error

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the error of a callback or timer for the next jump. asyncio would only log it, and the run would go on.

        Other reports are logged as usual. They come from the garbage collector, at any time.
        """
        if "handle" in context and "exception" in context:
            self._error = self._error or context["exception"]
        else:
            super().call_exception_handler(context)

    def jump(self, seconds: float | None) -> None:
        """Advance the clock by `seconds`. The selector calls this once in each pass of the loop.

        Subclasses override it, for example to measure the real time of each pass (`flash.simulate.world`).

        `seconds` is 0 if a task can run. It is None if no timer is set, so that the loop would wait for an event
        without a timeout.

        Raises:
            ContractError: no task can ever run again, or something was refused.
            Exception: a callback or timer has raised it.
        """
        if self._error is not None:
            # The error is forgotten first, so that the loop can still run the cancelled tasks to their end.
            error, self._error = self._error, None
            raise error
        if seconds is None:
            raise ContractError(
                "nothing can happen any more on the virtual clock: no timer is set and all tasks wait, for each other "
                f"or for a thread:\n{_describe_tasks(self)}"
            )
        self._now += seconds
        # asyncio regards a timer as due if its time is before `now` plus this attribute. From 2^24 seconds (six months)
        # on, `now + 1e-9 == now`, so a fixed nanosecond would leave every timer undue.
        self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(self._now))


class _JumpingSelector(selectors.BaseSelector):
    """A selector that advances the loop's clock instead of sleeping.

    The only file that it accepts is the loop's own wake-up socket, which it never reports as ready.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}
        """Key of the wake-up socket, by the socket; empty before the loop has registered it."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept the first file, which is the loop's wake-up socket. Raises ContractError for any other file.

        asyncio calls this when the loop is made, and whenever a task wants to wait for a socket or a pipe.
        """
        if self._keys:
            raise self._loop.refuse(f"the socket or pipe {fileobj!r}")
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, _number(fileobj), events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget the wake-up socket when the loop is closed."""
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by the seconds that the loop would sleep; None: it would sleep until an event.

        The loop calls this once in each pass. The result, an empty list, means that no file is ready.
        """
        self._loop.jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the registered files."""
        return self._keys


def _number(fileobj: Any) -> int:
    """Return the descriptor of a file."""
    return fileobj if isinstance(fileobj, int) else fileobj.fileno()


def _describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Return one line for each waiting task, with its name and the line at which it waits, for the error of `jump`."""
    waiting = sorted(f"  {task.get_name()}: {_where(task)}" for task in asyncio.all_tasks(loop))
    more = [f"  and {len(waiting) - _SHOWN_TASKS} more"] if len(waiting) > _SHOWN_TASKS else []
    return "\n".join(waiting[:_SHOWN_TASKS] + more)


def _where(task: asyncio.Task[Any]) -> str:
    """Return the innermost line outside asyncio and anyio at which a task waits; a text if it has no such line."""
    place = "inside of asyncio or anyio"
    awaited: object = task.get_coro()
    # Each coroutine or generator waits for the next one, so the last line that is found is the innermost one.
    while awaited is not None:
        frame: FrameType | None = None
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isasyncgen(awaited):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        else:
            # `async for` waits for an object that has its generator, but no attribute for it.
            awaited = next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
        if frame is not None and frame.f_globals.get("__name__", "").split(".")[0] not in ("asyncio", "anyio"):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
    return place
