"""What a tool is: a name, a schema, and a coroutine that takes arguments and gives text.

A toolset makes the runners of one episode. What it needs of the node, a sandbox or a place for tasks of its own, it
finds in the episode's `ToolPlace`. A fault that the policy can do something about, such as a file that is not there, is
part of the text; what is wrong with the infrastructure is raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import anyio
import msgspec

from envs.tools.place import ToolPlace
from flash.service.tools import Function, described
from flash.types import Tool

SANDBOX = "sandbox"
"""The state of the tools that share the episode's sandbox."""


class Cut(str):
    """The answer of a call that was ended by its deadline: nobody knows what it had done by then."""


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    """One function that the policy may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Carries it out. Ends within the tool's own deadline."""
    state: str | None = ""
    """What its answer depends on beside the arguments: nothing, what calls with the same name here have led to, or, by
    None, things that cannot be known, so that no answer is used again."""
    changes: bool = False
    """It may change that."""

    @property
    def tool(self) -> Tool:
        """As chat templates take it."""
        return described(Function(self.name, self.description, self.parameters))


@runtime_checkable
class Toolset(Protocol):
    """Some tools of one episode. Its class is called with the options of the configuration."""

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """The tools. Raises FlashError where they cannot be had."""
        ...

    async def close(self) -> None:
        """Release what they hold. Called once, also when `open` has failed."""
        ...


def schema(**properties: str) -> dict[str, Any]:
    """The schema of required arguments that are text: each name with what it means."""
    described = {name: {"type": "string", "description": meaning} for name, meaning in properties.items()}
    return {"type": "object", "properties": described, "required": list(properties)}


async def within(seconds: float, answer: Awaitable[str]) -> str:
    """The answer, or a `Cut` that says that there was none in time."""
    with anyio.move_on_after(seconds):
        return await answer
    return Cut(f"error: no answer within {seconds:g} s")
