"""ServedTeacher: log-probs of a teacher model on a vLLM server, which travel with the samples.

A *teacher* is a model that the policy is trained to imitate (distillation). When an episode has ended, the node
(`flash.rollout.node`) calls `score`, while other episodes go on. `score` sends the sample's own tokens to the server as
a prompt, and the server returns their log-probs: one request for each branch (sequence) of the sample. A sample for
which the server has no answer fails like a sample without a reward: it is tried again, and a run in which all samples
fail is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

import anyio
import httpx
import msgspec
import numpy as np

from flash.branches import split_branches
from flash.errors import DECODE_ERRORS, ConfigError, RewardError
from flash.types import Failure, Outcome, Trajectory

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""First and longest pause between two tries, in seconds. Each pause is twice as long as the pause before, so that an
overloaded server can recover."""
MAX_CONNECTIONS = 64
"""Largest number of requests at once, so that one node does not overload the server. Further requests wait."""
SLICE = 512
"""Number of tokens whose log-probs are decoded before other tasks of the event loop may run: less than 1 ms."""
MINUS_INFINITY = -9999.0
"""Number that vLLM writes for a log-prob of −∞."""
QUOTED = 300
"""Number of characters of the server's answer that an error quotes. The answer may be a whole page of HTML."""


class _Token(msgspec.Struct):
    """A token of the prompt in the server's answer."""

    logprob: float
    """Log-prob of the token, given all tokens before it."""
    decoded_token: str | None = None
    """Text of the token by the server's tokenizer."""


class _Choice(msgspec.Struct):
    """The part of the server's answer that is about the prompt."""

    prompt_logprobs: list[msgspec.Raw]
    """JSON objects, one for each token of the prompt. Each maps token ids, as texts, to `_Token`."""


class _Answer(msgspec.Struct):
    """The server's answer to one request."""

    choices: list[_Choice]
    """Exactly one element."""


_TOKENS = msgspec.json.Decoder(dict[str, _Token])
_ANSWERS = msgspec.json.Decoder(_Answer)


class ServedTeacher:
    """A client of the teacher's server.

    Args:
        url: address of the server (`algorithm.teacher.url`).
        seconds: time limit of an answer in seconds, over all tries (`deadlines.env_step`).
        transport: used in place of the network, for tests.

    Raises:
        ConfigError: `url` is no address.
    """

    def __init__(self, url: str, seconds: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url, self._seconds = url, seconds
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        self._turns = anyio.Semaphore(MAX_CONNECTIONS)
        """Limits how many requests run at the same time. The time limit of a request starts after this wait."""
        try:
            self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, transport=transport)
        except httpx.InvalidURL as error:
            raise ConfigError(f"algorithm.teacher.url: {url!r} is no address: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def check(self, length: int, vocabulary: int, texts: Callable[[Sequence[int]], list[str]]) -> None:
        """Check at the start of a run that the server reads `length` tokens and has the policy's tokenizer.

        With another tokenizer the same token ids would stand for other texts.

        Args:
            length: number of tokens of the longest sample.
            vocabulary: number of tokens of the policy. The tokens of the check are spread over all of them.
            texts: returns the texts of tokens by the policy's tokenizer.

        Raises:
            ConfigError: the server cannot read so many tokens, or has other texts for them.
        """
        tokens = np.linspace(0, vocabulary - 1, max(length, 2)).astype(int).tolist()
        try:
            answers = await self._logprobs(tokens, range(1, len(tokens)))
        except RewardError as error:
            raise ConfigError(
                f"{error}; expected vLLM, with --max-model-len above {length} (model.max_length)"
            ) from error
        for token, mine, answer in zip(tokens[1:], texts(tokens[1:]), answers, strict=True):
            theirs = mine if answer.decoded_token is None else answer.decoded_token
            # Blanks at the ends of a token, and parts of a character (shown as U+FFFD), are not compared, because equal
            # tokenizers may write them differently.
            if theirs.strip(" ") != mine.strip(" ") and "\ufffd" not in f"{mine}{theirs}":
                raise ConfigError(
                    f"algorithm.teacher.url: token {token} is {mine!r} to the policy and {answer.decoded_token!r} to "
                    f"{self._url}: expected a teacher with the policy's tokenizer"
                )

    async def score(self, result: Trajectory | Failure) -> Trajectory | Failure:
        """Return a trajectory with the teacher's log-probs of its action tokens, which the policy has sampled.

        If the server has no usable answer for a branch, this returns a failure. Failures are returned unchanged, and so
        are trajectories of evaluations, which are not trained.
        """
        if isinstance(result, Failure) or result.task.split == "eval":
            return result
        logprobs: list[float] = []
        try:
            for branch in split_branches(result):
                positions = np.flatnonzero(branch.action_mask()).tolist()
                logprobs += [token.logprob for token in await self._logprobs(branch.tokens().tolist(), positions)]
        except RewardError as error:
            return Failure(result.task, Outcome.REWARD_ERROR, str(error), result.sampled_tokens)
        return msgspec.structs.replace(result, teacher=np.array(logprobs, dtype="<f4").tobytes())

    async def _logprobs(self, tokens: list[int], positions: Sequence[int]) -> list[_Token]:
        """Return the server's `_Token` (log-prob and text) at each of these positions, given all tokens before it.

        Position 0 has no log-prob, so it must not be among the positions.

        Raises:
            RewardError: the server does not answer, or its answer lacks the log-prob of a token or gives a token the
                probability 0.
        """
        # prompt_logprobs = 0: the log-prob of each prompt token itself, without alternatives. vLLM must sample at least
        # one token.
        content = await self._ask(msgspec.json.encode({"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}))
        found: list[_Token] = []
        try:
            (choice,) = _ANSWERS.decode(content).choices
            for position in positions:
                found.append(_TOKENS.decode(choice.prompt_logprobs[position])[str(tokens[position])])
                if len(found) % SLICE == 0:
                    await anyio.lowlevel.checkpoint()
        except (*DECODE_ERRORS, LookupError, ValueError) as error:
            raise self._error(f"gives no log-probs of a prompt: {error!r}; expected a server of vLLM") from error
        for position, token in zip(positions, found, strict=True):
            if token.logprob <= MINUS_INFINITY:
                raise self._error(f"gives token {tokens[position]} the probability 0")
        return found

    async def _ask(self, content: bytes) -> bytes:
        """Send a request, repeat it until the server answers, and return the answer.

        A request is sent again after an error of the connection or of the server, and after HTTP 429 (too many
        requests). It is not sent again after HTTP 501, or after another error of the client (4xx), because it would
        fail again.

        Raises:
            RewardError: the server refuses the request, or does not answer in time.
        """
        problem, pause = "no reply at all", FIRST_PAUSE_S
        # The time limit begins when this request may be sent. So it loses no time while it waits for earlier requests.
        async with self._turns:
            with anyio.move_on_after(self._seconds):
                while True:
                    try:
                        reply = await self._client.post(
                            "/v1/completions", content=content, headers={"content-type": "application/json"}
                        )
                    except httpx.TransportError as error:
                        problem = repr(error)
                    else:
                        if reply.is_success:
                            return reply.content
                        problem = f"HTTP {reply.status_code}: {' '.join(reply.text[:QUOTED].split())}"
                        if reply.status_code == HTTPStatus.NOT_IMPLEMENTED:
                            raise self._error(f"is no server of a model: {problem}")
                        if reply.is_client_error and reply.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                            raise self._error(f"refuses a sample's tokens: {problem}")
                    await anyio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE_S)
        raise self._error(f"gives no answer within {self._seconds:g} s (deadlines.env_step): {problem}")

    def _error(self, text: str) -> RewardError:
        """Return an error whose message names the server. `text` is a clause that says what is wrong."""
        return RewardError(f"algorithm.teacher.url: {self._url} {text}")
