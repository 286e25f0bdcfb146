"""The HTTP application of the service: the APIs of OpenAI and Anthropic, and the agent's own reward.

`envs.agent` makes the application once for each node and serves it with `flash.http`. An agent, whose code is not part
of Flash, sends it the requests that it would send to OpenAI or Anthropic. Each request has the key of its episode.
The application finds the episode's *session* (`sessions.EpisodeSession`) by the key and makes a `Call` there, for each
answer that the request wants. The environment of the episode takes the call, lets the policy sample, and answers it.
Each endpoint is a coroutine that Starlette runs for one request; it returns the HTTP response.

The body of a request without a valid key is not read. `flash.http` bounds the number of connections, and how slowly
clients may send requests and read answers. `fields.ApiError` is the response to a request that is refused, in the
format of the API that the client expects (`_from_anthropic`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from flash.http.server import read_body
from flash.service import chat, completions, messages, responses
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.fields import ApiError, decoded
from flash.service.sessions import Call, EpisodeSession, EpisodeSessions
from flash.types import Piece
from flash.waiting import unwrapped_group

BODY_BYTES = 16 << 20
"""Largest body of a request, in bytes: far longer than any context."""
READ_BYTES = 1 << 16
"""Longest body, in bytes, that is decoded on the event loop. The worst case is a body of messages of one character
each, which takes some milliseconds. Longer bodies are decoded in a thread."""
KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a stream sends a comment. Proxies and clients give a connection up on which
nothing arrives for a minute or so, and a long call of a tool is sent only when it is complete."""
RETRIES = "x-stainless-retry-count"
"""Header in which the clients of OpenAI and Anthropic send how often they have sent a request before."""

_T = TypeVar("_T")
_Endpoint = Callable[[Request, EpisodeSession], Awaitable[Response]]
"""Function that answers the requests for one URL. It also gets the session of the request's key."""


class AnswerFormat(Protocol):
    """An encoder of the answers to one request, in the format of one API: as one body, or as server-sent events.

    For one body, `_answered` calls `body`. For a stream, `_events` calls for each answer, counted from 0 (`index`):
    `begin`, `piece` any number of times, then `finish`. The last call is `end`, or `fail` if an answer cannot be
    finished.
    """

    def body(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode all answers as one body."""
        ...

    def begin(self, index: int, prompt_tokens: int) -> bytes:
        """Encode the beginning of an answer. `prompt_tokens` is the number of tokens of its prompt."""
        ...

    def piece(self, piece: Piece, index: int) -> bytes:
        """Encode a new piece of an answer."""
        ...

    def finish(self, answer: PolicyAnswer, index: int) -> bytes:
        """Encode the end of an answer."""
        ...

    def end(self, answers: Sequence[PolicyAnswer]) -> bytes:
        """Encode the end of the stream, after all answers."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Encode an error that ends the stream before the answers are complete."""
        ...


def make_app(sessions: EpisodeSessions) -> Starlette:
    """Return the ASGI application that serves the sessions of a node. `envs.agent` calls this once for each node."""

    def with_session(endpoint: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return `endpoint` for Starlette: it finds the session of a request's key, and answers a refusal as the API
        of the client does."""

        async def handle(request: Request) -> Response:
            """Answer one request."""
            try:
                return await endpoint(request, _session(sessions, request))
            except ApiError as error:
                return _error_response(request, error)
            except HTTPException as error:
                return _error_response(request, ApiError(error.status_code, f"The request is refused: {error.detail}."))
            except ClientDisconnect:
                return Response(status_code=400)  # The client has left, so nobody reads this response.

        return handle

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", with_session(_chat), methods=["POST"]),
            Route("/v1/completions", with_session(_complete), methods=["POST"]),
            Route("/v1/responses", with_session(_respond), methods=["POST"]),
            Route("/v1/messages", with_session(_message), methods=["POST"]),
            Route("/v1/messages/count_tokens", with_session(_count), methods=["POST"]),
            Route("/v1/episode/reward", with_session(_reward), methods=["POST"]),
            Route("/v1/models", with_session(_models), methods=["GET"]),
            Route("/v1/models/{name:path}", with_session(_model), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _unknown_url, Exception: _internal_error},
    )
    # One long body is decoded at a time, in a thread. A thread whose client has left may still run beside it.
    app.state.reading = anyio.CapacityLimiter(1)
    return app


def _session(sessions: EpisodeSessions, request: Request) -> EpisodeSession:
    """Return the session of the key in a request's `Authorization` header. Raises ApiError if there is none.

    Clients of Anthropic may also send the key in `x-api-key`. This runs before the body is read, for each request.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    key = request.headers.get("x-api-key", "") if _from_anthropic(request) else ""
    session = sessions.of_key(key or (token.strip() if scheme.lower() == "bearer" else ""))
    # This marks the connection as one with a valid token: without it, the server may end the connection at any time to
    # make room for a newer one (`flash.http.connections`).
    request.scope.setdefault("state", {})["token"] = True
    return session


def _from_anthropic(request: Request) -> bool:
    """Return True if a request is from a client of Anthropic's API. Both APIs have the path /v1/models."""
    return "anthropic-version" in request.headers or request.url.path.startswith("/v1/messages")


# -- endpoints -------------------------------------------------------------------------------------------------------


def _keep_nothing(answer: PolicyAnswer, name: str) -> None:
    """Do nothing, for APIs in which no request refers to an earlier answer: each sends the whole conversation."""


async def _chat(request: Request, session: EpisodeSession) -> Response:
    """Answer a request for chat completions."""
    agent_request = await _read(request, chat.read)

    def format_for(name: str) -> AnswerFormat:
        """Return the encoder of the answers; `name` is the name of the first call."""
        return chat.ChatFormat(name, with_usage=agent_request.with_usage)

    return await _answered(request, session, agent_request, format_for, _keep_nothing)


async def _complete(request: Request, session: EpisodeSession) -> Response:
    """Answer a request for completions. Text and answer are kept, so that a longer text can continue from there."""
    agent_request, text = await _read(request, lambda body: completions.read(body, session.earlier))

    def keep(answer: PolicyAnswer, _: str) -> None:
        """Record the text and its answer, for requests whose text begins with both."""
        session.earlier.add_text(text, agent_request.messages, answer.message, answer.stop)

    def format_for(name: str) -> AnswerFormat:
        """Return the encoder of the answers; `name` is the name of the first call."""
        return completions.CompletionFormat(name, with_usage=agent_request.with_usage)

    return await _answered(request, session, agent_request, format_for, keep)


async def _respond(request: Request, session: EpisodeSession) -> Response:
    """Answer a request for a response. The conversation is kept under the response's id (`previous_response_id`)."""
    responses_request = await _read(request, lambda body: responses.read(body, session.earlier.responses))

    def keep(answer: PolicyAnswer, name: str) -> None:
        """Record the conversation up to this answer, for requests that name the response."""
        session.earlier.responses[responses.response_id(name)] = [*responses_request.messages, answer.message]

    return await _answered(
        request,
        session,
        responses_request.request,
        lambda name: responses.ResponseFormat(name, responses_request),
        keep,
    )


async def _message(request: Request, session: EpisodeSession) -> Response:
    """Answer a request of Anthropic's Messages API."""
    message = await _read(request, messages.read)

    def format_for(name: str) -> AnswerFormat:
        """Return the encoder of the answer; `name` is the name of its call."""
        return messages.MessageFormat(name, with_thinking=message.with_thinking)

    return await _answered(request, session, message.request, format_for, _keep_nothing)


async def _count(request: Request, session: EpisodeSession) -> Response:
    """Answer with the number of tokens of the prompt that a request of the Messages API would have."""
    tokens = await session.count(await _read(request, messages.read_count))
    return _json(msgspec.json.encode({"input_tokens": tokens}))


class _OwnReward(msgspec.Struct):
    """Body of a request with which an agent ends its episode."""

    reward: float
    """Reward that the agent gives itself."""


_own_reward = msgspec.json.Decoder(_OwnReward)


async def _reward(request: Request, session: EpisodeSession) -> Response:
    """End the episode with the reward that the agent gives itself."""
    own = decoded(_own_reward, await _body(request))
    session.reward_with(own.reward)
    return _json(msgspec.json.encode({"object": "episode.reward", "reward": own.reward}))


async def _models(request: Request, _: EpisodeSession) -> Response:
    """Answer a request for the list of models. Some clients send it first, to find the model's name."""
    return _json(messages.models() if _from_anthropic(request) else chat.models())


async def _model(request: Request, _: EpisodeSession) -> Response:
    """Answer a request for the description of one model."""
    describe = messages.model if _from_anthropic(request) else chat.model
    return _json(describe(request.path_params["name"]))


# -- answers ---------------------------------------------------------------------------------------------------------


async def _answered(
    request: Request,
    session: EpisodeSession,
    agent_request: AgentRequest,
    format_for: Callable[[str], AnswerFormat],
    keep: Callable[[PolicyAnswer, str], None],
) -> Response:
    """Make the calls of a request, one for each answer, and return its HTTP response, as one body or as a stream.

    Args:
        request: the HTTP request.
        session: the session of its episode.
        agent_request: the decoded body.
        format_for: returns the format of the answers, given the name of the first call.
        keep: keeps an answer for later requests. It is called with each answer, and the name of the first call, before
            the client has all of the answer. So the client's next request can refer to it.

    Raises:
        ApiError: the request is refused, or the episode ends before the answer has begun. Calls that were made before
            the refusal stay open: a repeated request finds them.
        ClientDisconnect: the client left before the response began.
    """
    key, retries = request.headers.get("idempotency-key") or None, request.headers.get(RETRIES)
    retry = None if retries is None else retries != "0"
    calls: list[Call] = []
    # Each call counts this request as a waiting one until the block or the stream ends (`Call.waited_for`).
    with ExitStack() as waits:
        for one in agent_request.each():
            # The answers to one request have different keys, since equal keys would make them one call.
            calls.append(session.call(one, key and f"{key} {one.choice}", retry=retry))
            waits.enter_context(calls[-1].waited_for())
            # A request may ask for many answers to a long conversation: other requests run in between.
            await anyio.lowlevel.checkpoint()
        name = calls[0].name
        answer_format = format_for(name)
        if agent_request.stream:
            # A stream begins only with its first piece, so that a refusal before that still has its own HTTP status.
            await _while_connected(request, calls[0].begun)
            # `pop_all` hands the waits over to the stream: they end when the stream ends, and not here.
            return EventStream(calls, answer_format, lambda answer: keep(answer, name), waits.pop_all())
        answers: list[PolicyAnswer] = []
        for call in calls:
            await _while_connected(request, call.answer)
            answers.append(await call.answer())
            keep(answers[-1], name)
        response = _json(answer_format.body(answers))
        _mark_delivered(calls)
        return response


def _mark_delivered(calls: Sequence[Call]) -> None:
    """Mark the calls of a complete response, so that a later equal request is not taken for its retry.

    The calls of a request are marked together, because a client that leaves before the last answer has no response.
    """
    for call in calls:
        call.delivered = True


async def _while_connected(request: Request, wait: Callable[[], Awaitable[object]]) -> None:
    """Run `wait` until it returns. Raises ClientDisconnect, and cancels `wait`, if the client leaves before."""

    async def cancel_at_disconnect(scope: anyio.CancelScope) -> None:
        """Read the messages of the connection until the client leaves, then cancel `scope`."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async with unwrapped_group() as group:
        group.start_soon(cancel_at_disconnect, group.cancel_scope)
        await wait()
        group.cancel_scope.cancel()
        return
    # This line is reached only if the group was cancelled while `wait` ran: the client has left.
    raise ClientDisconnect


class EventStream(StreamingResponse):
    """An HTTP response that streams the answers to one request as server-sent events, while they are sampled.

    Args:
        calls: one call for each answer. The first has a piece or an outcome already.
        events: format of the events.
        keep: called with each answer before its end is sent.
        waits: holds `Call.waited_for` of each call open. Closed when the stream has ended or the client has left.
    """

    media_type = "text/event-stream"

    def __init__(
        self, calls: Sequence[Call], events: AnswerFormat, keep: Callable[[PolicyAnswer], None], waits: ExitStack
    ) -> None:
        self._events = _events(calls, events, keep)
        super().__init__(self._events, headers={"cache-control": "no-store"})
        self._waits = waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Close the generator and `waits` at its end, also if the client has left."""
        with self._waits:
            async with aclosing(self._events), kept_alive(send) as forward:
                await super().__call__(scope, receive, forward)


@asynccontextmanager
async def kept_alive(send: Send) -> AsyncGenerator[Send]:
    """Yield a function that sends as `send` does. While it sends nothing for `KEEP_ALIVE_S`, a comment is sent.

    Clients ignore comments. None is sent before the response begins or after it ends.
    """
    last, is_open, lock = anyio.current_time(), False, anyio.Lock()

    async def forward(message: Message) -> None:
        """Send a message of the response."""
        nonlocal last, is_open
        async with lock:
            is_open = message["type"] == "http.response.start" or message.get("more_body", False)
            await send(message)
            last = anyio.current_time()

    async def fill_silence() -> None:
        """Send a comment after each silence. It ends when the client has left, which `forward` notices by itself."""
        nonlocal last
        with suppress(OSError):
            while True:
                await anyio.sleep_until(last + KEEP_ALIVE_S)
                async with lock:
                    if anyio.current_time() < last + KEEP_ALIVE_S:
                        continue
                    if is_open:
                        await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                    last = anyio.current_time()

    async with unwrapped_group() as group:
        group.start_soon(fill_silence)
        yield forward
        group.cancel_scope.cancel()


async def _events(
    calls: Sequence[Call], events: AnswerFormat, keep: Callable[[PolicyAnswer], None]
) -> AsyncGenerator[bytes]:
    """Yield the encoded events of all answers, one answer after the other. Waits for the pieces of each call.

    The arguments are those of `EventStream`.
    """
    answers: list[PolicyAnswer] = []
    try:
        for index, call in enumerate(calls):
            yield events.begin(index, await call.begun())
            async with aclosing(call.pieces()) as pieces:
                async for piece in pieces:
                    yield events.piece(piece, index)
            answers.append(await call.answer())
            keep(answers[-1])
            yield events.finish(answers[-1], index)
    except ApiError as error:
        yield events.fail(error)  # The HTTP status was sent already, so the error is an event.
        return
    yield events.end(answers)
    _mark_delivered(calls)  # The generator continues here only after the end was sent.


# -- bodies and errors -----------------------------------------------------------------------------------------------


async def _read(request: Request, read: Callable[[bytes], _T]) -> _T:
    """Return the body of a request, decoded with `read`, in a thread if it is long.

    Raises:
        ApiError: `read` refuses the body, or it is compressed.
        HTTPException: the body is too large.
    """
    body = await _body(request)
    if len(body) <= READ_BYTES:
        return read(body)
    # If the client leaves, the request ends at once, and the thread ends by itself: it only computes.
    limiter = request.app.state.reading
    return await anyio.to_thread.run_sync(read, body, abandon_on_cancel=True, limiter=limiter)


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises ApiError if it is compressed, and HTTPException if it is too large."""
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"Compressed bodies are not supported, but this one is {coding[:100]!r}.")
    return await read_body(request, BODY_BYTES)


def _json(content: bytes) -> Response:
    """Return a response with a JSON body that no cache may store."""
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def _error_response(request: Request, error: ApiError) -> Response:
    """Return the response to a request that was refused."""
    body = msgspec.json.encode(messages.error_content(error)) if _from_anthropic(request) else error.body
    return Response(body, status_code=error.status, media_type="application/json")


async def _unknown_url(request: Request, error: Exception) -> Response:
    """Return the response to a request whose path or method no endpoint has, in the form of the API's errors.

    Starlette calls this with the error that it raised when it looked for the endpoint.
    """
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        refusal = ApiError(405, f"This URL does not have this method: {place}.", "method_not_allowed")
    else:
        refusal = ApiError(error.status_code, f"Unknown request URL: {place}.", "unknown_url")
    return _error_response(request, refusal)


async def _internal_error(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed by a bug of Flash. Starlette calls this, and raises the error again,
    so that the server logs the traceback."""
    return _error_response(request, ApiError(500, f"The service failed: {type(error).__name__}.", "internal_error"))
