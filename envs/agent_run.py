"""An agent at work: code that is not ours, run to its end in a task of its own, whatever it does.

The task is asyncio's own, and in no group: whatever an agent raises is its own failure, and one that swallows its
cancellation is told once and then given up, where a cancel scope would tell it again with every turn of the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

import anyio

from flash.environment.calls import is_theirs, told_of
from flash.service.sessions import EpisodeSession

END_S = 5.0
"""Seconds in which an agent that is cancelled may put itself in order."""

_log = logging.getLogger(__name__)

Function = Callable[[str, str, str], Awaitable[str] | str]
"""`(base_url, api_key, task)`; returns the answer."""


class AgentRun:
    """An agent at work, once it is begun."""

    def __init__(self, agent: Function, arguments: tuple[str, str, str], session: EpisodeSession) -> None:
        self._agent = agent
        self._arguments = arguments
        self._session = session
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._over = anyio.Event()
        self.answer: str | None = None
        """What it returned; None when it failed."""
        self.why = ""
        """How it failed, as the end of a sentence."""

    def begin(self) -> None:
        """Let it work, beside the caller."""
        self._task = asyncio.get_running_loop().create_task(self._work())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._session.agent_ended()
        self._over.set()
        if not task.cancelled():
            task.exception()  # of one that was left behind: it is nobody's concern

    async def _work(self) -> None:
        try:
            returned = self._agent(*self._arguments)
            answer = cast("object", await returned if inspect.isawaitable(returned) else returned)
        except BaseException as error:  # the supervised boundary to code that is not ours
            if is_theirs(error) or isinstance(error, GeneratorExit):
                self.why = f": it raised {told_of(error)}"
                return
            if self._ending or not isinstance(error, asyncio.CancelledError):
                raise
            self.why = ": it was cancelled from within"
        else:
            if isinstance(answer, str):
                self.answer = answer
            else:
                # Not what it is like: that is told by code of the agent's.
                self.why = f": it must return its answer as text, but returned a value of {type(answer).__name__}"

    async def end(self) -> None:
        """End it, wherever it is; one that does not end is left behind, and that is told."""
        assert self._task is not None, "it was begun"
        self._ending = True
        self._task.cancel()
        with anyio.move_on_after(END_S, shield=True):
            await self._over.wait()
        if not self._over.is_set():
            _log.warning("an agent goes on though it was cancelled: it must let CancelledError pass")
            # Ends what only swallows cancellations.
            with suppress(BaseException):
                self._task.get_coro().close()
