"""Environments that an OpenEnv server offers, by the protocol of its client: JSON over one WebSocket per episode.

`reset` and `step` are answered with an observation, a reward and whether the episode is over. The text that is shown is
one field of the observation, and an answer becomes one field of the action. Nothing of the package `openenv` is needed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from flash.environment import Info, StepResult
from flash.errors import ConfigError, EnvError

LARGEST_MESSAGE = 16 << 20
"""Bytes."""


class OpenEnvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which server, and where its text is.

    Raises:
        ConfigError: the address is none.
    """

    url: str
    """`http://host:port`, or `https://`."""
    observation_field: str
    """Of the observation, shown to the policy; a value that is no text is shown as JSON."""
    action_field: str
    """Of the action: holds the answer."""
    action: dict[str, Any] = msgspec.field(default_factory=dict)
    """The other fields of the action."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must begin with http:// or https://, but is {self.url!r}")


class _Told(msgspec.Struct):
    """What the server says."""

    type: str
    data: dict[str, Any]


class OpenEnv:
    """One episode, over a connection of its own."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._connection: ClientConnection | None = None

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Connect, and start with this seed."""
        address = f"ws{self._options.url.removeprefix('http').rstrip('/')}/ws"
        try:
            self._connection = await connect(address, max_size=LARGEST_MESSAGE, proxy=None)
        except (OSError, InvalidHandshake) as error:
            raise EnvError(f"{address} cannot be reached: {error}") from error
        return self._shown(await self._asked("reset", {"seed": seed})), {}

    async def step(self, action: str) -> StepResult:
        """Send the answer."""
        told = await self._asked("step", {**self._options.action, self._options.action_field: action})
        return self._shown(told), told.get("reward") or 0.0, bool(told.get("done")), False, {}

    async def close(self) -> None:
        """Say good-bye."""
        if self._connection is not None:
            await self._connection.close()

    async def _asked(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            raise EnvError("step() was called before reset()")
        try:
            # A server without a free place says so and hangs up before it is asked.
            with suppress(ConnectionClosed):
                await self._connection.send(msgspec.json.encode({"type": kind, "data": data}).decode())
            said = await self._connection.recv()
        except ConnectionClosed as error:
            raise EnvError(f"the server ended the connection in {kind}: {error}") from error
        try:
            answer = msgspec.json.decode(said, type=_Told)
        except msgspec.DecodeError as error:
            raise EnvError(f"the answer to {kind} is none of OpenEnv's: {error}; it is {said[:200]!r}") from error
        if answer.type == "error":
            raise EnvError(f"the server refused {kind}: {answer.data.get('message')} ({answer.data.get('code')})")
        return answer.data

    def _shown(self, told: dict[str, Any]) -> str:
        field, observation = self._options.observation_field, told.get("observation") or {}
        if not isinstance(observation, dict):
            raise EnvError(f"the observation must have fields, but is {observation!r:.200}")
        if field not in observation:
            raise EnvError(f"the observation has no field {field!r}, only {', '.join(map(repr, observation))}")
        shown = observation[field]
        return shown if isinstance(shown, str) else msgspec.json.encode(shown).decode()
