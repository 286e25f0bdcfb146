"""AgentRun: runs an agent, which is user code, to its end beside the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flash.environment.calls import UserTask, describe_error
from flash.service.sessions import EpisodeSession

Function = Callable[[str, str, str], Awaitable[str] | str]
"""Function `(base_url, api_key, task)` that returns the answer."""


class AgentRun:
    """An agent that works on its task until it returns, fails or is ended."""

    def __init__(self, agent: Function, arguments: tuple[str, str, str], session: EpisodeSession) -> None:
        self._run = UserTask("the agent", lambda: agent(*arguments), on_end=session.agent_ended)

    @property
    def answer(self) -> str | None:
        """Text that the agent has returned; None if it still runs, has failed or returned no text."""
        value: object = self._run.value
        return value if isinstance(value, str) else None

    @property
    def why(self) -> str:
        """Reason of the agent's failure, as the end of a sentence; empty if the agent has answered."""
        error: BaseException | None = self._run.error
        if isinstance(error, asyncio.CancelledError):
            return ": it was cancelled from within"
        if error is not None:
            return f": it raised {describe_error(error)}"
        if self.answer is not None:
            return ""
        # Only the type, because formatting the value would run the agent's code.
        return f": it must return its answer as text, but returned a value of {type(self._run.value).__name__}"

    async def end(self) -> None:
        """Cancel the agent if it still runs. An agent that does not end in time is abandoned, with a warning."""
        await self._run.end()
