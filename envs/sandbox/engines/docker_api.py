"""DockerApi: requests and attached streams over aiodocker, with the engine's errors as `SandboxError`s.

`DockerBackend` opens it, and the classes of `docker_containers` and `docker_images` send their requests with it.

Only this module uses these undocumented parts of aiodocker:

    Docker._query             a request with any path, body and headers; its own methods lack parameters
    Docker.close              does not close a connector that was passed in
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
"""Number of standard output in the engine's messages."""
TRANSCRIPT_BYTES = 2000
"""Bytes of standard error that are kept of a sandbox's first process."""
NOT_HTTP = 900
"""Lowest status that aiodocker itself assigns: the engine cannot be reached."""
EXECS = 4
"""Most execs that are being started at the same time."""
HTTP_FAILED = 500
"""HTTP status if the engine or its runtime failed."""


class AttachedLink:
    """Attached standard streams of a container's process: the `Link` to its agent."""

    def __init__(self, stream: Stream, container_id: str) -> None:
        """Wrap a stream that the caller opens. `container_id` is for error messages."""
        self._stream = stream
        self._container_id = container_id
        self.transcript = b""
        """Last `TRANSCRIPT_BYTES` of standard error, for error messages."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`. Raises SandboxLostError if the connection broke."""
        try:
            # Writes everything to the transport before it waits: a frame is sent as a whole, even if this task is
            # cancelled.
            await self._stream.write_in(data)
        except (OSError, RuntimeError, AssertionError, aiohttp.ClientError) as error:
            raise SandboxLostError(f"the link to container {self._container_id[:12]} broke: {error}") from error

    async def receive(self) -> bytes:
        """Return the next bytes of standard output; empty at the end. Standard error is only kept in `transcript`.

        Raises SandboxLostError if the connection broke.
        """
        try:
            # Messages of the shell or of Python on standard error are not part of the agent's stream.
            while (message := await self._stream.read_out()) is not None and message.stream != STDOUT:
                self.transcript = (self.transcript + message.data)[-TRANSCRIPT_BYTES:]
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            raise SandboxLostError(f"the link to container {self._container_id[:12]} broke: {error}") from error
        return b"" if message is None else message.data

    async def aclose(self) -> None:
        """Close the connection. An error of a connection that is broken already is ignored."""
        with suppress(OSError, RuntimeError, AssertionError, aiohttp.ClientError):
            await self._stream.close()


@contextmanager
def _failing(error: type[SandboxError], what: str, url: str) -> Generator[None]:
    """Turn failures of a request into a `SandboxError`, so that callers know nothing of aiodocker.

    Args:
        error: class of the error, unless one of the classes below fits better.
        what: the request, for the message.
        url: address of the engine, for the message.

    Raises:
        SandboxTimeoutError: the engine did not answer in time.
        SandboxRefusedError: the engine answered 400.
        SandboxError: another failure, of class `error`. Its `__cause__` has the HTTP status, which `status_of` returns.
    """
    try:
        yield
    except TimeoutError as failure:
        raise SandboxTimeoutError(f"the engine at {url} did not answer {what} in time") from failure
    except (OSError, RuntimeError, aiohttp.ClientError, DockerError) as failure:
        if isinstance(failure, DockerError) and failure.status < NOT_HTTP:
            refused = SandboxRefusedError if failure.status == 400 else error
            raise refused(f"the engine refused {what}: {failure.message}") from failure
        raise error(f"the engine at {url} cannot be reached for {what}: {failure}") from failure


def status_of(error: SandboxError) -> int | None:
    """Return the HTTP status of the response that `error` stands for; None if the engine did not answer."""
    cause = error.__cause__
    return cause.status if isinstance(cause, DockerError) and cause.status < NOT_HTTP else None


class DockerApi:
    """Connection to one engine. An asynchronous context manager.

    Args:
        url: unix:///path, http://…, https://… or tcp://….
        request_s: seconds that the engine has for a request, unless the request sets its own timeout.
    """

    _docker: aiodocker.Docker
    """Client of aiodocker. Set by `__aenter__`."""
    _connector: aiohttp.BaseConnector
    """Connections of the client. Set by `__aenter__`."""

    def __init__(self, url: str, request_s: float) -> None:
        self.url = url
        self._request_s = request_s
        self._executing = anyio.CapacityLimiter(EXECS)
        """Limiter of execs that are being started."""

    async def __aenter__(self) -> Self:
        """Create the HTTP client. It connects with the first request."""
        path = self.url.removeprefix("unix://")
        # The connectors have no limit: with aiohttp's default, 100 attached containers block every other request.
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
        """Close all connections to the engine."""
        with anyio.CancelScope(shield=True):
            # aiodocker closes neither a connector that was passed in nor its session.
            await self._docker.close()
            await self._connector.close()

    @asynccontextmanager
    async def attach(self, container_id: str) -> AsyncGenerator[AttachedLink]:
        """Attach to the standard streams of a container's first process, for the time of the block.

        Raises SandboxLostError or SandboxTimeoutError if the engine refuses that or does not answer.
        """
        # No detach keys: with the default keys, bytes 16 and 17 of an upload would end the connection.
        container = self._docker.containers.container(container_id)
        stream = container.attach(stdin=True, stdout=True, stderr=True, detach_keys="")
        async with self._opened(stream, container_id) as link:
            yield link

    @asynccontextmanager
    async def exec(
        self, container_id: str, command: Sequence[str], user: str, env: Mapping[str, str]
    ) -> AsyncGenerator[AttachedLink]:
        """Run another process in a running container as this user, attached to its standard input and output.

        The end of the block closes the streams; the process ends by itself. `env` has variables that are added to the
        container's. Raises SandboxLostError or SandboxTimeoutError if the engine refuses that or does not answer.
        """
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
        """Connect the attached stream of a container for the time of the block, within the deadline of a request.

        Raises SandboxLostError or SandboxTimeoutError if it cannot be connected.
        """
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
        """Send one request. Returns the JSON of the response; None if the response is no single JSON value.

        Args:
            path: path of the API, without a leading slash.
            error: class of the error to raise if none of the classes below fits better.
            method: HTTP method.
            timeout: seconds that the engine has; None: `request_s` of this connection.
            data: body; a dict or a list is sent as JSON.
            headers: HTTP headers.
            params: parameters of the query.
            missing: value to return if the engine answers 404; by default that status is an error.

        Raises:
            SandboxRefusedError: the engine answered 400.
            SandboxTimeoutError: the engine did not answer in time.
            SandboxError: another failure, of class `error`.
        """
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
        # A build or an import answers with many JSON values, one per line, which no caller reads.
        return msgspec.json.decode(content) if content.lstrip()[:1] in (b"{", b"[") and b"\n{" not in content else None
