"""The API of Docker or Podman over aiodocker: requests, attached streams, and the engine's errors as ours.

Everything that aiodocker has, but does not promise, is touched here and nowhere else:

    Docker._query             a request with any path, body and headers; its own methods lack parameters
    Docker.close              leaves a connector that it was given open
    DockerContainer.attach    takes detach_keys
    Stream.write_in           writes all of it to the transport before it waits
    DockerError               status and message; from 900 on the engine could not be reached
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import aiodocker
import aiohttp
import anyio
import msgspec
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from flash.errors import SandboxError, SandboxLostError, SandboxRefusedError, SandboxTimeoutError

STDOUT = 1
"""Number of the stream in the engine's messages."""
TRANSCRIPT_BYTES = 2000
"""Kept of what the first process of a sandbox complains of."""
NOT_HTTP = 900
"""From here on a status is aiodocker's own: the engine cannot be reached."""
EXECS = 4
"""Execs started at a time."""
HTTP_FAILED = 500
"""Answer of an engine that failed, or whose runtime did."""


class AttachedLink:
    """The attached standard streams of a process of a container."""

    def __init__(self, stream: Stream, container_id: str) -> None:
        self._stream = stream
        self._container_id = container_id
        self.transcript = b""

    async def send(self, data: bytes) -> None:
        try:
            # Writes everything to the transport before it waits: cancelled or not, a frame is never torn.
            await self._stream.write_in(data)
        except (OSError, RuntimeError, AssertionError, aiohttp.ClientError) as error:
            raise SandboxLostError(f"the link to container {self._container_id[:12]} broke: {error}") from error

    async def receive(self) -> bytes:
        try:
            # What a shell or Python complains of is no part of what the agent says.
            while (message := await self._stream.read_out()) is not None and message.stream != STDOUT:
                self.transcript = (self.transcript + message.data)[-TRANSCRIPT_BYTES:]
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            raise SandboxLostError(f"the link to container {self._container_id[:12]} broke: {error}") from error
        return b"" if message is None else message.data

    async def aclose(self) -> None:
        with suppress(OSError, RuntimeError, AssertionError, aiohttp.ClientError):
            await self._stream.close()


@contextmanager
def _failing(error: type[SandboxError], what: str, url: str) -> Generator[None]:
    """Turns failures of a request into the error that it stands for."""
    try:
        yield
    except SandboxError:
        raise
    except TimeoutError as failure:
        raise SandboxTimeoutError(f"the engine at {url} did not answer {what} in time") from failure
    except (OSError, RuntimeError, aiohttp.ClientError, DockerError) as failure:
        if isinstance(failure, DockerError) and failure.status < NOT_HTTP:
            refused = SandboxRefusedError if failure.status == 400 else error
            raise refused(f"the engine refused {what}: {failure.message}") from failure
        raise error(f"the engine at {url} cannot be reached for {what}: {failure}") from failure


def status_of(error: SandboxError) -> int | None:
    """The HTTP status with which the engine answered what failed so; None when it did not answer."""
    cause = error.__cause__
    return cause.status if isinstance(cause, DockerError) and cause.status < NOT_HTTP else None


class DockerApi:
    """One engine, an asynchronous context manager.

    Args:
        url: unix:///path, http://…, https://… or tcp://….
        request_s: seconds that the engine has for a request, unless it says otherwise.
    """

    _docker: aiodocker.Docker
    _connector: aiohttp.BaseConnector

    def __init__(self, url: str, request_s: float) -> None:
        self.url = url
        self._request_s = request_s
        self._executing = anyio.CapacityLimiter(EXECS)

    async def __aenter__(self) -> Self:
        path = self.url.removeprefix("unix://")
        # Without a limit of its own: with aiohttp's default, 100 attached containers block every other request.
        if path != self.url:
            self._connector = aiohttp.UnixConnector(path, limit=0)
            self._docker = aiodocker.Docker(url="http://localhost", connector=self._connector)
        else:
            self._connector = aiohttp.TCPConnector(limit=0)
            self._docker = aiodocker.Docker(url=self.url.replace("tcp://", "http://"), connector=self._connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            # aiodocker leaves a connector that it was given open, and its session too.
            await self._docker.close()
            await self._connector.close()

    @asynccontextmanager
    async def attach(self, container_id: str) -> AsyncGenerator[AttachedLink]:
        """The standard streams of a container's first process."""
        # No detach keys: bytes 16 and 17 of an upload would end the link.
        container = self._docker.containers.container(container_id)
        stream = container.attach(stdin=True, stdout=True, stderr=True, detach_keys="")
        async with self._opened(stream, container_id) as link:
            yield link

    @asynccontextmanager
    async def exec(
        self, container_id: str, command: Sequence[str], user: str, env: Mapping[str, str]
    ) -> AsyncGenerator[AttachedLink]:
        """Another process in a running container, of this user, and its standard input and output."""
        async with self._executing:
            with (
                _failing(SandboxLostError, f"exec in {container_id[:12]}", self.url),
                anyio.fail_after(self._request_s),
            ):
                container = self._docker.containers.container(container_id)
                execution = await container.exec(
                    list(command), stdin=True, stdout=True, stderr=False, user=user, environment=dict(env)
                )
        async with self._opened(execution.start(detach=False), container_id) as link:
            yield link

    @asynccontextmanager
    async def _opened(self, stream: Stream, container_id: str) -> AsyncGenerator[AttachedLink]:
        link = AttachedLink(stream, container_id)
        try:
            with (
                _failing(SandboxLostError, f"attach to {container_id[:12]}", self.url),
                anyio.fail_after(self._request_s),
            ):
                await stream.__aenter__()
            yield link
        finally:
            with anyio.CancelScope(shield=True):
                await link.aclose()

    async def json(
        self,
        path: str,
        error: type[SandboxError],
        *,
        method: str = "GET",
        timeout: float | None = None,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        missing: Any = ...,
    ) -> Any:
        """One request; the answer's JSON, None where there is none, and `missing` where the thing does not exist."""
        body = msgspec.json.encode(data) if isinstance(data, (dict, list)) else data
        try:
            with _failing(error, f"{method} {path}", self.url), anyio.fail_after(timeout or self._request_s):
                async with self._docker._query(  # pyright: ignore[reportPrivateUsage]  # its methods lack parameters
                    path, method, data=body, headers=headers, params=dict(params or {})
                ) as response:
                    content = await response.read()
        except SandboxError as failure:
            cause = failure.__cause__
            if missing is not ... and isinstance(cause, DockerError) and cause.status == 404:
                return missing
            raise
        return msgspec.json.decode(content) if content.lstrip()[:1] in (b"{", b"[") and b"\n{" not in content else None
