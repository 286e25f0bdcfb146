"""Sessions: one episode's calls, between the agent that makes them and the environment that takes them.

The agent's side is `call`, once per request; the environment's is `heard`, then `answer` or `refuse`, at last `end`. At
most one call is open, that is, waits for its answer. A call that is made again, with the same content or the same
key, is not a second one: it gets the answer of the first, however often, also when that is still to come.

Law: every call ends. The environment's owner bounds how long it takes, and `end` ends whatever is open.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import blake2b

import anyio

from flash.errors import BranchError
from flash.service.chat import Answer, ApiError, Asked
from flash.service.history import ASSISTANT, History
from flash.types import Message

KEY_BYTES = 16
"""128 bits: nobody guesses a key of another episode."""

MOST_REPEATS = 8
"""Times that a call may be made again: more are no retries, but an agent that wants another answer, and would ask for
it until its episode's deadline."""

OVER = "The episode of this key is over."


class Call:
    """One request of the agent's, and what became of it."""

    def __init__(self, name: str, digest: bytes, added: list[Message], max_tokens: int | None) -> None:
        self.name = name
        """Its own among all calls of the service."""
        self.digest = digest
        self.added = added
        """What it shows beyond what was said before."""
        self.max_tokens = max_tokens
        self.repeats = 0
        self.over = anyio.Event()
        self.outcome: Answer | ApiError | None = None

    def ends(self, outcome: Answer | ApiError) -> None:
        """Tell all who wait for it."""
        self.outcome = outcome
        self.over.set()


class Session:
    """The calls of one episode."""

    def __init__(self) -> None:
        self._history = History()
        self._calls: dict[bytes, Call] = {}
        """Those that were answered or are to be, by key or content."""
        self._open: Call | None = None
        self._branch: BranchError | None = None
        self._agent_over = False
        self._ended = False
        self._news = anyio.Event()

    # -- the agent's side --------------------------------------------------------------------------------------------

    async def call(self, asked: Asked, key: str | None = None) -> tuple[Answer, str]:
        """The answer to a request, and the name of its call. `key` makes it the same call as an earlier one.

        Raises:
            ApiError: it is refused, or the episode has ended.
        """
        call = self._take(asked, key)
        await call.over.wait()
        if isinstance(call.outcome, ApiError):
            raise call.outcome
        assert call.outcome is not None
        return call.outcome, call.name

    def _take(self, asked: Asked, key: str | None) -> Call:
        if self._ended:
            raise ApiError(401, OVER, "invalid_api_key")
        digest = asked.digest()
        identity = digest if key is None else b"key " + blake2b(key.encode("utf-8", "surrogatepass")).digest()
        known = self._calls.get(identity)
        if known is not None:
            if known.digest != digest:
                raise ApiError(400, "An earlier request with this idempotency key asked for something else.")
            known.repeats += 1
            if known.repeats > MOST_REPEATS:
                raise self._branched(f"the same request came more than {MOST_REPEATS} times again")
            return known
        added = self._history.added(asked.messages)
        if self._open is not None:
            raise self._branched("a request came before the answer to the one before it")
        if added is None:
            raise self._branched("a request does not begin with all that was said before, as it was said")
        if not added or added[-1].role == ASSISTANT:
            raise ApiError(400, "The last message must not be the assistant's own.", None, "messages")
        call = self._open = Call(secrets.token_hex(12), digest, added, asked.max_tokens)
        self._calls[identity] = call
        self._news.set()
        return call

    def _branched(self, why: str) -> ApiError:
        self._branch = self._branch or BranchError(
            f"the agent left its conversation: {why}; an episode is one conversation, in which messages are only "
            "appended, one request after the other"
        )
        self._news.set()
        return ApiError(400, f"This episode cannot go on: {why}.", "conversation_branched", "messages")

    def agent_ended(self) -> None:
        """The agent will make no more calls."""
        self._agent_over = True
        self._news.set()

    # -- the environment's side --------------------------------------------------------------------------------------

    async def heard(self) -> Call | None:
        """The call that is open, when there is one; None when the agent has ended without.

        Raises:
            BranchError: the agent has left the one conversation.
        """
        while True:
            if self._branch is not None:
                raise self._branch
            if self._agent_over:
                return None
            if self._open is not None:
                return self._open
            self._news = anyio.Event()
            await self._news.wait()

    def answer(self, answer: Answer) -> None:
        """Answer the open call."""
        call = self._take_open()
        self._history.show(call.added)
        self._history.answer(answer.content)
        call.ends(answer)

    def refuse(self, error: ApiError) -> None:
        """Refuse the open call: nothing of it was shown, and it may be made again."""
        call = self._take_open()
        self._calls = {identity: one for identity, one in self._calls.items() if one is not call}
        call.ends(error)

    def _take_open(self) -> Call:
        call, self._open = self._open, None
        assert call is not None, "there is no open call"
        return call

    def end(self) -> None:
        """The episode is over: refuse what is open and whatever comes."""
        self._ended = True
        if self._open is not None:
            self.refuse(ApiError(401, OVER, "invalid_api_key"))


class Sessions:
    """All of a node, by the keys of their episodes."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Session] = {}

    def open(self) -> tuple[Session, str]:
        """A new one and its key."""
        key, session = secrets.token_hex(KEY_BYTES), Session()
        self._by_digest[_digest(key)] = session
        return session, key

    def close(self, key: str) -> None:
        """End a session and forget its key."""
        session = self._by_digest.pop(_digest(key), None)
        if session is not None:
            session.end()

    def of_key(self, key: str) -> Session:
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
