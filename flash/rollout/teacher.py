"""ServedTeacher: log-probs of a teacher model on a vLLM server, which travel with the samples.

When an episode has ended, and while others go on, the node asks the server for the log-probs of the sample's own tokens
as a prompt: one request per branch. A sample for which the server has no answer fails like a sample without a reward:
it is tried again, and a run in which all samples fail is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

import anyio
import httpx
import msgspec
import numpy as np

from flash.branches import split_branches
from flash.errors import ConfigError, RewardError
from flash.types import Failure, Outcome, Trajectory

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""Seconds between two tries: the first pause and the longest one. Each is twice as long as the one before."""
MAX_CONNECTIONS = 64
"""Most requests at once; others wait for their turn."""
SLICE = 512
"""Tokens whose numbers are decoded before the loop may go on: less than a millisecond."""
MINUS_INFINITY = -9999.0
"""Number that vLLM writes for a log-prob of −∞."""
QUOTED = 300
"""Letters of the server's answer that an error quotes."""


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
    """A client of the teacher's server.

    Args:
        url: address of the server.
        seconds: time for an answer, with all tries.
        transport: used in place of the network.
    """

    def __init__(self, url: str, seconds: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url, self._seconds = url, seconds
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        self._turns = anyio.Semaphore(MAX_CONNECTIONS)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, transport=transport)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def check(self, length: int, vocabulary: int, texts: Callable[[Sequence[int]], list[str]]) -> None:
        """Check that the server reads `length` tokens and has the policy's tokenizer.

        Args:
            length: tokens of the longest sample.
            vocabulary: number of tokens of the policy; the tokens of the check are spread over all of them.
            texts: returns the texts of tokens, by the policy's tokenizer.

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
            # Tokenizers differ in how they write a part of a letter, and blanks at the ends of a token.
            if theirs.strip(" ") != mine.strip(" ") and "\ufffd" not in f"{mine}{theirs}":
                raise ConfigError(
                    f"algorithm.teacher.url: token {token} is {mine!r} to the policy and {answer.decoded_token!r} to "
                    f"{self._url}: expected a teacher with the policy's tokenizer"
                )

    async def score(self, result: Trajectory | Failure) -> Trajectory | Failure:
        """Return a trajectory with the teacher's log-probs of its action tokens, or a failure if there are none.

        Failures and trajectories of evaluations are returned unchanged.
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
        """Return the server's log-probs of the tokens at these positions, each given all tokens before it.

        Raises:
            RewardError: there is no answer, or it has no log-prob for one of the tokens.
        """
        content = await self._ask(msgspec.json.encode({"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}))
        found: list[_Token] = []
        try:
            (choice,) = _ANSWERS.decode(content).choices
            for position in positions:
                found.append(_TOKENS.decode(choice.prompt_logprobs[position])[str(tokens[position])])
                if len(found) % SLICE == 0:
                    await anyio.lowlevel.checkpoint()
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            raise self._error(f"gives no log-probs of a prompt: {error!r}; expected a server of vLLM") from error
        if any(token.logprob <= MINUS_INFINITY for token in found):
            raise self._error("gives a sampled token no probability at all")
        return found

    async def _ask(self, content: bytes) -> bytes:
        """Send a request until the server answers it, and return the answer.

        Raises:
            RewardError: the server refuses the request, or does not answer in time.
        """
        problem, pause = "nothing", FIRST_PAUSE_S
        # The time limit begins when this request may be sent. While it waits, earlier requests have their own limits.
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
        return RewardError(f"algorithm.teacher.url: {self._url} {text}")
