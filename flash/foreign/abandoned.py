"""Functions for abandoned coroutines, which use private parts of asyncio and anyio.

A call of a user's code (an environment, a reward) may swallow its cancellation and go on. `flash.environment.calls`
then *abandons* the call: nothing waits for it any more, and these functions make sure that nothing cancels it again and
again, and that Python does not delete it, which would print errors.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator
from typing import Any

from anyio import CancelScope
from anyio._backends import _asyncio as backend  # pyright: ignore[reportPrivateImportUsage]

TOUCHED = (
    "asyncio:_unregister_task",
    "anyio._backends._asyncio:_task_states",
    "anyio._backends._asyncio:TaskState.cancel_scope",
    *(
        f"anyio._backends._asyncio:CancelScope.{name}"
        for name in ("_parent_scope", "_child_scopes", "_tasks", "_cancel_handle", "_timeout_handle")
    ),
)
"""Attributes of asyncio and anyio that this module uses, as `module:Class.attribute`. A test looks for each of them."""


def keep_for_ever(one: object) -> None:
    """Keep an object until the process ends. Python prints an error when it deletes a coroutine that ignores
    GeneratorExit, as an abandoned coroutine may do."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def unregister(task: asyncio.Task[Any]) -> None:
    """Remove an abandoned task from the tasks for which the event loop waits at its end, and keep the task for ever.

    The loop would cancel the task and wait for it, and hang if the task's code swallows cancellations.
    """
    keep_for_ever(task)
    asyncio._unregister_task(task)  # pyright: ignore[reportPrivateUsage]


def scopes_within(scope: CancelScope, task: asyncio.Task[Any]) -> list[Any]:
    """Return `scope`, and all scopes that `task` or its child tasks have entered inside `scope`.

    `task` is the task of a call that is ended or abandoned, and `scope` the scope around the call.
    """
    found: list[Any] = []
    state = backend._task_states.get(task)  # pyright: ignore[reportPrivateUsage]
    inner: Any = None if state is None else state.cancel_scope  # the innermost scope of the task
    while inner is not None and inner is not scope:
        found.append(inner)
        inner = inner._parent_scope
    # The scopes of child tasks are children of the scopes found so far.
    for each in [*found, scope]:
        found += [one for one in _children(each) if one not in found]
    return found


def _children(scope: Any) -> Iterator[Any]:
    """Yield a scope and, recursively, all scopes inside it."""
    yield scope
    for child in scope._child_scopes:
        yield from _children(child)


def are_delivering(scopes: list[Any]) -> bool:
    """Return True if one of these scopes is about to cancel a task once more.

    A cancelled scope cancels its tasks again and again until they have ended. So this is True if a task has swallowed
    the last cancellation. `UserTask.end` then gives the call no more time.
    """
    return any(scope._cancel_handle is not None for scope in scopes)


def disarm(scopes: list[Any], task: asyncio.Task[Any]) -> list[asyncio.Task[Any]]:
    """Stop the timers and cancellations of the scopes of an abandoned call, and return the other tasks in them.

    `task` is the task of the call. A cancelled scope cancels its tasks on every turn of the loop until they end. A task
    that swallows the cancellation, or never runs again, would keep the loop busy for the rest of the run.
    """
    for scope in scopes:
        for handle in (scope._cancel_handle, scope._timeout_handle):
            if handle is not None:
                handle.cancel()
    return [one for scope in scopes for one in scope._tasks if one is not task and not one.done()]
