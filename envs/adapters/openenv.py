"""OpenEnv: environments of an OpenEnv server, through its client protocol: JSON over one WebSocket per episode.

The server answers `reset` and `step` with an observation, a reward and a flag that is true when the episode is over.
One field of the observation is shown to the policy, and the answer becomes one field of the action. Environments that
consist of tools have such fields in tables: the action is a call of a tool, and the observation is the result of that
call. The package `openenv` is not needed.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any, cast

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from flash.environment import Info, StepResult
from flash.errors import DECODE_ERRORS, ConfigError, EnvError, RewardError

NO_TOOL = "tool_not_found"
"""Type of the error that the server reports if `action` names a tool that it does not have."""
LARGEST_MESSAGE = 16 << 20
"""Largest message of the server, in bytes."""


class OpenEnvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the server, and the fields for texts.

    Raises:
        ConfigError: the address is not a URL.
    """

    url: str
    """Address of the server: `http://host:port` or `https://…`."""
    observation_field: str
    """Field of the observation that the policy is shown. A value that is not text is shown as JSON. Dots lead into
    tables, such as `result.data`."""
    action_field: str
    """Field of the action that receives the answer. Dots lead into tables, such as `arguments.message`."""
    action: dict[str, Any] = msgspec.field(default_factory=dict)
    """Remaining fields of the action."""
    instructions: str = ""
    """Text before the first observation. If it is not empty, the first observation may lack `observation_field`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must begin with http:// or https://, but is {self.url!r}")


class _Reply(msgspec.Struct):
    """Message of the server."""

    type: str
    """Kind of the message, such as an observation or an error."""
    data: dict[str, Any]
    """Content of the message."""


class OpenEnv:
    """Environment of one episode, with its own connection. The rollout node makes one object for each episode."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._connection: ClientConnection | None = None
        """Connection to the server; None before `reset`."""
        self._rewarded = False
        """True if a reply of the episode had a reward."""

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Connect, and start an episode with this seed. Raises EnvError if the server cannot be reached, or fails."""
        # `http://` becomes `ws://`, and `https://` becomes `wss://`.
        address = f"ws{self._options.url.removeprefix('http').rstrip('/')}/ws"
        try:
            self._connection = await connect(address, max_size=LARGEST_MESSAGE, proxy=None)
        except (OSError, InvalidHandshake) as error:
            raise EnvError(f"{address} cannot be reached: {error}") from error
        reply = await self._request("reset", {"seed": seed})
        instructions = self._options.instructions
        return instructions + self._shown(reply, missing="" if instructions else None), {}

    async def step(self, action: str) -> StepResult:
        """Send the answer, and return the observation and reward of the server's reply.

        Returns (observation, reward, terminated, truncated, info).

        Raises:
            RewardError: the episode is over, and none of its replies had a reward.
            EnvError: the server failed, its reply lacks the field, or `reset` was not called before.
        """
        # Copied, because the answer is put into the tables of the option.
        table = request = copy.deepcopy(self._options.action)
        *tables, field = self._options.action_field.split(".")
        for name in tables:
            table = table.setdefault(name, {})
        table[field] = action
        reply = await self._request("step", request)
        reward, done = reply.get("reward"), bool(reply.get("done"))
        self._rewarded = self._rewarded or reward is not None
        # A step may have no reward, but an episode without any may be one whose grader has failed.
        if done and not self._rewarded:
            raise RewardError("the server ended the episode without a reward; look at its log")
        return self._shown(reply), reward or 0.0, done, False, {}

    async def close(self) -> None:
        """Close the connection, which ends the episode on the server. Does nothing before `reset`."""
        if self._connection is not None:
            await self._connection.close()

    async def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a request, wait for the server's reply, and return its data. Only the caller's deadline ends the wait.

        Args:
            kind: `reset` or `step`.
            data: content of the request.

        Raises:
            EnvError: the server refused the request, ended the connection or sent another message, or there is no
                connection yet.
        """
        if self._connection is None:
            raise EnvError("step() was called before reset()")
        try:
            # A server without a free slot sends an error and closes the connection before it has read the request. So a
            # failed send is ignored, and the error is received below.
            with suppress(ConnectionClosed):
                await self._connection.send(msgspec.json.encode({"type": kind, "data": data}).decode())
            message = await self._connection.recv()
        except ConnectionClosed as error:
            raise EnvError(f"the server ended the connection in {kind}: {error}") from error
        try:
            answer = msgspec.json.decode(message, type=_Reply)
        except DECODE_ERRORS as error:
            raise EnvError(f"the answer to {kind} is none of OpenEnv's: {error}; it is {message[:200]!r}") from error
        if answer.type == "error":
            raise EnvError(f"the server refused {kind}: {answer.data.get('message')} ({answer.data.get('code')})")
        return answer.data

    def _shown(self, reply: dict[str, Any], missing: str | None = None) -> str:
        """Return the text of a reply's observation, or `missing` if the configured field is missing.

        An observation that reports an error of a tool instead of its result is shown as that error.

        Raises:
            EnvError: the configured field is missing and `missing` is None, or the server has no such tool.
        """
        shown: Any = reply.get("observation") or {}
        if not isinstance(shown, dict):
            raise EnvError(f"the observation must have fields, but is {shown!r:.200}")
        error = cast("dict[str, Any]", shown).get("error")
        path = ""  # fields that were followed so far, for the error message
        for field in self._options.observation_field.split("."):
            # A tool that failed has no table of results where the field is looked for, but an error beside it.
            if isinstance(error, dict) and not isinstance(shown, dict):
                if error.get("error_type") == NO_TOOL:
                    raise EnvError(f"the server refused step: {error.get('message')} ({NO_TOOL})")
                return str(error.get("message"))
            if not isinstance(shown, dict) or field not in shown:
                if missing is not None:
                    return missing
                names = ", ".join(map(repr, shown)) if isinstance(shown, dict) else f"the value {shown!r:.200}"
                raise EnvError(f"the observation has no field {path + field!r}, only {names}")
            shown, path = shown[field], f"{path}{field}."
        return shown if isinstance(shown, str) else msgspec.json.encode(shown).decode()
