"""FaultLoop: a virtual clock whose simulated processes can be killed, frozen and continued.

All processes of a simulation share one event loop. Each task belongs to a `Process`, which its context names, so the
tasks that it starts belong to the same process. A frozen process (as after SIGSTOP) runs no callback: callbacks and
timers that are due meanwhile are held until it goes on. A killed process is cancelled; from that moment on the network
and the disk ignore it, so that no `finally` of it has an effect outside. Everything runs in one thread. All times are
seconds of the virtual clock.

anyio keeps tasks and scopes in sets, whose order follows from memory addresses. So that equal seeds give equal runs,
tasks here hash to their numbers, and the tasks that are cancelled together are woken in the order of their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any

import anyio

from flash.simulate.clock import VirtualLoop

MOST_PASSES = 100_000
"""Number of passes of the loop at one moment of the clock after which the run counts as one that turns in a circle."""
RETRY = 1 << 60
"""Number by which `_end_sweep` sorts the callback with which anyio cancels once more (`_is_retry`): larger than the
number of any task, so that it comes after all of them."""


class Process:
    """A simulated process of the run. It can be killed, frozen and continued, from any task of another process.

    Args:
        name: name in the trace, such as `hub` or `node 2`.
        machine: name of the machine on which the process runs.
    """

    def __init__(self, name: str, machine: str) -> None:
        self.name = name
        self.machine = machine
        self.alive = True
        """False once the process has ended or was killed. It has no effect on anything outside then."""
        self.killed = False
        """True once the process was killed, and so has not ended by itself."""
        self.frozen = False
        """True while the process is stopped, as after SIGSTOP."""
        self.result: Any = None
        """Result of the main function of the process; None if it runs, was killed, or has ended with an error."""
        self.error: BaseException | None = None
        """Error or group of errors that has ended the process; None if it runs or has ended without one. A process that
        was killed may have one, from a `finally` block, which means nothing."""
        self.ended = anyio.Event()
        """Set when the process has ended or was killed."""
        self.scope = anyio.CancelScope()
        """Scope of the main function, which a kill cancels."""
        self.held: list[_Call] = []
        """Callbacks that wait until the frozen process goes on."""
        self.on_end: list[Callable[[], None]] = []
        """Functions that are called once, when the process ends or is killed. They must not wait."""
        self.context = copy_context()
        """Context for callbacks of the network that run in this process."""
        self.context.run(PROCESS.set, self)

    async def main(self, function: Callable[[], Awaitable[Any]]) -> None:
        """Run the main function of the process in this task, until it ends or the process is killed.

        Never raises an error of the function, but keeps it in `error`. The cancellation of the whole simulation passes.
        """
        PROCESS.set(self)
        try:
            with self.scope:
                self.result = await function()
        except Exception as error:  # a process may end with any error; the launcher decides what follows
            self.error = error
        finally:
            self._over()

    def kill(self) -> None:
        """End the process at once, like SIGKILL. A process that has ended stays as it is.

        The process counts as ended when this returns. Its tasks still run to their ends, cancelled and without effects.
        """
        if self.alive:
            self.killed = True
            self._over()
            self.thaw()  # its tasks have to run once more, to end
            self.scope.cancel()

    def _over(self) -> None:
        """Record the end of the process, and call the functions of `on_end`. Only the first call does something."""
        if self.alive:
            self.alive = False
            for function in self.on_end:
                function()
            self.ended.set()

    def freeze(self) -> None:
        """Stop the process like SIGSTOP, until `thaw`. A process that has ended cannot be stopped."""
        self.frozen = self.alive

    def thaw(self) -> None:
        """Let a frozen process go on: everything that was due meanwhile happens now, in the same order.

        A process that is not frozen holds nothing, so the call changes nothing.
        """
        self.frozen = False
        held, self.held = self.held, []
        for call in held:
            asyncio.get_running_loop().call_soon(call.run, context=call.context)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""Process to which the running task belongs; None for the launchers and the simulation itself."""


class _Call:
    """A callback of the loop. While its process is frozen, the process holds it back.

    Args:
        process: process of the callback; None for the simulation itself, which is never frozen.
        callback: the function.
        args: its arguments.
        context: context in which the function runs.
    """

    def __init__(
        self, process: Process | None, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> None:
        self._process = process
        self._callback = callback
        self._args = args
        self.context = context
        self.handle: asyncio.Handle
        """Handle that the caller of `call_soon` or `call_at` has, by which it may cancel the callback. The loop sets it
        before the callback can run."""

    def run(self) -> None:
        """Call the function, or hold the callback while its process is frozen."""
        if self._process is not None and self._process.frozen:
            self._process.held.append(self)
        # The caller may have cancelled a callback that was held. asyncio checks only the handles that it has itself.
        elif not self.handle.cancelled():
            self._callback(*self._args)


class _Task(asyncio.Task[Any]):
    """A task that hashes to its number, so that sets of tasks have the same order in each run.

    Args:
        number: number of the task, in the order in which the tasks of the loop were made.
        coroutine: coroutine that the task runs.
        loop: loop of the task.
        options: options of `asyncio.Task`, such as the name and the context.
    """

    def __init__(self, number: int, coroutine: Any, loop: FaultLoop, **options: Any) -> None:
        self.number = number
        self._fault_loop = loop
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the task, like `asyncio.Task.cancel`. Returns False if the task has ended already.

        `msg` is the message of the CancelledError. The loop wakes all tasks that are cancelled together in the order of
        their numbers. For this, `loop.cancelling` names the task while asyncio schedules its wake-up.
        """
        loop = self._fault_loop
        # Cancelling a task that waits for another task cancels that one too, within this call.
        outer, loop.cancelling = loop.cancelling, self.number
        try:
            return super().cancel(msg)
        finally:
            loop.cancelling = outer


class FaultLoop(VirtualLoop):
    """The event loop of a simulation with faults. `flash.simulate.faults.play` runs each scenario on a new one.

    A *sweep* is the wake-ups of all tasks that were cancelled one after another, with nothing else scheduled between.
    They come in the order in which anyio cancels, which differs from run to run. So they are collected, and scheduled
    in the order of their tasks as soon as anything else is scheduled, or the pass of the loop ends.
    """

    def __init__(self) -> None:
        self.cancelling: int | None = None
        """Number of the task that is being cancelled; None if none is."""
        self._numbers = count(1)
        """Numbers of the next tasks."""
        self._passes = 0
        """Number of passes of the loop since the clock has advanced. A pass runs all callbacks that are due."""
        self._sweep: list[tuple[int, int, _Call]] = []
        """Callbacks of the present sweep, each with the number of its task (or RETRY) and its place in this list.
        `_end_sweep` sorts by both."""
        super().__init__()
        self.set_task_factory(lambda loop, coroutine, **options: _Task(next(self._numbers), coroutine, self, **options))

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """Schedule a callback for the next pass of the loop, and return the handle that cancels it.

        While its process is frozen, it waits until the process goes on. `context` names the process; None: the present
        context.
        """
        call = _call(callback, args, context)
        # A wake-up of a cancelled task joins the sweep, and so does anyio's callback that comes after a sweep.
        if self.cancelling is not None or (self._sweep and _is_retry(callback)):
            number = RETRY if self.cancelling is None else self.cancelling
            self._sweep.append((number, len(self._sweep), call))
            call.handle = asyncio.Handle(callback, args, self, call.context)
        else:
            self._end_sweep()
            call.handle = super().call_soon(call.run, context=call.context)
        return call.handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback for the time `when`, in seconds, and return the handle that cancels it.

        If its process is frozen then, it waits until the process goes on. `context` has the meaning of `call_soon`.
        """
        call = _call(callback, args, context)
        call.handle = timer = super().call_at(when, call.run, context=call.context)
        return timer

    def jump(self, seconds: float | None) -> None:
        """Advance the clock by `seconds`, unless callbacks of a sweep are due at this moment, and schedule them.

        `seconds` is 0 if a task can run, and None if no timer is set. The selector calls this once in each pass.

        Raises:
            ContractError: no task can ever run again; or the clock has not advanced for MOST_PASSES passes, because
                tasks wake each other without a pause.
            Exception: a callback or timer has raised it.
        """
        before = self.time()
        super().jump(0.0 if self._sweep else seconds)
        self._end_sweep()
        self._passes = self._passes + 1 if self.time() == before else 0
        if self._passes > MOST_PASSES:
            self._passes = 0
            raise self.refuse(f"a moment at which tasks run for {MOST_PASSES} passes of the loop")

    def _end_sweep(self) -> None:
        """Schedule the callbacks of the present sweep, in the order of their tasks. The next sweep begins empty."""
        if self._sweep:
            sweep, self._sweep = sorted(self._sweep, key=lambda each: each[:2]), []
            for _, _, call in sweep:
                super().call_soon(call.run, context=call.context)


def _is_retry(callback: Callable[..., object]) -> bool:
    """Return True for the callback with which anyio cancels tasks again that have not ended yet.

    anyio schedules this private method of a cancel scope at the end of each sweep. Other callbacks end the sweep.
    """
    return getattr(callback, "__name__", "") == "_deliver_cancellation"


def _call(callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> _Call:
    """Return the call of a function in a context, which names the process; None: in a copy of the present context."""
    context = copy_context() if context is None else context
    return _Call(context.get(PROCESS), callback, args, context)


async def until(condition: Callable[[], bool], every_s: float = 1.0) -> None:
    """Wait until a condition holds. It is called at once and then every `every_s` seconds, as launchers seek a hub."""
    while not condition():  # noqa: ASYNC110 - nothing in a real machine would notify a launcher
        await anyio.sleep(every_s)
