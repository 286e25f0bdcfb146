"""EpisodeSession: the calls of one episode, between the agent that makes them and the environment that answers them.

The agent's side is `app`: it uses `call` once for each answer that a request wants, and waits for the pieces and the
answer of the `Call`. Where this file speaks of a request, it means one wanted answer. The environment's side is
`envs.agent`: it uses `next_call`, then `answer` or `refuse`; `EpisodeSessions.close` ends the session at last.

A call is open until it has an answer or is refused. Several calls may be open; they are answered one after the other,
in the order of their arrival. A request that repeats an earlier one gets the answer of that call, even if the answer is
not there yet. A request with an idempotency key repeats the call of that key. Without a key, equal requests are
different calls, with two exceptions: the client of the earlier call left without the answer, or a header of the request
marks it as a retry (the clients of OpenAI and Anthropic set this header).

The messages of an episode are its history, which has branches: a request that repeats no branch begins one (`history`).

Law of calls: every call ends. The owner of the environment bounds the time of an episode, and `end` refuses all open
calls.
Law of pieces: the *pieces* of an answer, which an agent receives while it is sampled and at its end, together are the
message of the answer without its calls. A piece that was sent is never taken back: vLLM's parsers may read the whole
text differently from its beginning, and then the message contains the pieces as they were sent.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import anyio
import msgspec

from flash.sampling import PLAIN, Sampling
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.fields import ApiError, before_stop, unsupported, warn_of_ignored_sampling
from flash.service.history import TEXT, Continuation, EarlierAnswers, History
from flash.types import ASSISTANT, Message, Observation, Piece

KEY_BYTES = 16
"""Random bytes of a key. An agent cannot guess 128 bits, and so not the key of another episode."""
MOST_OPEN = 1024
"""Largest number of open calls of one episode."""
OPEN_BYTES = 64 << 20
"""Largest number of bytes of all open calls of one episode together. The bound on connections does not bound them: a
call stays open when its client has left, since the client may send the request again."""
OVER = "The episode of this key is over."
"""Error message for a request after the end of its episode."""
_SECRET = secrets.token_bytes(32)
"""Key of the digests, which each process chooses at random."""


class AnswerDeltas:
    """Pieces of one answer, and the part of its content that is held back. It has no task and no clock.

    `Call` adds the sampled pieces, and the agent gets `pieces`. A piece is *sent* when it is in `pieces`.

    Args:
        stop: stop texts. The content ends before the first one, which the agent does not receive.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._reasoning = ""
        """Reasoning that was sent."""
        self._content = ""
        """Content that was sent."""
        self._held_back = ""
        """Content after that, which is not sent yet, since it may be the beginning of a stop text."""
        self._stopped = False
        """True once the content contained a stop text. No content is sent after it."""
        self.pieces: list[Piece] = []
        """Pieces that the agent gets, in order."""

    def add(self, piece: Piece) -> None:
        """Add a newly sampled piece, and send the part of it that cannot belong to a stop text."""
        self._send(Piece(self._hold_back(piece.content), piece.reasoning))

    def _hold_back(self, content: str) -> str:
        """Hold back the end of the content that may be the beginning of a stop text, and return the part before it.

        `content` is new. It is appended to the content that was held back before. Nothing is returned from the first
        stop text on.
        """
        if self._stopped:
            return ""
        content, found = before_stop(self._held_back + content, self._stop)
        if found:
            self._stopped = True
            return content
        size = max((_stop_beginning(content, stop) for stop in self._stop), default=0)
        at = len(content) - size
        self._held_back = content[at:]
        return content[:at]

    def finish(self, message: Message) -> Message:
        """Send the part of the complete answer that was not sent yet.

        Returns `message`, the answer's message, with content and reasoning as they were sent.
        """
        self._send(Piece(_unsent(self._content, message.content), _unsent(self._reasoning, message.reasoning)))
        return msgspec.structs.replace(message, content=self._content, reasoning=self._reasoning)

    def _send(self, piece: Piece) -> None:
        """Add a piece to those that the agent gets, unless it is empty."""
        if piece.content or piece.reasoning:
            self._content += piece.content
            self._reasoning += piece.reasoning
            self.pieces.append(piece)


def _stop_beginning(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of the stop text `stop`."""
    longest = min(len(stop) - 1, len(text))  # A stop text may be far longer than the answer.
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _unsent(sent: str, whole: str) -> str:
    """Return the end of `whole` that was not sent yet; empty if `whole` begins otherwise than the text that was sent.

    `sent` is the content or the reasoning that was sent in pieces, and `whole` is the one in the complete answer.
    """
    if whole.startswith(sent):
        return whole[len(sent) :]
    # vLLM's parsers may strip white space from the beginning of the whole text.
    begun, stripped = sent.lstrip(), whole.lstrip()
    return stripped[len(begun) :] if stripped.startswith(begun) else ""


class Call:
    """A request of the agent for one answer, and this answer. Requests that repeat it share the call.

    `EpisodeSession.call` makes it. `app` waits for its answer, and `envs.agent` and the session give the answer.
    """

    def __init__(self, name: str, request: AgentRequest, key: bytes | None) -> None:
        self.name = name
        """Name that no other call of the service has."""
        self.request = request
        """The request. Its content is dropped when the call ends."""
        self.key = key
        """Digest of the request's idempotency key; None if it has none."""
        self.digest = request.digest()
        """Digest of the content, equal for equal requests."""
        self.size = request.size
        """Bytes of the request, which count for `OPEN_BYTES`; 0 for all but the first of several answers to it."""
        self.waiting = 0
        """Number of requests that wait for the answer, or for the rest of it."""
        self.delivered = False
        """True if a client got its whole response, with this answer in it. `app` sets it, because a response may hold
        the answers of several calls, and `answer` returns before the response is complete."""
        self._prompt_tokens = 0
        """Number of tokens of the prompt; 0 before the first piece and the answer."""
        self._deltas = AnswerDeltas(request.stop)
        self._outcome: PolicyAnswer | ApiError | None = None
        """The answer, or the error of a refused call; None while the call is open."""
        self._news = anyio.Event()
        """Event for coroutines that wait. It is set when there is a new piece or the outcome; `_notify` replaces it."""

    @contextmanager
    def waited_for(self) -> Generator[None]:
        """Count one request that waits for the answer during the block.

        If no request waits and the answer was not delivered, the client has left, so a later equal request is taken for
        its retry.
        """
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def answer(self) -> PolicyAnswer:
        """Wait for the answer and return it. Raises ApiError if the call is refused or the episode ends before."""
        while self._outcome is None:
            await self._news.wait()
        if isinstance(self._outcome, ApiError):
            raise self._outcome
        return self._outcome

    async def begun(self) -> int:
        """Wait until there is a first piece or an answer, and return the number of tokens of the prompt.

        `app` waits for it before it begins a stream.

        Raises:
            ApiError: the call is refused before its first piece.
        """
        while not (self._deltas.pieces or self._outcome):
            await self._news.wait()
        if isinstance(self._outcome, ApiError) and not self._deltas.pieces:
            raise self._outcome
        return self._prompt_tokens

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield all pieces from the first on, also future ones, until the answer is complete.

        Raises:
            ApiError: the call is refused, or the episode ends before the answer is complete.
        """
        sent, pieces = 0, self._deltas.pieces
        while True:
            while sent < len(pieces):
                sent += 1
                yield pieces[sent - 1]
            if self._outcome is not None:
                break
            await self._news.wait()
        if isinstance(self._outcome, ApiError):
            raise self._outcome

    def add(self, piece: Piece, prompt_tokens: int) -> None:
        """Add a newly sampled piece of the answer. The episode calls this for a request whose answer is streamed."""
        self._prompt_tokens = prompt_tokens
        self._deltas.add(piece)
        self._notify()

    def answered(self, answer: PolicyAnswer) -> PolicyAnswer:
        """End the call with its answer. Returns the answer with the message that the agent receives."""
        delivered = msgspec.structs.replace(answer, message=self._deltas.finish(answer.message))
        self._prompt_tokens = answer.prompt_tokens
        self._end(delivered)
        return delivered

    def refused(self, error: ApiError) -> None:
        """End the call with an error instead of an answer."""
        self._end(error)

    def _end(self, outcome: PolicyAnswer | ApiError) -> None:
        """Set the outcome, drop the content of the request, and wake all that wait."""
        self._outcome = outcome
        # The call is kept for a client that sends the request again, but its content is not: each request of an episode
        # repeats the whole conversation, so the contents of all requests together would grow quadratically.
        self.request = msgspec.structs.replace(self.request, messages=[], tools=(), template={})
        self._notify()

    def _notify(self) -> None:
        """Wake all that wait for news of this call. An event can be set only once, so a new one replaces it."""
        news, self._news = self._news, anyio.Event()
        news.set()


class PendingCall(NamedTuple):
    """An open call, and the place in the history of the episode at which it continues the conversation.

    The environment gets it from `EpisodeSession.next_call`, and from `queued`.
    """

    call: Call
    place: Continuation
    """Branch and place of the call in the history."""

    @property
    def observation(self) -> Observation:
        """Observation that the policy gets: the messages that the request adds, or one text for a completion."""
        added = self.place.added
        texts = [message.content for message in added if message.role == TEXT]
        return "".join(texts) if texts and len(texts) == len(added) else added


def _ignore_queued(pending: PendingCall) -> None:
    """Do nothing. This is `EpisodeSession.queued` until the environment sets another function."""


class EpisodeSession:
    """The calls of one episode.

    Args:
        rewarding: True if the agent may end its episode with a reward of its own.
        sampling: the sampling settings of the episode.
    """

    def __init__(self, *, rewarding: bool = False, sampling: Sampling = PLAIN) -> None:
        self.earlier = EarlierAnswers()
        """Conversations up to earlier answers, which later requests may refer to."""
        self.reward: float | None = None
        """Reward that the agent gave itself, which ended the episode; None if it gave none."""
        self.queued: Callable[[PendingCall], None] = _ignore_queued
        """Function of the environment that is called with each call that arrives while another one is open, so that its
        answer can be sampled in advance. The place of the call is the one in the present history; later answers may
        change it."""
        self.count_prompt: Callable[[AgentRequest, Continuation], Awaitable[int]] | None = None
        """Function of the environment that returns the number of tokens of the prompt of a request at a place of the
        history; None until the environment sets it."""
        self._counting = anyio.Lock()
        """Lock that is held while a prompt is counted. Rendering may need the node's only thread for it, so an agent
        that asks many times at once would keep other episodes from the thread."""
        self._rewarding = rewarding
        self._sampling = sampling
        self._history = History()
        """Messages and answers of the episode so far."""
        self._by_key: dict[bytes, Call] = {}
        """Open and answered calls by the digest of their idempotency key (`Call.key`)."""
        self._by_content: dict[bytes, list[Call]] = {}
        """Open and answered calls without an idempotency key, by the digest of their content (`Call.digest`), in the
        order of arrival."""
        self._open: deque[Call] = deque()
        """Open calls, the oldest first."""
        self._pending: PendingCall | None = None
        """Call that `next_call` has returned and that has no answer yet; None if there is none."""
        self._agent_over = False
        """True if the agent needs no more answers."""
        self._ended = False
        """True if `end` has ended the episode."""
        self._news = anyio.Event()
        """Event that is set when a call arrives or the agent ends. It wakes `next_call`, which replaces it."""

    # -- the agent's side --------------------------------------------------------------------------------------------

    def call(self, request: AgentRequest, key: str | None = None, *, retry: bool | None = None) -> Call:
        """Return the call of a request: a new one, or the earlier one that the request repeats.

        A new call is open from then on.

        Args:
            request: the request for one answer.
            key: idempotency key; all requests with one key are one call. None: the request has none.
            retry: True if the client marks the request as a retry, False if it marks it as a first try; None if it does
                neither.

        Raises:
            ApiError: the request cannot be answered, its key belongs to a different request, too many calls are open,
                or the episode has ended.
        """
        self._check_answerable(request)
        warn_of_ignored_sampling(request.sampling, self._sampling)
        # A key is a text of any length from the agent; its digest is short.
        key_digest = None if key is None else blake2b(key.encode("utf-8", "surrogatepass")).digest()
        new = Call(secrets.token_hex(12), request, key_digest)
        if key_digest is not None:
            earlier = self._by_key.get(key_digest)
            if earlier is not None and earlier.digest != new.digest:
                raise ApiError(400, "An earlier request with this idempotency key had another content.")
        else:
            earlier = _repeated_call(self._by_content.get(new.digest, []), retry)
        if earlier is not None:
            return earlier
        self._check_room(new)
        if key_digest is not None:
            self._by_key[key_digest] = new
        else:
            self._by_content.setdefault(new.digest, []).append(new)
        self._open.append(new)
        self._news.set()
        if len(self._open) > 1:
            self.queued(PendingCall(new, self._history.place(request.messages, request.prompt_beginning)))
        return new

    async def count(self, request: AgentRequest) -> int:
        """Return the number of tokens of the prompt that a request would have now. The request gets no answer.

        Raises:
            ApiError: the request cannot be answered, or the episode has ended.
        """
        self._check_answerable(request)
        assert self.count_prompt is not None, "the environment sets it before the agent has the key"
        async with self._counting:
            return await self.count_prompt(request, self._history.place(request.messages, request.prompt_beginning))

    def _check_answerable(self, request: AgentRequest) -> None:
        """Raise ApiError if the episode has ended, or the conversation does not end before an answer."""
        self._refuse_after_end()
        if request.messages[-1].role == ASSISTANT:
            raise ApiError(400, "The last message must not be the assistant's own.", None, "messages")

    def _check_room(self, more: Call) -> None:
        """Raise ApiError if one more open call would be too much. A single call is accepted whatever its size."""
        size = more.size + sum(call.size for call in self._open)
        if len(self._open) >= MOST_OPEN or (self._open and size > OPEN_BYTES):
            message = f"{len(self._open)} requests of this episode wait for their answers already."
            raise ApiError(429, message, "too_many_requests")

    def reward_with(self, reward: float) -> None:
        """End the episode with a reward that the agent gives itself.

        Raises:
            ApiError: the run does not allow it, the reward is not a finite number, or the episode has ended.
        """
        self._refuse_after_end()
        if not self._rewarding:
            raise unsupported(
                "reward", "this run rewards the result that the agent returns (set env.options.own_reward to change it)"
            )
        if not math.isfinite(reward):
            raise ApiError(400, "The reward must be a finite number.", None, "reward")
        self.reward = reward
        self.agent_ended()

    def _refuse_after_end(self) -> None:
        """Raise ApiError if `end` or a reward of the agent has ended the episode. Each request is checked first."""
        if self._ended or self.reward is not None:
            raise ApiError(401, OVER, "invalid_api_key")

    def agent_ended(self) -> None:
        """Record that the agent needs no more answers: `next_call` returns None from now on.

        `envs.agent` calls this when the agent's program or function has ended, and `reward_with` after a reward of its
        own. Open calls stay open until `end` refuses them.
        """
        self._agent_over = True
        self._news.set()

    # -- the environment's side --------------------------------------------------------------------------------------

    async def next_call(self) -> PendingCall | None:
        """Wait for the oldest open call and return it; None when the agent has ended, also if calls are open.

        The call stays open and is returned again until `answer` or `refuse`. A call that arrives, or the agent's end,
        unblocks the wait.
        """
        while not self._agent_over:
            if self._open:
                call = self._open[0]
                place = self._history.place(call.request.messages, call.request.prompt_beginning)
                self._pending = PendingCall(call, place)
                return self._pending
            self._news = anyio.Event()
            await self._news.wait()
        return None

    def answer(self, answer: PolicyAnswer) -> None:
        """Answer the call that `next_call` has returned, and add the answer to the history."""
        assert self._pending is not None, "`next_call` has returned no call since the last answer"
        # The end of the call drops the content of its request, so it is read first.
        place, beginning = self._pending.place, self._pending.call.request.prompt_beginning
        self._pending = None
        # The history gets the message as it was sent, because the agent's next request repeats that one.
        delivered = self._open.popleft().answered(answer)
        self._history.answer(place, delivered.message, beginning)

    def refuse(self, error: ApiError) -> None:
        """Refuse the oldest open call. The history does not change, and an equal request becomes a new call."""
        self._pending = None
        call = self._open.popleft()
        if call.key is not None:
            del self._by_key[call.key]
        else:
            self._by_content[call.digest].remove(call)
        call.refused(error)

    def end(self) -> None:
        """End the episode: refuse all open calls, and all requests from now on."""
        self._ended = True
        while self._open:
            self.refuse(ApiError(401, OVER, "invalid_api_key"))


def _repeated_call(alike: Sequence[Call], retry: bool | None) -> Call | None:
    """Return the call that a request without an idempotency key repeats; None if the request is a new call.

    Args:
        alike: calls of the same content, the oldest first.
        retry: True if the client marks the request as a retry, False if it marks it as a first try; None if it does
            neither.
    """
    if retry is False:
        return None
    # A client that retries has left its first request, so a call that a request still waits for is from another client.
    left = [call for call in alike if not call.waiting]
    lost = [call for call in left if not call.delivered]
    if lost:
        # The client left without the answer, so an equal request is taken for its retry. If several clients have left,
        # the oldest call comes first: the retry waits for it from now on, so the next retry gets the next call.
        return lost[0]
    # All answers were delivered as far as this process knows. A client retries its newest request, so that request has
    # lost its answer on the way.
    return left[-1] if left and retry else None


class EpisodeSessions:
    """All sessions of a node, by the keys of their episodes. `envs.agent` opens and closes them."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, EpisodeSession] = {}
        """Open sessions, by the digest of their key (`_digest`)."""

    def open(self, *, rewarding: bool = False, sampling: Sampling = PLAIN) -> tuple[EpisodeSession, str]:
        """Open the session of a new episode. Returns the session and its key. `EpisodeSession` has the arguments."""
        key, session = secrets.token_hex(KEY_BYTES), EpisodeSession(rewarding=rewarding, sampling=sampling)
        self._by_digest[_digest(key)] = session
        return session, key

    def close(self, key: str) -> None:
        """End the session of a key, and forget the key. Does nothing if no session has the key."""
        session = self._by_digest.pop(_digest(key), None)
        if session is not None:
            session.end()

    def of_key(self, key: str) -> EpisodeSession:
        """Return the session of a key.

        Raises:
            ApiError: no session has this key, or its episode is over.
        """
        session = self._by_digest.get(_digest(key))
        if session is None:
            raise ApiError(401, "There is no episode with this API key, or it is over.", "invalid_api_key")
        return session

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._by_digest)


def _digest(key: str) -> bytes:
    """Return the digest of an episode's key, which is computed with `_SECRET`."""
    # Sessions are looked up by this digest and not by the key, so that the time of a look-up reveals nothing of a key.
    return hmac.digest(_SECRET, key.encode("utf-8", "surrogatepass"), "sha256")
