"""A teacher that a vLLM server holds: what it gives the tokens of a sample travels with the sample.

It is asked when an episode has ended, while others go on, for the log-probs of a prompt: the sample's own tokens, a
request for each branch. A sample of which it says nothing fails as one without a reward does: it is tried again, and
a run that only fails is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

import anyio
import httpx
import msgspec
import numpy as np

from flash.branches import sequences
from flash.errors import ConfigError, RewardError
from flash.types import Failure, Outcome, Trajectory

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""Between two tries."""
AT_ONCE = 64
"""Connections: the others wait here for their turn."""
SLICE = 512
"""Tokens whose numbers are read at once, in less than a millisecond."""
LEAST = -9999.0
"""What vLLM says in place of −∞."""
QUOTED = 300
"""Letters of a refusal that are told."""


class _Token(msgspec.Struct):
    logprob: float
    decoded_token: str | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_TOKENS = msgspec.json.Decoder(dict[str, _Token])
_ANSWERS = msgspec.json.Decoder(_Answer)


class ServedTeacher:
    """Asks one server.

    Args:
        url: where it is.
        seconds: that an answer may take, all tries together.
        transport: in place of the network.
    """

    def __init__(self, url: str, seconds: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url, self._seconds = url, seconds
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        self._turns = anyio.Semaphore(AT_ONCE)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, transport=transport)

    async def aclose(self) -> None:
        """Give up its connections."""
        await self._client.aclose()

    async def check(self, length: int, vocabulary: int, texts: Callable[[Sequence[int]], list[str]]) -> None:
        """Have it read `length` tokens from all over the policy's vocabulary, of which `texts` tells the text.

        Raises:
            ConfigError: it cannot, or they are other tokens to it.
        """
        asked = np.linspace(0, vocabulary - 1, max(length, 2)).astype(int).tolist()
        try:
            told = await self._told(asked, range(1, len(asked)))
        except RewardError as error:
            raise ConfigError(
                f"{error}; expected vLLM, with --max-model-len above {length} (model.max_length)"
            ) from error
        for token, mine, said in zip(asked[1:], texts(asked[1:]), told, strict=True):
            # A part of a letter is told in several ways, and so are blanks at the ends of a token.
            theirs = mine if said.decoded_token is None else said.decoded_token
            if theirs.strip(" ") != mine.strip(" ") and "\ufffd" not in f"{mine}{theirs}":
                raise ConfigError(
                    f"algorithm.teacher.url: token {token} is {mine!r} to the policy and {said.decoded_token!r} to "
                    f"{self._url}: expected a teacher with the policy's tokenizer"
                )

    async def score(self, made: Trajectory | Failure) -> Trajectory | Failure:
        """A sample that is to be trained with what the teacher gives its action tokens, or why there is nothing."""
        if isinstance(made, Failure) or made.task.split == "eval":
            return made
        found: list[float] = []
        try:
            for branch in sequences(made):
                places = np.flatnonzero(branch.action_mask()).tolist()
                found += [one.logprob for one in await self._told(branch.tokens().tolist(), places)]
        except RewardError as error:
            return Failure(made.task, Outcome.REWARD_ERROR, str(error), made.sampled_tokens)
        return msgspec.structs.replace(made, teacher=np.array(found, dtype="<f4").tobytes())

    async def _told(self, tokens: list[int], places: Sequence[int]) -> list[_Token]:
        """What it gives the tokens at these places, each after all before it."""
        content = await self._answer(msgspec.json.encode({"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}))
        found: list[_Token] = []
        try:
            (choice,) = _ANSWERS.decode(content).choices
            for place in places:
                found.append(_TOKENS.decode(choice.prompt_logprobs[place])[str(tokens[place])])
                if len(found) % SLICE == 0:
                    await anyio.lowlevel.checkpoint()
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            raise self._fault(f"gives no log-probs of a prompt: {error!r}; expected a server of vLLM") from error
        if any(one.logprob <= LEAST for one in found):
            raise self._fault("gives a sampled token no probability at all")
        return found

    async def _answer(self, content: bytes) -> bytes:
        said, pause = "nothing", FIRST_PAUSE_S
        # Whose turn has not come does not wait for the server: each turn ends.
        async with self._turns:
            with anyio.move_on_after(self._seconds):
                while True:
                    try:
                        reply = await self._client.post(
                            "/v1/completions", content=content, headers={"content-type": "application/json"}
                        )
                    except httpx.TransportError as error:
                        said = repr(error)
                    else:
                        if reply.is_success:
                            return reply.content
                        said = f"HTTP {reply.status_code}: {' '.join(reply.text[:QUOTED].split())}"
                        if reply.status_code == HTTPStatus.NOT_IMPLEMENTED:
                            raise self._fault(f"is no server of a model: {said}")
                        if reply.is_client_error and reply.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                            raise self._fault(f"refuses a sample's tokens: {said}")
                    await anyio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE_S)
        raise self._fault(f"gives no answer within {self._seconds:g} s (deadlines.env_step): {said}")

    def _fault(self, what: str) -> RewardError:
        return RewardError(f"algorithm.teacher.url: {self._url} {what}")
