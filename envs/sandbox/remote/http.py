"""HttpClient: calls to a service over HTTP, with their encoding, errors, and repetition when a connection breaks.

A `SandboxClient` makes one for its block, and all of its sandboxes send their calls with it. One function of
`envs.sandbox.service.routes` answers each call.

A call is repeated only if that is safe: nothing was sent yet, it only reads or removes, or it has an idempotency key.
The key is a random text that the client chooses: the service runs the calls with one key only once. If the service was
restarted in between and does not know the key of a repeated call, it answers with a SandboxLostError, because it cannot
know if the first attempt was run. So a repeated call carries the identifier of the service's start that the client last
saw.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlencode

import anyio
import httpx
import msgspec

from envs.sandbox.protocol import BINARY, MSGPACK, NDJSON, PROBLEM_JSON, HttpProblem, error_of
from envs.sandbox.text import check_path
from flash.errors import (
    DECODE_ERRORS,
    ConfigError,
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxTimeoutError,
)

_T = TypeVar("_T")

CONNECT_S = 5.0
"""Seconds that opening one connection may take."""
REPEAT_S = 30.0
"""Seconds for which a call is repeated while the service cannot be reached: as long as a restart takes."""
MARGIN_S = 30.0
"""Seconds that a response may take in addition to the time of the call itself."""
RATE = 1 << 20
"""Bytes per second at which a file is expected to be sent and written, on a slow connection or a busy machine."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
"""Seconds between two attempts of a call: the first pause, and the longest one."""


class HttpClient:
    """HTTP connection of a client to one service."""

    def __init__(
        self,
        url: str,
        token: str,
        verify: ssl.SSLContext | bool = True,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Create a client without connecting.

        Args:
            url: address of the service: http://…, https://… or unix:/path.
            token: secret that each call carries in its header.
            verify: how the certificate of an https:// service is checked, as `certificate_check` returns it.
            transport: connections of httpx, in place of those to `url`. Only tests set it.

        Raises:
            ConfigError: the address has another form, or the token is empty or cannot be sent in a header.
        """
        self.url = url
        self._boot = ""
        """Identifier of the service's last start, as its responses report it; empty before the first response."""
        unix = url.removeprefix("unix:") if url.startswith("unix:") else None
        if unix is None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"expected http://…, https://… or unix:/path as the address of the service, not {url!r}")
        try:
            parsed = httpx.URL("http://sandboxes" if unix is not None else url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is no address of a service: {error}") from error
        if unix == "" or not parsed.host or not 0 <= (parsed.port or 0) <= 65535:
            raise ConfigError(f"{url!r} is no address of a service; expected http://HOST:PORT or unix:/path")
        if not token or not (token.isascii() and token.isprintable()):
            raise ConfigError(
                "the token is empty or has characters that a header cannot carry; check the token file or "
                "FLASH_SANDBOX_TOKEN"
            )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        if unix is not None:
            transport = transport or httpx.AsyncHTTPTransport(uds=unix, limits=limits)
        self._client = httpx.AsyncClient(
            base_url=parsed,
            transport=transport,
            limits=limits,
            verify=httpx.create_ssl_context(verify=verify, trust_env=False),
            trust_env=False,
            headers={"authorization": f"Bearer {token}"},
        )

    async def aclose(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        answer: type[_T],
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
        seconds: float = 0.0,
        key: str = "",
    ) -> _T:
        """Send a call whose response is a struct.

        Args:
            method: HTTP method.
            path: path of the endpoint.
            answer: type of the response; `type(None)`: there is none, and None is returned.
            body: body of the request; None: none.
            query: parameters of the query; None: none.
            seconds: seconds that the service may take for the call; the response may take `MARGIN_S` in addition.
            key: idempotency key, which makes the call safe to repeat; empty: none.

        Raises:
            SandboxError: an error of `_send`, or the response cannot be decoded.
        """
        headers = {"accept": MSGPACK}
        content = None
        if body is not None:
            headers["content-type"] = MSGPACK
            content = msgspec.msgpack.encode(body)
        response = await self._send(method, path, content, query, headers, seconds, key)
        if answer is type(None):
            return None  # type: ignore[return-value]
        try:
            return msgspec.msgpack.decode(response.content, type=answer)
        except DECODE_ERRORS as error:
            raise SandboxLostError(
                f"the answer of {self.url} cannot be read: {error}; does it run the same version of Flash?"
            ) from error

    async def get_bytes(self, path: str, query: Mapping[str, Any]) -> bytes:
        """Return the bytes of the file that `query` names, with a GET of the endpoint `path`.

        Raises SandboxError as `_send` does.
        """
        return (await self._send("GET", path, None, query, {"accept": BINARY}, 0.0, "")).content

    async def put_bytes(self, path: str, query: Mapping[str, Any], data: bytes) -> None:
        """Send the bytes of a file, which `query` names, to the endpoint `path`.

        The call is not repeated once bytes were sent: an append would happen twice.

        Raises SandboxError as `_send` does.
        """
        seconds = MARGIN_S + len(data) / RATE
        await self._send("PUT", path, data, query, {"content-type": BINARY}, seconds, "")

    async def put_pieces(
        self,
        path: str,
        query: Mapping[str, Any],
        pieces: AsyncIterator[bytes],
        size: int | None,
        *,
        media_type: str,
        seconds: float,
    ) -> None:
        """Send bytes of the type `media_type` while they are produced, to the endpoint `path` with `query`.

        `size` is their number; None if it is not known. The bytes have to be sent and processed within `seconds`.

        The call is not repeated once bytes were sent. Raises SandboxError as `_send` does, and the errors of `pieces`.
        """
        headers = {"content-type": media_type, **({} if size is None else {"content-length": str(size)})}
        await self._send("PUT", path, pieces, query, headers, seconds, "")

    @asynccontextmanager
    async def streamed(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
        key: str = "",
    ) -> AsyncGenerator[httpx.Response]:
        """Open a streamed response. Leaving the block closes the connection, and the service then ends the call.

        The call is not repeated: the caller may have used a part of the response already. `key` is its idempotency key,
        under which the service keeps the error of a response that it breaks off; empty if the call has none.

        The caller reads the response, and gets the errors of httpx then.

        Raises:
            SandboxError: the error of the service, the service cannot be reached or does not answer in time, or the
                call cannot be requested (`_target`, `_request`).
        """
        headers = {
            "accept": NDJSON,
            **({"content-type": MSGPACK} if body is not None else {}),
            **({"idempotency-key": key} if key else {}),
        }
        content = msgspec.msgpack.encode(body) if body is not None else None
        # The seconds of a call are 0: the service sends the head of its response at once.
        request = self._request(method, _target(path, query), content, headers, seconds=0.0)
        try:
            with self._translated(path, seconds=0.0):
                response = await self._client.send(request, stream=True)
        except _BrokenError as error:
            raise error.final from error
        try:
            if response.status_code >= 400:
                try:
                    with self._translated(path, seconds=0.0):
                        await response.aread()
                except _BrokenError as error:
                    raise error.final from error
                raise self._error_from(response)
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | AsyncIterator[bytes] | None,
        query: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        seconds: float,
        key: str,
    ) -> httpx.Response:
        """Send a call and return its response. If a connection breaks, repeats the call as long as that is safe.

        All attempts together get no more time than one: `seconds` and `MARGIN_S`. The last attempt begins within this
        time, and within `REPEAT_S` seconds. Other calls may run at the same time.

        Args:
            method: HTTP method.
            path: path of the endpoint.
            content: body, or its pieces; None: none. Pieces can be sent only once: a call with pieces is repeated only
                if nothing was sent.
            query: parameters of the query; None: none.
            headers: HTTP headers.
            seconds: seconds that the call itself may take.
            key: idempotency key; empty if the call has none.

        Raises:
            SandboxFileError, SandboxRefusedError: the call cannot be requested (`_target`, `_request`).
            SandboxTimeoutError: the service did not answer in time.
            SandboxLostError: the service cannot be reached.
            SandboxError: the error that the service has answered.
            Exception: an error of `content`, if it is an iterator.
        """
        headers = {**headers, **({"idempotency-key": key} if key else {})}
        repeatable = bool(key) or method in ("GET", "DELETE")
        begin = anyio.current_time()
        until = begin + seconds + MARGIN_S
        give_up = min(begin + REPEAT_S, until)
        # Read before the first attempt: another call may meanwhile get the identifier of a restarted service.
        boot, pause = self._boot, _FIRST_PAUSE_S
        target = _target(path, query)
        while True:
            request = self._request(method, target, content, headers, seconds)
            response = None
            try:
                # A repeated call gets no more time in total than a single one.
                with self._translated(path, seconds), anyio.move_on_after(until - anyio.current_time()):
                    response = await self._client.send(request)
                if response is None:
                    raise self._timeout_error(path, seconds)
                break
            except _BrokenError as error:
                # A further attempt that starts too late would fail with a timeout, which hides the cause.
                if not (repeatable or error.unsent) or anyio.current_time() + pause >= give_up:
                    raise error.final from error
                if not error.unsent and boot:
                    # The service may have carried out the call. If it was restarted since, it cannot know, and says so.
                    headers["flash-boot"] = boot
            await anyio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
        self._boot = response.headers.get("flash-boot", self._boot)
        if response.status_code >= 400:
            raise self._error_from(response)
        return response

    def _request(
        self,
        method: str,
        target: str,
        content: bytes | AsyncIterator[bytes] | None,
        headers: Mapping[str, str],
        seconds: float,
    ) -> httpx.Request:
        """Build a request of a call that may take `seconds`. `target` is its path with the query, `content` its body.

        Raises:
            SandboxRefusedError: the address is too long or cannot be encoded.
        """
        timeout = httpx.Timeout(MARGIN_S, read=seconds + MARGIN_S, connect=CONNECT_S)
        try:
            return self._client.build_request(method, target, content=content, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise SandboxRefusedError(
                f"{target[:80]}… ({len(target)} characters) cannot be requested: {error}"
            ) from None

    @contextmanager
    def _translated(self, path: str, seconds: float) -> Generator[None]:
        """Turn errors of httpx in the block into a `SandboxError`, for a call of `path` that may take `seconds`.

        Raises:
            SandboxTimeoutError: the service sent nothing for `seconds` and `MARGIN_S`.
            _BrokenError: the connection failed. `_send` repeats the call then, if that is safe.
        """
        try:
            yield
        except httpx.ReadTimeout as error:
            raise self._timeout_error(path, seconds) from error
        except httpx.HTTPError as error:
            unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            final = SandboxLostError(f"{self.url}{path} cannot be reached: {reason}; does the service run?")
            raise _BrokenError(final, unsent=unsent) from error

    def _timeout_error(self, path: str, seconds: float) -> SandboxTimeoutError:
        """Return the error of a call that may take `seconds` and was not answered in time."""
        return SandboxTimeoutError(f"waited {seconds + MARGIN_S:g} s for {self.url}{path}; look at the service's log")

    def _error_from(self, response: httpx.Response) -> SandboxError:
        """Return the exception for a response with an error status: the one that the service raised.

        Returns a SandboxLostError for a response that is not the service's, for example a proxy's.
        """
        if response.headers.get("content-type", "").startswith(PROBLEM_JSON):
            try:
                return error_of(msgspec.json.decode(response.content, type=HttpProblem))
            except DECODE_ERRORS:
                pass  # The error below reports it.
        return SandboxLostError(
            f"{self.url} answered {response.status_code} in a form that the service never sends; is there a proxy "
            "between?"
        )


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    """Return the path of a call with its query. Names of files that are not UTF-8 are encoded byte by byte.

    `query` None or empty: none. Its value `path`, if it is a text, is the path of a file in the sandbox.

    Raises:
        SandboxFileError: the path of a file is too long.
        SandboxRefusedError: a value cannot be encoded.
    """
    if query and isinstance(name := query.get("path"), str):
        check_path(name)
    try:
        return f"{path}?{urlencode(query, errors='surrogateescape')}" if query else path
    except UnicodeEncodeError as error:
        raise SandboxRefusedError(f"a name cannot be encoded: {error.reason}") from None


class _BrokenError(SandboxError):
    """Failure of a connection. `_translated` raises it; `_send` and `streamed` turn it into its `final` error."""

    def __init__(self, final: SandboxError, *, unsent: bool) -> None:
        super().__init__(str(final))
        self.final = final
        """Error to raise if the call is not repeated."""
        self.unsent = unsent
        """True if the service cannot have received the call, so that any call may be repeated."""
