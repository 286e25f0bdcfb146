"""An agent at work: a user's code, run to its end beside the episode, whatever it does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flash.environment.calls import UserTask, describe_error
from flash.service.sessions import EpisodeSession

Function = Callable[[str, str, str], Awaitable[str] | str]
"""`(base_url, api_key, task)`; returns the answer."""


class AgentRun:
    """An agent that works on its task until it has returned, or is ended."""

    def __init__(self, agent: Function, arguments: tuple[str, str, str], session: EpisodeSession) -> None:
        self._run = UserTask("the agent", lambda: agent(*arguments), on_end=session.agent_ended)

    @property
    def answer(self) -> str | None:
        """The text that the agent has returned; None if it has not, or has failed."""
        value: object = self._run.value
        return value if isinstance(value, str) else None

    @property
    def why(self) -> str:
        """How the agent failed, as the end of a sentence; empty if it has not."""
        error: BaseException | None = self._run.error
        if isinstance(error, asyncio.CancelledError):
            return ": it was cancelled from within"
        if error is not None:
            return f": it raised {describe_error(error)}"
        if self.answer is not None:
            return ""
        # Only the type: showing the value would run the agent's code.
        return f": it must return its answer as text, but returned a value of {type(self._run.value).__name__}"

    async def end(self) -> None:
        """End the agent wherever it is. It is abandoned, with a warning, if it does not end in time."""
        await self._run.end()
