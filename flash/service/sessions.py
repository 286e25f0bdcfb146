"""Sessions: one episode's calls, between the agent that makes them and the environment that takes them.

The agent's side is `call`, once per request, and what is told of it; the environment's is `next_call`, then `answer` or
`refuse`, at last `end`.
Any number of calls are open, that is, wait for their answers; they are taken one after the other, in the order in which
they came. A request that repeats an earlier one gets the answer of that call, also when the answer is still to come. A
request with an idempotency key repeats the call of that key. Without a key, equal requests are different calls, and a
request repeats an equal call only if the client of that call left without the answer, or says that it tries again, as
OpenAI's clients do.

Law: every call ends. The environment's owner bounds how long it takes, and `end` ends whatever is open.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import anyio
import msgspec

from flash.sampling import PLAIN, Sampling
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.deltas import AnswerDeltas
from flash.service.errors import ApiError, unsupported
from flash.service.fields import heed_drawn
from flash.service.history import TEXT, Continuation, EarlierAnswers, History
from flash.types import ASSISTANT, Observation, Piece

KEY_BYTES = 16
"""128 bits: nobody guesses a key of another episode."""

MOST_OPEN = 1024
"""Requests of one episode that wait for their answers."""
OPEN_BYTES = 64 << 20
"""Of these requests, together: who has left may ask again, so that they are kept without a connection, too."""

OVER = "The episode of this key is over."


class Call:
    """One request of the agent's, and what becomes of it."""

    def __init__(self, name: str, asked: AgentRequest, key: bytes | None) -> None:
        self.name = name
        """Its own among all calls of the service."""
        self.asked = asked
        self.key = key
        """By which it is known, where the request has one."""
        self.digest = asked.digest()
        self.size = asked.size
        self.waiting = 0
        """Number of requests that wait for the answer, or for the rest of it."""
        self.told = False
        """True if a request has got the answer."""
        self._deltas = AnswerDeltas(asked.stop)
        self._outcome: PolicyAnswer | ApiError | None = None
        self._news = anyio.Event()

    @contextmanager
    def waited_for(self) -> Generator[None]:
        """A request waits for the answer for the time of the block."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def answer(self) -> PolicyAnswer:
        """The answer, once it is there. Raises ApiError where the request is refused, or the episode has ended."""
        while self._outcome is None:
            await self._news.wait()
        if isinstance(self._outcome, ApiError):
            raise self._outcome
        self.told = True
        return self._outcome

    async def begun(self) -> None:
        """Wait until there is something to tell. Raises ApiError as `answer` does."""
        while not (self._deltas.pieces or self._outcome):
            await self._news.wait()
        if isinstance(self._outcome, ApiError) and not self._deltas.pieces:
            raise self._outcome

    async def pieces(self) -> AsyncGenerator[Piece]:
        """What is told, from its beginning on and as it comes; ends with the answer. Raises ApiError as that does."""
        told, pieces = 0, self._deltas.pieces
        while True:
            while told < len(pieces):
                told += 1
                yield pieces[told - 1]
            if self._outcome is not None:
                break
            await self._news.wait()
        if isinstance(self._outcome, ApiError):
            raise self._outcome

    def add(self, piece: Piece) -> None:
        """The answer goes on."""
        self._deltas.add(piece)
        self._tell()

    def answered(self, answer: PolicyAnswer) -> PolicyAnswer:
        """It has come to its end. Returns it as it was told."""
        told = msgspec.structs.replace(answer, message=self._deltas.finish(answer.message))
        self._end(told)
        return told

    def refused(self, error: ApiError) -> None:
        """There is none."""
        self._end(error)

    def _end(self, outcome: PolicyAnswer | ApiError) -> None:
        self._outcome = outcome
        # The call is kept for who asks again, what it asked is not: each request repeats all that was said.
        self.asked = msgspec.structs.replace(self.asked, messages=[], tools=(), template={})
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()


class PendingCall(NamedTuple):
    """A call that is to be answered next, and where it goes on."""

    call: Call
    place: Continuation

    @property
    def shown(self) -> Observation:
        """What it adds, as the policy is shown it."""
        added = self.place.added
        texts = [message.content for message in added if message.role == TEXT]
        return "".join(texts) if texts and len(texts) == len(added) else added


def _ignored(pending: PendingCall) -> None:
    """Nobody looks ahead."""


class EpisodeSession:
    """The calls of one episode.

    Args:
        rewarding: whether the agent may say what its episode was worth.
        sampling: how answers are drawn.
    """

    def __init__(self, *, rewarding: bool = False, sampling: Sampling = PLAIN) -> None:
        self.kept = EarlierAnswers()
        self.reward: float | None = None
        """What the agent says that its episode was worth, which ends it."""
        self.queued: Callable[[PendingCall], None] = _ignored
        """Told the calls that come while another one is answered, where they would go on as of now."""
        self._rewarding = rewarding
        self._sampling = sampling
        self._history = History()
        self._by_key: dict[bytes, Call] = {}
        self._by_content: dict[bytes, list[Call]] = {}
        """Of those without a key, in the order in which they came; both without those that were refused."""
        self._open: deque[Call] = deque()
        self._pending: PendingCall | None = None
        self._agent_over = False
        self._ended = False
        self._news = anyio.Event()

    # -- the agent's side --------------------------------------------------------------------------------------------

    def call(self, asked: AgentRequest, key: str | None = None, *, again: bool | None = None) -> Call:
        """Return the call of a request: a new one, or the earlier one that the request repeats.

        Args:
            asked: the request.
            key: idempotency key; requests of one key are one call.
            again: True or False if the client says that it tries again or does not.

        Raises:
            ApiError: it is no call, or the episode has ended.
        """
        self._check_open()
        heed_drawn(asked.drawn, self._sampling)
        if asked.messages[-1].role == ASSISTANT:
            raise ApiError(400, "The last message must not be the assistant's own.", None, "messages")
        digest = None if key is None else blake2b(key.encode("utf-8", "surrogatepass")).digest()
        call = Call(secrets.token_hex(12), asked, digest)
        if digest is not None:
            known = self._known(digest, call)
            if known.digest != call.digest:
                raise ApiError(400, "An earlier request with this idempotency key asked for something else.")
        else:
            alike = self._by_content.get(call.digest, [])
            known = _made_again(alike, again)
            if known is None:
                self._check_room(call)
                known = call
                self._by_content.setdefault(call.digest, []).append(call)
        if known is call:
            self._open.append(call)
            self._news.set()
            if len(self._open) > 1:
                self.queued(PendingCall(call, self._history.place(asked.messages, asked.form)))
        return known

    def _known(self, key: bytes, call: Call) -> Call:
        """The call of this key, which is this one where there is none."""
        if key not in self._by_key:
            self._check_room(call)
            self._by_key[key] = call
        return self._by_key[key]

    def _check_room(self, more: Call) -> None:
        size = more.size + sum(call.size for call in self._open)
        if len(self._open) >= MOST_OPEN or (self._open and size > OPEN_BYTES):
            message = f"{len(self._open)} requests of this episode wait for their answers already."
            raise ApiError(429, message, "too_many_requests")

    def _forget(self, call: Call) -> None:
        """It was not answered, and may be made again."""
        if call.key is not None:
            del self._by_key[call.key]
        else:
            self._by_content[call.digest].remove(call)

    def reward_with(self, reward: float) -> None:
        """The agent ends its episode with this reward.

        Raises:
            ApiError: it may not, the reward is no finite number, or the episode has ended.
        """
        self._check_open()
        if not self._rewarding:
            raise unsupported("reward", "this run judges what the agent returns (env.options.own_reward)")
        if not math.isfinite(reward):
            raise ApiError(400, "The reward must be a finite number.", None, "reward")
        self.reward = reward
        self.agent_ended()

    def _check_open(self) -> None:
        if self._ended or self.reward is not None:
            raise ApiError(401, OVER, "invalid_api_key")

    def agent_ended(self) -> None:
        """The agent will make no more calls."""
        self._agent_over = True
        self._news.set()

    # -- the environment's side --------------------------------------------------------------------------------------

    async def next_call(self) -> PendingCall | None:
        """The call that is to be answered next, once there is one; None when the agent has ended."""
        while not self._agent_over:
            if self._open:
                call = self._open[0]
                self._pending = PendingCall(call, self._history.place(call.asked.messages, call.asked.form))
                return self._pending
            self._news = anyio.Event()
            await self._news.wait()
        return None

    def answer(self, answer: PolicyAnswer) -> None:
        """Answer the call that was taken last."""
        assert self._pending is not None, "no call was taken"
        place, form = self._pending.place, self._pending.call.asked.form
        told = self._take_first().answered(answer)
        self._history.answer(place, told.message, form)

    def refuse(self, error: ApiError) -> None:
        """Refuse the first open call: nothing of it was shown, and it may be made again."""
        call = self._take_first()
        self._forget(call)
        call.refused(error)

    def _take_first(self) -> Call:
        self._pending = None
        return self._open.popleft()

    def end(self) -> None:
        """The episode is over: refuse what is open and whatever comes."""
        self._ended = True
        while self._open:
            self.refuse(ApiError(401, OVER, "invalid_api_key"))


def _made_again(alike: Sequence[Call], again: bool | None) -> Call | None:
    """Return the call of the same content that a request without a key repeats; None for a new call.

    Args:
        alike: calls of the same content, the oldest first.
        again: True if the client says that it tries again, False if it says that it does not.
    """
    if again is False:
        return None
    # A client that tries again has left: a call that a request waits for is somebody else's.
    left = [call for call in alike if not call.waiting]
    lost = [call for call in left if not call.told]
    if lost:
        return lost[0]
    return left[-1] if left and again else None


class EpisodeSessions:
    """All of a node, by the keys of their episodes."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, EpisodeSession] = {}

    def open(self, *, rewarding: bool = False, sampling: Sampling = PLAIN) -> tuple[EpisodeSession, str]:
        """A new one and its key; as for `EpisodeSession`."""
        key, session = secrets.token_hex(KEY_BYTES), EpisodeSession(rewarding=rewarding, sampling=sampling)
        self._by_digest[_digest(key)] = session
        return session, key

    def close(self, key: str) -> None:
        """End a session and forget its key."""
        session = self._by_digest.pop(_digest(key), None)
        if session is not None:
            session.end()

    def of_key(self, key: str) -> EpisodeSession:
        """The session of a key.

        Raises:
            ApiError: there is none, or its episode is over.
        """
        session = self._by_digest.get(_digest(key))
        if session is None:
            raise ApiError(401, "There is no episode with this API key, or it is over.", "invalid_api_key")
        return session

    def __len__(self) -> int:
        return len(self._by_digest)


def _digest(key: str) -> bytes:
    """Looked up instead of the key, so that how long a look-up takes says nothing of it."""
    return hmac.digest(_SECRET, key.encode("utf-8", "surrogatepass"), "sha256")


_SECRET = secrets.token_bytes(32)
