"""The model's tokenizer, as episodes and `flash sft` need it.

A conversation is never tokenized again: what follows a response is appended to the tokens that were sampled. For chat
messages that is what the model's template puts after an assistant message, found by rendering a conversation around a
stand-in for the response. Text from outside is tokenized as text: only the template makes control tokens
(`flash.rollout.episode.controls`). What was sampled is read by vLLM's parsers, where the model's are named.

Law: a part of a conversation that the template leaves out is never lost in silence. A template that leaves out tools,
calls, their results or system messages is refused; reasoning that it leaves out is reported once.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from flash.config.tree import ModelConfig
from flash.environment.interface import Spoken
from flash.errors import ConfigError, EnvError, encodable
from flash.foreign.chat_templates import arguments_of
from flash.foreign.vllm_parsers import Parsers, names
from flash.rollout.episode.controls import STAND_IN, Controls, Shown
from flash.rollout.episode.reading import ParsedReading, PlainReading, Reading
from flash.types import ASSISTANT, RESERVED_ARGUMENTS, TOOL, Message, Observation, Tool, ToolCall

log = logging.getLogger("flash")

QUESTION = Message("user", "flash-question")
"""Stands for all that came before the response: many templates want a user to speak first."""
KEPT_PROMPTS = 64
"""Tokens of the last so many first observations are kept: the members of a group show the same, one soon after the
other."""
CALL_ID = "flashcall"
"""Stands for the name of a call: some templates want it to have nine letters."""
TOOL_NAME = "flash_tool"
"""Name of the function that `TRIED_TOOL` offers."""
TRIED_TOOL: Tool = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
"""A tool with which a chat template is tried."""
KEPT_VARIANTS = 64
"""Tokenizers with template arguments of their own that are kept: data sets have a handful of them."""


class Tokenizer(Protocol):
    """Text to tokens and back. A class that derives from it reads a response as the text that it is."""

    def under(self, arguments: Mapping[str, Any]) -> Tokenizer:
        """Return this tokenizer with more arguments for its chat template. Raises EnvError."""
        return self

    slow = False
    """True if large observations take so long that they should be rendered in a thread."""

    @property
    def least_message(self) -> int:
        """Lower bound on the tokens that one more message of anybody but a tool takes."""
        return 1

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens of the first observation; messages, and tools, go through the chat template. Raises EnvError."""
        ...

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a later observation, to be appended to a response. Raises EnvError.

        `end`: the token with which the model ended the response; None if a limit cut it.
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
        """Return sampled tokens as a message.

        `prompt` is all that stood before them; `stopped`: the last of them is the token with which the model ended it.
        """
        return Spoken(Message(ASSISTANT, self.decode(token_ids)))

    def reading(self, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool) -> Reading:
        """Reads a response while it is sampled, as `read` will read the whole."""
        return PlainReading(self.decode)


class _Manner(NamedTuple):
    """The form in which a chat template takes what templates take in different forms."""

    parts: bool = False
    """True if it reads the content of a message as a list of parts, and shows nothing of a text."""
    silent: str | None = ""
    """Content of a message that calls functions and says nothing."""
    as_text: bool = False
    """True if it takes the arguments of a call as JSON text."""


class HfTokenizer(Tokenizer):
    """A Hugging Face tokenizer. Messages go through the model's chat template.

    Plain text is encoded as it is, behind the token with which the tokenizer begins a text, such as `<s>`, if it does.
    """

    slow = True

    def __init__(self, config: ModelConfig) -> None:
        from transformers import AutoTokenizer

        self._config = config
        self._path = config.path
        self._prompts: dict[str | bytes, array[int]] = {}
        """Tokens of first observations, the oldest first."""
        self._arguments = dict(config.chat_template_kwargs)
        """Arguments of the chat template."""
        self._variants: dict[bytes, HfTokenizer] = {}
        """The tokenizers that `under` has made, the oldest first."""
        self._reported: set[str] = set()
        """Warnings that were given; shared by all variants."""
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
                cannot tell text from control tokens; or the chat template never reads one of its arguments.
        """
        _ = self._controls, self._parsers
        if unread := self._unread(self._arguments):
            known = ", ".join(sorted(self._read_by_template)) or "none"
            raise ConfigError(
                f"model.chat_template_kwargs: the chat template of {self._path} never reads {', '.join(unread)}; "
                f"the names that it reads are: {known}"
            )
        return self

    def under(self, arguments: Mapping[str, Any]) -> HfTokenizer:
        """Return this tokenizer with more arguments for its chat template, which come before those of the run.

        Raises:
            EnvError: an argument is not the template's to have.
        """
        if not arguments:
            return self
        try:
            key = msgspec.json.encode(arguments, order="deterministic")
        except (TypeError, UnicodeEncodeError, RecursionError) as error:
            raise EnvError(f"chat_template_kwargs cannot be written as JSON: {error}") from None
        known = self._variants.get(key)
        if known is None:
            if taken := sorted(RESERVED_ARGUMENTS & set(arguments)):
                raise EnvError(f"chat_template_kwargs must not have {', '.join(taken)}: expected what a template reads")
            if unread := self._unread(arguments):
                self._report(f"the chat template of {self._path} never reads {', '.join(unread)}: without effect")
            _ = self._controls  # shared by all variants
            known = copy(self)
            for name in ("_turn_ends", "_manner", "_call_manner", "_leaves_out", "_parsers"):
                known.__dict__.pop(name, None)
            known._arguments, known._prompts, known._variants = self._arguments | dict(arguments), {}, {}
            self._variants[key] = known
            if len(self._variants) > KEPT_VARIANTS:
                del self._variants[next(iter(self._variants))]
        return known

    @cached_property
    def _read_by_template(self) -> frozenset[str]:
        """Names of the arguments that the chat template reads."""
        template = self.inner.chat_template
        sources = template.values() if isinstance(template, dict) else [template] if template else []
        given = RESERVED_ARGUMENTS | set(self.inner.special_tokens_map)
        return frozenset(name for source in sources for name in arguments_of(source)) - given

    def _unread(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of arguments that the chat template never reads."""
        return sorted(set(arguments) - self._read_by_template)

    def _report(self, text: str) -> None:
        """Log a warning, the first time that it is given."""
        if text not in self._reported:
            self._reported.add(text)
            log.warning("%s", text)

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of the first observation. The policy goes on with a last message of the assistant's.

        Raises:
            EnvError: the model's chat template is missing, refuses the messages, or leaves out a part of them.
        """
        named = observation if isinstance(observation, str) else self._check(observation, tools)
        known = self._prompts.get(named)
        if known is None:
            tokens = self._encode(self._first(observation, tools))
            if isinstance(observation, str):  # a chat template writes its beginning itself
                tokens = self._text_start + tokens
            known = self._prompts[named] = array("i", tokens)
            for oldest in list(self._prompts)[:-KEPT_PROMPTS]:
                # A thread that renders a large prompt may drop it, too.
                self._prompts.pop(oldest, None)
        return known.tolist()

    def _first(self, observation: Observation, tools: Sequence[Tool]) -> str | Shown:
        if isinstance(observation, str):
            return observation
        shown = self._prompt(observation, tools)
        self._refuse_left_out(observation, tools)
        return shown

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a later observation, to be appended to a response as it was sampled.

        `end`: the token with which the model ended the response; None if a limit cut it, and then the end of the turn
        is part of what follows.

        Raises:
            EnvError: the chat template is missing, refuses the messages, leaves out a part of them, or does not show
                the response as it is.
        """
        if isinstance(observation, str):
            return self._encode(observation, follows=True)
        self._check(observation, tools)
        self._refuse_left_out(observation, tools)
        results = 0
        while tools and results < len(observation) and observation[results].role == TOOL:
            results += 1
        if not results:
            alone, tokens = self._closings([_SAID], observation, tools)
        else:
            alone, tokens = self._closings(_calling(observation[:results]), observation, tools)
        closing = _shared(alone, tokens)
        ends = [at for at in range(closing) if tokens[at] in self._control_ids]
        if end is None:
            # A response that calls was sampled up to the end of its last call at the least, or it would call nothing.
            sampled = ends[-1] + (tokens[ends[-1]] not in self._turn_ends) if ends and results else 0
            return tokens[sampled:]
        if end in tokens[:closing]:
            return tokens[max(at for at in range(closing) if tokens[at] == end) + 1 :]
        first = next((at for at in range(closing, len(tokens)) if tokens[at] in self._control_ids), None)
        if first is not None and tokens[first] == end:
            # Some templates write no end of a turn: their models end it with the first token of the next one.
            return tokens[first + 1 :]
        return tokens[ends[-1] + 1 if ends else closing if results else 0 :]

    def _closings(
        self, said: Sequence[Message], news: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], list[int]]:
        """Return what the template puts behind a response, alone and with these messages behind it.

        `said` stands for the response, in the forms to be tried: some templates refuse several calls at once.
        """
        for place, one in enumerate(said, start=1):
            try:
                alone = self._after(one, [], tools, prompting=False)
                return self._encode(alone, follows=True), self._encode(self._after(one, news, tools), follows=True)
            except EnvError:
                if place == len(said):
                    raise
        raise AssertionError("there is a form to be tried")

    def said(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[list[int], list[int]]:
        """Return what an engine is shown to have the last message said, an assistant's, and the tokens of that.

        These end with the token that ends a turn, whatever the template puts behind it.

        Raises:
            EnvError: the chat template is missing, leaves out a part of the messages, or shows an answer otherwise than
                behind its prompt.
        """
        self._check(messages, tools)
        shown = [self._shown_message(message) for message in messages]
        prompt = self._template(shown[:-1], tools, prompting=True)
        whole = self._template(shown, tools, prompting=False)
        self._refuse_left_out(messages, tools)
        self._refuse_partly(messages, shown, tools, whole)
        answer = whole.behind(prompt) or self._behind_question(shown[-1], tools, whole)
        if answer is None:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message behind the prompt for it, so "
                f"that it cannot be learned as it would be said{self._cure()}"
            )
        tokens = self._encode(answer, follows=True)
        end = next((at for at, token in enumerate(tokens) if token in self._turn_ends), None)
        if end is not None and self.decode(tokens[end + 1 :]).strip():
            raise EnvError(
                f"the chat template of {self._path} ends the turn in the middle of this message, where an engine would "
                "stop: give its parts as messages of their own, or use a model with another template"
            )
        return self._encode(prompt), [*tokens, *self.end] if end is None else tokens[: end + 1]

    def _behind_question(self, said: _Said, tools: Sequence[Tool], whole: Shown) -> Shown | None:
        """Return an answer as the template shows it behind a question alone, if a conversation ends with just that.

        GPT-OSS's template drops the reasoning of earlier calls once a final answer is there: the whole conversation
        does not begin with the prompt for its last answer, and the answer is the same.
        """
        asked = self._shown_message(QUESTION)
        prompt = self._template([asked], tools, prompting=True)
        answer = self._template([asked, said], tools, prompting=False).behind(prompt)
        return answer if answer is not None and answer.text and whole.text.endswith(answer.text) else None

    def _cure(self) -> str:
        """Return what can be done about an answer that does not stand behind its prompt."""
        known = sorted(self._read_by_template & THINKING)
        changed = f"; set chat_template_kwargs ({', '.join(known)}) as the answer has it" if known else ""
        return f"{changed}; or give prompt and completion as text"

    def _refuse_partly(
        self, messages: Sequence[Message], shown: Sequence[_Said], tools: Sequence[Tool], whole: Shown
    ) -> None:
        """Raise EnvError if the template leaves out a call of the last message; report it for the reasoning."""
        last = shown[-1]
        calls = messages[-1].tool_calls
        if calls:
            fewer = {key: value for key, value in last.items() if key != "tool_calls"}
            if len(calls) > 1:
                fewer["tool_calls"] = last["tool_calls"][:-1]
            elif fewer["content"] is None:
                fewer["content"] = ""
            if self._template([*shown[:-1], fewer], tools, prompting=False).text == whole.text:
                raise EnvError(self._left_out("parallel" if len(calls) > 1 else "calls"))
        if messages[-1].reasoning:
            without = {key: value for key, value in last.items() if key not in REASONING}
            if self._template([*shown[:-1], without], tools, prompting=False).text == whole.text:
                self._report(self._left_out("reasoning"))

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

    @property
    def ends(self) -> list[int]:
        """The tokens that end a response, ascending: the end of a text, and what the chat template shows to end a turn.

        Without a chat template, the end of a text alone.
        """
        try:
            return sorted(self._turn_ends)
        except EnvError:
            return self.end

    def name_ends(self, generation: Any) -> list[int]:
        """Let a model's `generation_config` name all of `ends` beside its own; return those that it did not name."""
        named: Any = generation.eos_token_id
        named = [] if named is None else [named] if isinstance(named, int) else list(named)
        unnamed = [token for token in self.ends if token not in named]
        if unnamed:
            generation.eos_token_id = [*named, *unnamed]
        return unnamed

    def ends_told(self) -> str:
        """Say which of `ends` the model's files do not name; empty if they name all."""
        from transformers import AutoConfig, GenerationConfig

        local, trusted = Path(self._path).is_dir(), self._config.trust_remote_code
        try:
            generation: Any = GenerationConfig.from_pretrained(self._path, local_files_only=local)
        except OSError:
            try:
                described: Any = AutoConfig.from_pretrained(
                    self._path, local_files_only=local, trust_remote_code=trusted
                )
            except (OSError, ValueError):  # the model is still to be made
                return ""
            generation = GenerationConfig.from_model_config(described)
        if not (unnamed := self.name_ends(generation)):
            return ""
        texts = " and ".join(map(repr, self.token_texts(unnamed)))
        return (
            f"the tokenizer of {self._path} ends turns with {texts}, which the model's generation_config does not "
            "name: engines stop there too, and the exported one names it"
        )

    def ends_turn(self, token: int) -> bool:
        """True if a model ends a response with this token. Raises EnvError as `follow` does for messages."""
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
    def _text_start(self) -> list[int]:
        """Tokens that the tokenizer puts before any text.

        Models such as Gemma and Llama were pretrained with them, and engines put them before a text, too.
        """
        if not self.inner.encode(""):
            return []
        # Its own words: a vocabulary of a few characters may have none of those that one would try.
        for number in range(len(self.inner)):
            text = self.inner.decode([number])
            try:
                tokens = self._encode(text)
            except EnvError:
                continue
            whole = list(self.inner.encode(text))
            for at in range(len(whole) - len(tokens) + 1) if tokens else ():
                if whole[at : at + len(tokens)] == tokens:
                    return whole[:at]
        return []

    @cached_property
    def _controls(self) -> Controls:
        return Controls(self.inner, self._path)

    @cached_property
    def _parsers(self) -> Parsers | None:
        config = self._config
        if config.tool_parser is None and config.reasoning_parser is None:
            return None
        try:
            return Parsers(self.inner, config.tool_parser, config.reasoning_parser, self._arguments)
        except ValueError as error:
            named = (
                f"model.tool_parser = {config.tool_parser!r} and model.reasoning_parser = {config.reasoning_parser!r}"
            )
            raise ConfigError(f"{named} cannot work with the tokenizer of {self._path}: {error}") from error

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return self._controls.ids | set(self.inner.all_special_ids)

    @cached_property
    def _turn_ends(self) -> frozenset[int]:
        """The tokenizer's end of text, and the tokens with which the template ends an answer and a call."""
        ends = set(self.end)
        answer = self._last_control([_SAID], [QUESTION], ())
        if answer is not None:
            ends.add(answer)
        result = Message(TOOL, "flash", tool_call_id=CALL_ID, name=TOOL_NAME)
        call, both = None, None
        try:
            call = self._last_control(_calling([result]), [result], [TRIED_TOOL])
            both = self._after(_call([result, result], spoken=0), [], [TRIED_TOOL], prompting=False)
        except EnvError:  # the template shows no calls, or not two at once
            pass
        # What stands behind each call ends a call, and not the turn.
        if call is not None and (both is None or self._encode(both, follows=True).count(call) == 1):
            ends.add(call)
        return frozenset(ends)

    def _last_control(self, said: Sequence[Message], news: Sequence[Message], tools: Sequence[Tool]) -> int | None:
        """Return the last control token that the template puts behind a response, whatever follows it."""
        alone, tokens = self._closings(said, news, tools)
        closing = _shared(alone, tokens)
        found = [token for token in alone[:closing] if token in self._control_ids]
        if found:
            return found[-1]
        # Some templates end the last turn with another token than earlier ones.
        return next((token for token in alone if token in self._control_ids), None)

    # -- what templates take in different forms, and what they leave out ---------------------------------------------

    @cached_property
    def _manner(self) -> _Manner:
        """The form of texts."""
        for manner in (_Manner(), _Manner(parts=True)):
            if self._tried([_in(manner, QUESTION)], (), QUESTION.content):
                return manner
        return _Manner()

    @cached_property
    def _call_manner(self) -> _Manner:
        """The form of texts and calls."""
        called = Message(ASSISTANT, "", tool_calls=(_stand_in_call(None),))
        for as_text in (False, True):
            for silent in ("", None):
                manner = self._manner._replace(silent=silent, as_text=as_text)
                if self._tried([_in(manner, QUESTION), _in(manner, called)], [TRIED_TOOL], STAND_IN):
                    return manner
        return self._manner

    def _tried(self, shown: Sequence[_Said], tools: Sequence[Tool], text: str) -> bool:
        """True if the template takes these messages and shows this text."""
        try:
            return text in self._template(shown, tools, prompting=False).text
        except EnvError:
            return False

    @cached_property
    def _leaves_out(self) -> Callable[[str], bool]:
        """Say if the template takes a part of a conversation, a key of `PARTS`, and shows nothing of it."""
        asked, said = QUESTION, Message(ASSISTANT, STAND_IN)
        call, other = _stand_in_call(None), ToolCall(CALL_ID, TOOL_NAME, "{}")
        called = Message(ASSISTANT, "", tool_calls=(call,))
        tried: dict[str, tuple[list[Message], list[Tool], str]] = {
            "system": ([Message("system", STAND_IN), asked], [], STAND_IN),
            "assistant": ([asked, said], [], STAND_IN),
            "tools": ([asked], [TRIED_TOOL], TOOL_NAME),
            "calls": ([asked, called], [TRIED_TOOL], STAND_IN),
            "parallel": ([asked, Message(ASSISTANT, "", tool_calls=(other, call))], [TRIED_TOOL], STAND_IN),
            "results": (
                [
                    asked,
                    Message(ASSISTANT, "", tool_calls=(other,)),
                    Message(TOOL, STAND_IN, "", (), CALL_ID, TOOL_NAME),
                ],
                [TRIED_TOOL],
                STAND_IN,
            ),
            "reasoning": ([asked, Message(ASSISTANT, "flash", STAND_IN)], [], STAND_IN),
        }

        @lru_cache(maxsize=len(PARTS))
        def left_out(part: str) -> bool:
            messages, tools, text = tried[part]
            try:
                shown = self._template(list(map(self._shown_message, messages)), tools, prompting=False)
            except EnvError:
                return False  # which whoever shows it will hear
            return text not in shown.text

        return left_out

    def _left_out(self, part: str) -> str:
        """Return the sentence that says what the template leaves out."""
        shows = f"the chat template of {self._path} shows nothing of {PARTS[part]}"
        if part == "reasoning":
            return f"{shows}, where a conversation has some: it is neither shown nor learned"
        return f"{shows}, so that the model would never see it; leave it out, or use a model with another template"

    def _refuse_left_out(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise EnvError if the template leaves out a part of these; report it for reasoning."""
        there = {one.role if one.role != TOOL else "results" for one in messages}
        there |= {"tools"} if tools else set()
        for one in messages:
            if one.tool_calls:
                there |= {"calls", "parallel"} if len(one.tool_calls) > 1 else {"calls"}
            if one.reasoning:
                there.add("reasoning")
        for part in PARTS:
            if part in there and self._leaves_out(part):
                if part != "reasoning":
                    raise EnvError(self._left_out(part))
                self._report(self._left_out(part))

    def _after(
        self, said: Message, messages: Sequence[Message], tools: Sequence[Tool], *, prompting: bool = True
    ) -> Shown:
        """What the template puts after a response, which `said` stands for, that these messages follow."""
        shown = [QUESTION, said, *messages]
        tail = (self._prompt(shown, tools) if prompting else self._conversation(shown, tools)).after(STAND_IN)
        if tail is None:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message as it is, so that no message "
                "can follow one; let the environment show text, or use a model with another template"
            )
        return tail

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Shown:
        """Return the messages and what makes an assistant answer; the end of one is left open to be gone on with."""
        last = messages[-1] if messages else None
        if last is None or last.role != ASSISTANT or last.tool_calls:
            return self._template(list(map(self._shown_message, messages)), tools, prompting=True)
        opened = msgspec.structs.replace(last, content=last.content + STAND_IN)
        shown = self._conversation([*messages[:-1], opened], tools).before(STAND_IN)
        if shown is None:
            raise EnvError(
                f"the chat template of {self._path} does not show an assistant's message as it is, so that the model "
                "cannot go on with one: let a user's message be the last"
            )
        return shown

    def _conversation(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Shown:
        return self._template(list(map(self._shown_message, messages)), tools, prompting=False)

    def _shown_message(self, message: Message) -> _Said:
        """Return a message in the form in which the template takes it."""
        return _in(self._call_manner if message.tool_calls else self._manner, message)

    def _template(self, shown: Sequence[_Said], tools: Sequence[Tool], *, prompting: bool) -> Shown:
        controls, given = self._controls, {"tools": list(tools)} if tools else {}
        try:
            return controls.template(shown, prompting=prompting, **self._arguments, **given)
        except Exception as error:  # a template is code of the model's author and raises what it likes
            roles = ", ".join(message["role"] for message in shown)
            raise EnvError(
                f"the chat template of {self._path} cannot show these messages ({roles}): {error}; let the environment "
                'show text (a data set with template = "plain") or other messages, or use a model with another template'
            ) from error


_Said = dict[str, Any]
"""A message as chat templates take it."""
_SAID = Message(ASSISTANT, STAND_IN)
"""Stands for a response."""

PARTS = {
    "system": "a system message",
    "assistant": "an assistant's message",
    "tools": "tools",
    "calls": "an assistant's calls of tools",
    "parallel": "a second call in one message",
    "results": "the results of tools",
    "reasoning": "an assistant's reasoning",
}
"""Parts of a conversation that chat templates may leave out, in words."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that chat templates have for the reasoning of a message: Qwen's, Gemma's, GPT-OSS's."""
THINKING = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Arguments with which chat templates begin an answer differently."""


def _stand_in_call(result: Message | None, *, spoken: bool = True) -> ToolCall:
    """Return a call that stands for the one with this result; `spoken`: its arguments hold the stand-in."""
    name, id = (result.name, result.tool_call_id) if result is not None else ("", "")
    arguments = json.dumps({"flash": STAND_IN if spoken else "flash"}, ensure_ascii=False)
    return ToolCall(id or CALL_ID, name or TOOL_NAME, arguments)


def _call(results: Sequence[Message], spoken: int = -1) -> Message:
    """Return what stands for a response that made the calls of these results, the one at `spoken` with the stand-in."""
    spoken %= len(results)
    calls = (_stand_in_call(result, spoken=place == spoken) for place, result in enumerate(results))
    return Message(ASSISTANT, "", tool_calls=tuple(calls))


def _calling(results: Sequence[Message]) -> list[Message]:
    """Return what may stand for a response that made the calls of these results: all of them, or the first alone.

    A model may make two calls at once under a template that shows only one.
    """
    return [_call(results), _call(results[:1])] if len(results) > 1 else [_call(results)]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _name(place: int, index: int) -> str:
    """Of the call `index` of the response at a place: nine letters, which is the one form that some templates take."""
    return blake2b(f"{place} {index}".encode(), digest_size=9).hexdigest()[:9]


def _in(manner: _Manner, message: Message) -> _Said:
    """Return a message as chat templates of this manner take it."""
    silent = bool(message.tool_calls) and not message.content
    content: Any = manner.silent if silent else message.content
    if manner.parts and content is not None:
        content = [{"type": "text", "text": content}]
    shown: _Said = {"role": message.role, "content": content}
    if message.reasoning:
        shown |= dict.fromkeys(REASONING, message.reasoning)
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if manner.as_text else _arguments(call),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == TOOL:
        shown |= {key: value for key in ("tool_call_id", "name") if (value := getattr(message, key))}
    return shown


def _arguments(call: ToolCall) -> Any:
    """Return the arguments of a call as an object, where they are one: most templates write them as JSON."""
    try:
        value: Any = json.loads(call.arguments) if STAND_IN in call.arguments else msgspec.json.decode(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments
