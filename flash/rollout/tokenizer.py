"""The model's tokenizer, as episodes need it.

A conversation is never tokenized again: what follows a response is appended to the tokens that were sampled. For chat
messages that is what the model's template puts after an assistant message, found by rendering a conversation around a
stand-in for the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from flash.config.tree import ModelConfig
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

QUESTION = Message("user", "flash-question")
"""Stands for all that came before the response: many templates want a user to speak first."""
ANSWER = "flash-answer"
"""Stands for the response: a text without white space, which templates may trim."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def render(self, observation: Observation) -> list[int]:
        """Tokens of the first observation; messages go through the chat template. Raises EnvError."""
        ...

    def follow(self, observation: Observation, stopped: bool) -> list[int]:
        """Tokens of a later observation, to be appended to a response. Raises EnvError.

        `stopped`: the response ends with the end-of-turn token, because the model ended it.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        ...


class HfTokenizer:
    """A Hugging Face tokenizer. Plain text is encoded as it is; messages go through the model's chat template."""

    def __init__(self, config: ModelConfig) -> None:
        from transformers import AutoTokenizer

        self._path = config.path
        local = Path(config.path).is_dir()
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(
                config.path, local_files_only=local, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {config.path!r} has no usable tokenizer: {error}") from error

    def render(self, observation: Observation) -> list[int]:
        """Tokens of the first observation.

        Raises:
            EnvError: the model's chat template is missing or refuses the messages.
        """
        if isinstance(observation, str):
            return self._encode(observation)
        return self._encode(self._template(observation, prompting=True))

    def follow(self, observation: Observation, stopped: bool) -> list[int]:
        """Tokens of a later observation, to be appended to a response as it was sampled.

        `stopped`: the response ends with the end-of-turn token, because the model ended it; otherwise that token is
        part of what follows.

        Raises:
            EnvError: the chat template is missing, refuses the messages, or does not show the response as it is.
        """
        if isinstance(observation, str):
            return self._encode(observation)
        tokens = self._encode(self._after_answer(observation, prompting=True))
        if not stopped:
            return tokens
        at = self._first_special(tokens)
        return tokens[at + 1 :] if at is not None and tokens[at] in self._turn_ends else tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token on its own, special tokens shown."""
        return [str(self.inner.decode([token])) for token in token_ids]

    def _encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    @cached_property
    def _turn_ends(self) -> set[int]:
        """Tokens that end a response: the tokenizer's end of text, and what the template puts after an answer with
        nothing behind it. For some models the two differ, and the model samples the second."""
        ends = {self.inner.eos_token_id} - {None}
        tokens = self._encode(self._after_answer([], prompting=False))
        at = self._first_special(tokens)
        return ends if at is None else ends | {tokens[at]}

    def _first_special(self, tokens: Sequence[int]) -> int | None:
        """Where the first special token stands, if only white space stands before it."""
        special = set(self.inner.all_special_ids) | {
            token for token, added in self.inner.added_tokens_decoder.items() if added.special
        }
        for at, token in enumerate(tokens):
            if token in special:
                return at
            if self.inner.decode([token]).strip():
                return None
        return None

    def _after_answer(self, messages: Sequence[Message], *, prompting: bool) -> str:
        """What the template puts after an answer that these messages follow."""
        whole = self._template([QUESTION, Message("assistant", ANSWER), *messages], prompting=prompting)
        _, found, tail = whole.partition(ANSWER)
        if not found:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message as it is, so that no message "
                "can follow one; let the environment show text, or use a model with another template"
            )
        return tail

    def _template(self, messages: Sequence[Message], *, prompting: bool) -> str:
        shown = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self.inner.apply_chat_template(shown, add_generation_prompt=prompting, tokenize=False))
        except Exception as error:  # a template is code of the model's author and raises what it likes
            roles = ", ".join(message.role for message in messages)
            raise EnvError(
                f"the chat template of {self._path} cannot show these messages ({roles}): {error}; let the environment "
                'show text (a data set with template = "plain") or other messages, or use a model with another template'
            ) from error
