"""The model's tokenizer, as episodes need it.

A conversation is never tokenized again: what follows a response is appended to the tokens that were sampled. For chat
messages that is what the model's template puts after an assistant message, found by rendering a conversation around a
stand-in for the response. Text from outside is tokenized as text: only the template makes control tokens
(`flash.rollout.episode.controls`). What was sampled is read by vLLM's parsers, where the model's are named.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flash.config.tree import ModelConfig
from flash.environment.interface import Spoken
from flash.errors import ConfigError, EnvError, encodable
from flash.foreign.vllm_parsers import Parsers, names
from flash.rollout.episode.controls import STAND_IN, Controls, Shown
from flash.rollout.episode.reading import ParsedReading, PlainReading, Reading
from flash.types import ASSISTANT, TOOL, Message, Observation, Tool, ToolCall

QUESTION = Message("user", "flash-question")
"""Stands for all that came before the response: many templates want a user to speak first."""
KEPT_PROMPTS = 64
"""Tokens of the last so many first observations are kept: the members of a group show the same, one soon after the
other."""
CALL_ID = "flashcall"
"""Stands for the name of a call: some templates want it to have nine letters."""


class Tokenizer(Protocol):
    """Text to tokens and back. One that derives from it reads a response as the text that it is."""

    slow = False
    """True if large observations take so long that they should be rendered in a thread."""

    @property
    def least_message(self) -> int:
        """Lower bound on the tokens that one more message of anybody but a tool takes."""
        return 1

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens of the first observation; messages, and tools, go through the chat template. Raises EnvError."""
        ...

    def follow(self, observation: Observation, stopped: bool, tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens of a later observation, to be appended to a response. Raises EnvError.

        `stopped`: the response ends with the end-of-turn token, because the model ended it.
        """
        ...

    def ends_turn(self, token: int) -> bool:
        """Whether this is the end-of-turn token, or another with which a model ends a response of its own accord."""
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token on its own."""
        return [self.decode([token]) for token in token_ids]

    def check_calls(self) -> None:
        """Raise EnvError where calls of functions cannot be read."""
        raise EnvError("this tokenizer reads no calls of functions")

    def read(
        self, token_ids: Sequence[int], stopped: bool, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool
    ) -> Spoken:
        """Sampled tokens as a message; `prompt` is all that stood before them, `stopped` as for `follow`."""
        return Spoken(Message(ASSISTANT, self.decode(token_ids)))

    def reading(self, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool) -> Reading:
        """Reads a response while it is sampled, as `read` will read the whole."""
        return PlainReading(self.decode)


class HfTokenizer(Tokenizer):
    """A Hugging Face tokenizer. Plain text is encoded as it is; messages go through the model's chat template."""

    slow = True

    def __init__(self, config: ModelConfig) -> None:
        from transformers import AutoTokenizer

        self._config = config
        self._path = config.path
        self._prompts: dict[str | bytes, array[int]] = {}
        """The oldest first."""
        local = Path(config.path).is_dir()
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(
                config.path, local_files_only=local, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {config.path!r} has no usable tokenizer: {error}") from error

    def ready(self) -> HfTokenizer:
        """Load what reads responses, which takes seconds.

        Raises:
            ConfigError: a parser that is named does not exist, or cannot work with this tokenizer; or the tokenizer
                cannot tell text from control tokens.
        """
        _ = self._controls, self._parsers
        return self

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens of the first observation.

        Raises:
            EnvError: the model's chat template is missing or refuses the messages.
        """
        named = observation if isinstance(observation, str) else self._check(observation, tools)
        known = self._prompts.get(named)
        if known is None:
            known = self._prompts[named] = array("i", self._encode(self._first(observation, tools)))
            for oldest in list(self._prompts)[:-KEPT_PROMPTS]:
                # A thread that renders a large prompt may drop it, too.
                self._prompts.pop(oldest, None)
        return known.tolist()

    def _first(self, observation: Observation, tools: Sequence[Tool]) -> str | Shown:
        if isinstance(observation, str):
            return observation
        return self._template([_shown(message) for message in observation], tools, prompting=True)

    def follow(self, observation: Observation, stopped: bool, tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens of a later observation, to be appended to a response as it was sampled.

        `stopped`: the response ends with the end-of-turn token, because the model ended it; otherwise that token is
        part of what follows.

        Raises:
            EnvError: the chat template is missing, refuses the messages, or does not show the response as it is.
        """
        if isinstance(observation, str):
            return self._encode(observation, follows=True)
        self._check(observation, tools)
        if tools and observation and observation[0].role == TOOL:
            return self._follow_call(observation, stopped, tools)
        tokens = self._encode(self._after(_SAID, observation, tools, prompting=True), follows=True)
        if not stopped:
            return tokens
        at = self._first_special(tokens)
        return tokens[at + 1 :] if at is not None and tokens[at] in self._turn_ends else tokens

    def _follow_call(self, observation: Sequence[Message], stopped: bool, tools: Sequence[Tool]) -> list[int]:
        """What follows a response that called functions. How the template closes a call was sampled, or cut off."""
        called = _call(observation[0])
        alone = self._encode(self._after(called, [], tools, prompting=False), follows=True)
        end = next((token for token in reversed(alone) if token in self._special), None)
        tokens = self._encode(self._after(called, observation, tools, prompting=True), follows=True)
        if end is None or end not in tokens:
            raise EnvError(
                f"the chat template of {self._path} ends a call of a function with no token of its own, so that its "
                "result cannot follow what was sampled; use a model with another template"
            )
        return tokens[tokens.index(end) + stopped :]

    def said(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[list[int], list[int]]:
        """Tokens of what an engine is shown to have the last message said, an assistant's, and of that.

        These end with the token that ends a turn, whatever the template puts behind it.

        Raises:
            EnvError: the chat template is missing, refuses the messages, or shows an answer otherwise than behind its
                prompt.
        """
        self._check(messages, tools)
        shown = [_shown(message) for message in messages]
        prompt = self._template(shown[:-1], tools, prompting=True)
        answer = self._template(shown, tools, prompting=False).behind(prompt)
        if answer is None:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message behind the prompt for it, so "
                "that it cannot be learned as it would be said; give prompt and completion as text"
            )
        tokens = self._encode(answer, follows=True)
        end = next((at for at in reversed(range(len(tokens))) if self.ends_turn(tokens[at])), None)
        return self._encode(prompt), [*tokens, *self.end] if end is None else tokens[: end + 1]

    @property
    def least_message(self) -> int:
        """Lower bound on the tokens that one more message of anybody but a tool takes."""
        return self._least_message

    @cached_property
    def _least_message(self) -> int:
        more, least = 8, list[int]()
        for roles in (["user"], [ASSISTANT], ["user", ASSISTANT], ["system"]):
            said = [Message(role, "") for role in roles]
            try:
                few, many = (len(self._encode(self._first([QUESTION, *said * n], ()))) for n in (1, 1 + more))
            except EnvError:
                continue  # the template refuses such messages, however many there are
            least.append((many - few) // (more * len(roles)))
        return max(1, min(least, default=1))

    @property
    def end(self) -> list[int]:
        """The token that ends a text, where there is one."""
        return [] if self.inner.eos_token_id is None else [self.inner.eos_token_id]

    def ends_turn(self, token: int) -> bool:
        """See `Tokenizer`. Raises EnvError as `follow` does of messages."""
        return token in self._turn_ends

    def check_calls(self) -> None:
        """Raise EnvError where calls of functions cannot be read."""
        if self._config.tool_parser is None:
            known = ", ".join(names("tool_parsers"))
            raise EnvError(f"tools need model.tool_parser, the name of vLLM's parser for this model: one of {known}")

    def read(
        self, token_ids: Sequence[int], stopped: bool, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool
    ) -> Spoken:
        """Sampled tokens as a message. Calls have names of their own in the conversation, which follow from it."""
        if self._parsers is None:
            return Spoken(Message(ASSISTANT, self.decode(token_ids)))
        # As vLLM does it: without the token that ended it, and with all others shown.
        text = self._shown(token_ids[: len(token_ids) - stopped])
        found = self._parsers.parse(text, token_ids, prompt, tools, calling=calling)
        calls = tuple(
            # A name that the model has given is kept. Parsers read `\ud800` in a call's JSON as a character that is no
            # text: as it was written it is no JSON to us, and the call a malformed one.
            ToolCall(id if id and id in text else _name(len(prompt), index), encodable(name), encodable(arguments))
            for index, (id, name, arguments) in enumerate(found.calls)
        )
        return Spoken(Message(ASSISTANT, encodable(found.content), encodable(found.reasoning), calls), found.malformed)

    def reading(self, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool) -> Reading:
        """Reads a response while it is sampled: by vLLM's parsers for that, where the model's are named."""
        if self._parsers is None:
            return PlainReading(self.decode)
        return ParsedReading(self._parsers.begin(prompt, tools, calling=calling), self._shown)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token on its own, special tokens shown."""
        return [str(self.inner.decode([token])) for token in token_ids]

    def _shown(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones shown."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=False))

    def _encode(self, shown: str | Shown, *, follows: bool = False) -> list[int]:
        controls = self._controls
        try:
            if isinstance(shown, str):
                return controls.encode(shown, follows=follows)
            return controls.encode_shown(shown, follows=follows)
        except Exception as error:  # a vocabulary may lack characters of the text, and the tokenizer raises its own
            text = shown if isinstance(shown, str) else shown.text
            raise EnvError(f"the tokenizer of {self._path} cannot take {text[:80]!r}: {error}") from error

    def _check(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
        """All that is said. Raises EnvError for what is no text: a template's own characters are told apart by that."""
        try:
            return msgspec.json.encode((messages, tools))
        except UnicodeEncodeError as error:
            raise EnvError(
                f"the tokenizer of {self._path} cannot take {error.object[:80]!r}: it has a lone surrogate at "
                f'{error.start}; show text.encode("utf-8", "replace").decode()'
            ) from None

    @cached_property
    def _controls(self) -> Controls:
        return Controls(self.inner, self._path)

    @cached_property
    def _parsers(self) -> Parsers | None:
        config = self._config
        if config.tool_parser is None and config.reasoning_parser is None:
            return None
        try:
            return Parsers(self.inner, config.tool_parser, config.reasoning_parser)
        except ValueError as error:
            named = (
                f"model.tool_parser = {config.tool_parser!r} and model.reasoning_parser = {config.reasoning_parser!r}"
            )
            raise ConfigError(f"{named} cannot work with the tokenizer of {self._path}: {error}") from error

    @cached_property
    def _special(self) -> set[int]:
        added = {token for token, added in self.inner.added_tokens_decoder.items() if added.special}
        return added | set(self.inner.all_special_ids)

    @cached_property
    def _turn_ends(self) -> set[int]:
        """Tokens that end a response: the tokenizer's end of text, and what the template puts after an answer with
        nothing behind it. For some models the two differ, and the model samples the second."""
        ends = set(self.end)
        tokens = self._encode(self._after(_SAID, [], (), prompting=False), follows=True)
        at = self._first_special(tokens)
        return ends if at is None else ends | {tokens[at]}

    def _first_special(self, tokens: Sequence[int]) -> int | None:
        """Where the first special token stands, if only white space stands before it."""
        for at, token in enumerate(tokens):
            if token in self._special:
                return at
            if self.inner.decode([token]).strip():
                return None
        return None

    def _after(self, said: _Said, messages: Sequence[Message], tools: Sequence[Tool], *, prompting: bool) -> Shown:
        """What the template puts after a response, which `said` stands for, that these messages follow."""
        shown = [_shown(QUESTION), said, *map(_shown, messages)]
        tail = self._template(shown, tools, prompting=prompting).after(STAND_IN)
        if tail is None:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message as it is, so that no message "
                "can follow one; let the environment show text, or use a model with another template"
            )
        return tail

    def _template(self, shown: Sequence[_Said], tools: Sequence[Tool], *, prompting: bool) -> Shown:
        controls, given = self._controls, {"tools": list(tools)} if tools else {}
        try:
            return controls.template(shown, prompting=prompting, **given)
        except Exception as error:  # a template is code of the model's author and raises what it likes
            roles = ", ".join(message["role"] for message in shown)
            raise EnvError(
                f"the chat template of {self._path} cannot show these messages ({roles}): {error}; let the environment "
                'show text (a data set with template = "plain") or other messages, or use a model with another template'
            ) from error


_Said = dict[str, Any]
"""A message as chat templates take it."""
_SAID: _Said = {"role": ASSISTANT, "content": STAND_IN}


def _call(result: Message) -> _Said:
    """Stands for a response that called the function whose result this is."""
    function = {"name": result.name or "flash", "arguments": {"flash": STAND_IN}}
    call = {"id": result.tool_call_id or CALL_ID, "type": "function", "function": function}
    return {"role": ASSISTANT, "content": "", "tool_calls": [call]}


def _name(place: int, index: int) -> str:
    """Of the call `index` of the response at a place: nine letters, which is the one form that some templates take."""
    return blake2b(f"{place} {index}".encode(), digest_size=9).hexdigest()[:9]


def _shown(message: Message) -> _Said:
    shown: _Said = {"role": message.role, "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.role == TOOL:
        shown |= {key: value for key in ("tool_call_id", "name") if (value := getattr(message, key))}
    return shown


def _arguments(call: ToolCall) -> Any:
    """Templates write them as JSON: they want the object where it is one."""
    try:
        value: Any = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments
