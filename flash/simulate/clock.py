"""The virtual clock: an event loop on which waiting takes no time.

Its `time()` is a counter, and where another loop would sleep until the next timer it moves the counter there. Between
two timers the order of tasks is asyncio's own, so that a run is reproducible.

Nothing outside the process advances this time. What would have to wait for the outside fails: a socket when it is
awaited, a thread when it reports back. When no timer is left and no task can run, the tasks wait for each other, and
the loop says which and where.
"""

from __future__ import annotations

import asyncio
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
"""Timers this close together are due together, as on the loops of asyncio."""
_SHOWN_TASKS = 20
"""Waiting tasks listed in a deadlock's message."""


def run_virtual(function: Callable[[*ArgsT], Awaitable[ResultT]], *args: *ArgsT) -> ResultT:
    """`anyio.run` on a virtual clock that starts at 0.

    Raises:
        ContractError: the tasks wait for each other, or for something outside the virtual clock.
    """
    return anyio.run(function, *args, backend="asyncio", backend_options={"loop_factory": VirtualLoop})


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as nothing else is to be done. Seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        self._home = threading.get_ident()
        self._refused: ContractError | None = None
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """`call_soon`, for this loop's own thread only: when another thread gets to it depends on real time."""
        if threading.get_ident() != self._home:
            self.refuse(f"the work of thread {threading.current_thread().name!r}")
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: object, *args: object) -> Any:
        """Refused: a thread takes real time. Raises ContractError, as all that is refused."""
        raise self.refuse(f"{func} in a thread")

    async def subprocess_exec(self, *args: object, **options: object) -> Any:
        """Refused: a process takes real time."""
        raise self.refuse(f"the process {args[1]!r}")

    async def subprocess_shell(self, *args: object, **options: object) -> Any:
        """Refused: a process takes real time."""
        raise self.refuse(f"the process {args[1]!r}")

    def refuse(self, what: str) -> ContractError:
        """The error of waiting for `what`; the loop raises it too, in case nobody else does."""
        self._refused = ContractError(
            f"{what} cannot be waited for on the virtual clock, which does not advance meanwhile; simulate it, or use "
            "the real clock"
        )
        return self._refused

    def jump(self, seconds: float | None) -> None:
        """Let `seconds` pass; None: until something happens.

        Raises:
            ContractError: nothing can happen any more, or something was refused.
        """
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error
        if seconds is None:
            raise ContractError(
                "nothing can happen any more on the virtual clock: no timer is set and all tasks wait, for each other "
                f"or for a thread outside of it:\n{_describe_tasks(self)}"
            )
        self._now += seconds
        # A timer is due when it lies before now plus this. After three months the loop's own nanosecond is lost in
        # rounding: no timer would ever be due again.
        self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(self._now))


class _JumpingSelector(selectors.BaseSelector):
    """Tells the loop to jump where it would have slept. Watches only the loop's own wake-up socket, never read."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._keys:
            raise self._loop.refuse(f"the socket or pipe {fileobj!r}")
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, _number(fileobj), events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def _number(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else fileobj.fileno()


def _describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """One line per waiting task: its name and where it waits."""
    waiting = sorted(f"  {task.get_name()}: {_where(task)}" for task in asyncio.all_tasks(loop))
    more = [f"  and {len(waiting) - _SHOWN_TASKS} more"] if len(waiting) > _SHOWN_TASKS else []
    return "\n".join(waiting[:_SHOWN_TASKS] + more)


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line that waits, outside of asyncio and anyio."""
    place = "not started"
    awaited: object = task.get_coro()
    while inspect.iscoroutine(awaited):
        frame: FrameType | None = awaited.cr_frame
        module = str(frame.f_globals.get("__name__", "")) if frame else ""
        if frame is not None and module.split(".")[0] not in ("asyncio", "anyio"):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = awaited.cr_await
    return place
