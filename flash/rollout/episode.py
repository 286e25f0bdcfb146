"""Episode: one environment's life, from reset to reward.

reset → render the prompt's tokens once → generate → step → trajectory. Whatever goes wrong becomes a typed `Failure`;
only cancellation passes through. The environment is closed exactly once.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import anyio
import msgspec
import numpy as np

from envs.base import Environment, check_reset_result, check_step_result
from flash.errors import DeadlineError, EngineError, EnvError, RewardError
from flash.rollout.engine import SamplingSettings
from flash.rollout.proxy import LLMProxy
from flash.types import Completion, Failure, Lease, Observation, Outcome, Span, Trajectory

_T = TypeVar("_T")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def render(self, observation: Observation) -> list[int]:
        """Prompt tokens of an observation; messages go through the chat template."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        ...


class EpisodeSettings(msgspec.Struct, frozen=True):
    """What all episodes of a run share."""

    train: SamplingSettings
    eval: SamplingSettings
    max_length: int
    """Longest prompt plus response, in tokens."""
    reset_s: float
    step_s: float
    close_s: float
    generate_s: float
    """Deadlines, in seconds."""


class _Progress:
    """Tokens sampled so far, so that a failure can say what was lost."""

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, count: int) -> None:
        self.tokens += count


class Episode:
    """Runs one lease."""

    def __init__(
        self,
        make_env: Callable[[], Environment],
        tokenizer: Tokenizer,
        proxy: LLMProxy,
        settings: EpisodeSettings,
    ) -> None:
        self._make_env = make_env
        self._tokenizer = tokenizer
        self._proxy = proxy
        self._settings = settings

    async def run(self, lease: Lease) -> Trajectory | Failure:
        """Live through the episode; never raises except for cancellation and programmer errors."""
        progress = _Progress()
        try:
            return await self._live(lease, progress)
        except RewardError as error:
            return Failure(lease.task, Outcome.REWARD_ERROR, str(error), progress.tokens)
        except EnvError as error:
            return Failure(lease.task, Outcome.ENV_ERROR, str(error), progress.tokens)
        except (EngineError, DeadlineError) as error:
            return Failure(lease.task, Outcome.ENGINE_ERROR, str(error), progress.tokens)
        except _EnvTimeout as error:
            return Failure(lease.task, Outcome.ENV_TIMEOUT, str(error), progress.tokens)

    async def _live(self, lease: Lease, progress: _Progress) -> Trajectory:
        env = await self._supervised("start", 0, self._settings.reset_s, self._made)
        try:
            seed = lease.task.seed
            shown = await self._supervised("reset", seed, self._settings.reset_s, lambda: env.reset(seed))
            observation, _ = check_reset_result(shown)
            prompt = self._render(observation)
            started = anyio.current_time()
            completion = await self._generate(lease, prompt, progress)
            generate_s = anyio.current_time() - started
            answer = self._tokenizer.decode(completion.token_ids)
            result = await self._supervised("step", seed, self._settings.step_s, lambda: env.step(answer))
            _, reward, terminated, truncated, _ = check_step_result(result)
            if not (terminated or truncated):
                raise EnvError(
                    "the environment goes on after its first step; episodes of one step are supported: return "
                    "terminated=True or truncated=True"
                )
        finally:
            await self._close(env)
        return _trajectory(lease, observation, prompt, completion, answer, float(reward), generate_s)

    async def _made(self) -> Environment:
        return self._make_env()

    async def _generate(self, lease: Lease, prompt: list[int], progress: _Progress) -> Completion:
        sampling = self._settings.eval if lease.task.split == "eval" else self._settings.train
        room = self._settings.max_length - len(prompt)
        if room < 1:
            raise EnvError(
                f"the prompt has {len(prompt)} tokens and leaves no room for an answer: model.max_length is "
                f"{self._settings.max_length}; raise it, or filter long problems out of the data"
            )
        limited = msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        completion = await self._proxy.generate(
            prompt, limited, lease.min_version, progress.add, self._settings.generate_s
        )
        progress.tokens = len(completion.token_ids)
        return completion

    def _render(self, observation: Observation) -> list[int]:
        prompt = self._tokenizer.render(observation)
        if not prompt:
            raise EnvError(f"the observation {observation!r} gives an empty prompt")
        return prompt

    async def _supervised(self, what: str, seed: int, timeout: float, call: Callable[[], Awaitable[_T]]) -> _T:
        """One call into the user's environment: its exceptions and its silence become typed."""
        with anyio.move_on_after(timeout):
            try:
                return await call()
            except EnvError:
                raise
            except Exception as error:  # the supervised boundary to code that is not ours
                raise EnvError(f"environment {what} (seed {seed}) raised {_where(error)}") from error
        raise _EnvTimeout(f"environment {what} (seed {seed}) took longer than {timeout:g} s")

    async def _close(self, env: Environment) -> None:
        """Close also while being cancelled, but never for longer than the deadline."""
        with anyio.move_on_after(self._settings.close_s, shield=True):
            await self._supervised("close", 0, self._settings.close_s, env.close)


class _EnvTimeout(Exception):
    """An environment call outlived its deadline."""


def _where(error: Exception) -> str:
    """`ValueError: text (file.py:12)`: enough to find the line in the user's environment."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _text(observation: Observation) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message.role}: {message.content}" for message in observation)


def _trajectory(
    lease: Lease,
    observation: Observation,
    prompt: list[int],
    completion: Completion,
    answer: str,
    reward: float,
    generate_s: float,
) -> Trajectory:
    return Trajectory(
        task=lease.task,
        outcome=Outcome.OK if completion.finish == "stop" else Outcome.TRUNCATED,
        reward=reward,
        token_ids=np.array([*prompt, *completion.token_ids], dtype="<i4").tobytes(),
        action_spans=[Span(len(prompt), len(prompt) + len(completion.token_ids))],
        logprobs=np.array(completion.logprobs, dtype="<f4").tobytes(),
        versions=completion.versions,
        prompt_text=_text(observation),
        completion_text=answer,
        generate_s=generate_s,
    )
