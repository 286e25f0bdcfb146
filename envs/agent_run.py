"""An agent at work: code that is not ours, run to its end in a task of the node's, whatever it does."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import cast

import anyio

from flash.environment.calls import is_theirs, told_of
from flash.service.sessions import Session

Function = Callable[[str, str, str], Awaitable[str] | str]
"""`(base_url, api_key, task)`; returns the answer."""


class AgentRun:
    """An agent at work, in a task of the node's."""

    def __init__(self, agent: Function, arguments: tuple[str, str, str], session: Session) -> None:
        self._agent = agent
        self._arguments = arguments
        self._session = session
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self.answer: str | None = None
        """What it returned; None when it failed."""
        self.why = ""
        """How it failed, as the end of a sentence."""

    async def live(self) -> None:
        """Run it to its end; raises nothing but a cancellation from outside."""
        try:
            with self._scope:
                await self._work()
        finally:
            self._session.agent_ended()
            self._over.set()

    async def _work(self) -> None:
        try:
            returned = self._agent(*self._arguments)
            answer = cast("object", await returned if inspect.isawaitable(returned) else returned)
        except BaseException as error:  # the supervised boundary to code that is not ours
            if is_theirs(error):
                self.why = f": it raised {told_of(error)}"
                return
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            if not cancelled or anyio.current_effective_deadline() == float("-inf"):
                raise
            # Something inside of it was cancelled, not the agent: passed on it would end every agent of the node.
            self.why = ": it was cancelled from within"
        else:
            if isinstance(answer, str):
                self.answer = answer
            else:
                self.why = f": it must return its answer as text, but returned {answer!r}"

    async def end(self) -> None:
        """End it, wherever it is."""
        self._scope.cancel()
        await self._over.wait()
