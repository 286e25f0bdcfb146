"""The model's tokenizer: turns text into tokens and back, for episodes and for `flash sft`.

An episode calls `Tokenizer`: `render` for the first observation, `follow` for each later observation, and
`read_response` for each response. A response is never tokenized again: later tokens are appended to the sampled tokens.
`ChatTemplate` renders chat messages, and `ControlTokens` encodes all text. A *control token* is a token that only the
chat template may write, such as `<|im_end|>`, with which many models end a turn; these two classes ensure that no other
text becomes one. A *call* is a call of a function (a tool) that a response contains. vLLM's parsers separate reasoning
and calls from the text of a response, if the configuration names them.

`HfTokenizer` is the tokenizer of a model's folder. A run loads it once per process; `with_arguments` makes a variant
for other arguments of the chat template.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flash.config.tree import ModelConfig
from flash.environment.calls import call_function
from flash.environment.interface import Spoken
from flash.errors import ConfigError, EnvError, encodable
from flash.foreign.vllm_parsers import Parsers, StreamParser, parser_names
from flash.rollout.episode.chat_template import ChatTemplate, end_of_text, load_tokenizer
from flash.rollout.episode.controls import ControlTokens
from flash.rollout.episode.grammars import Grammars
from flash.sampling import Grammar
from flash.types import (
    ASSISTANT,
    RESERVED_ARGUMENTS,
    Message,
    Observation,
    Piece,
    ResponseForm,
    Tool,
    ToolCall,
)

KEPT_PROMPTS = 64
"""Number of first observations whose tokens are kept. All samples of a group have the same first observation, and their
episodes begin at about the same time."""
KEPT_VARIANTS = 64
"""Number of variants of the tokenizer, with other arguments of the chat template, that are kept. Data sets use few
different arguments; more variants would only fill memory."""
CALL_ID_LETTERS = 9
"""Number of letters and digits of an id that Flash gives to a call. The chat templates of Mistral's models accept no
other number."""
INCOMPLETE = "\ufffd"
"""Character to which an incomplete sequence of UTF-8 bytes is decoded."""


class ResponseReader:
    """Turns the tokens of one response into text while the response is sampled, for an environment that listens to it.

    A piece ends where a character ends: tokens of an incomplete character are held back until the character is
    complete. Text that was returned never changes. All pieces together are the beginning of the text of the response.

    Args:
        decode: returns the text of tokens. If `parsing` is given, the text must contain the special tokens.
        parsing: the parser of this response, which separates reasoning from content and leaves out calls. None: all
            text is content.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], parsing: StreamParser | None = None) -> None:
        self._decode = decode
        self._parsing = parsing
        self._previous: list[int] = []
        """Tokens of the last piece. New tokens are decoded together with them, because the text of a token may depend
        on the token before it, for example whether it begins with a space."""
        self._pending: list[int] = []
        """Tokens whose text has not been returned yet."""

    def add(self, token_ids: Sequence[int]) -> Piece:
        """Return the text that new tokens complete. The piece is empty if they complete no character.

        With `parsing`, the piece has no text of calls, and its reasoning is apart from its content.
        """
        self._pending += token_ids
        # Decode the last piece alone, and together with the new tokens. The second text is longer by the new text.
        previous, text = self._decode(self._previous), self._decode(self._previous + self._pending)
        if len(text) <= len(previous) or text.endswith(INCOMPLETE):
            return Piece()
        self._previous, self._pending = self._pending, []
        if self._parsing is None:
            return Piece(text[len(previous) :])
        reasoning, content = self._parsing.add(text[len(previous) :], self._previous)
        return Piece(content, reasoning)

    def forward_to(self, hear: Callable[[Piece, int], None], prompt_tokens: int) -> Callable[[Sequence[int]], None]:
        """Return a function that takes new tokens and calls `hear` with each piece that has text.

        The function becomes `ResponseRequest.on_tokens`, which the proxy calls while the response is sampled. `hear` is
        a function of the environment: if it raises an error, the returned function raises an EnvError or RewardError.
        `hear` also gets `prompt_tokens`, the number of tokens of the prompt.
        """

        def on_tokens(token_ids: Sequence[int]) -> None:
            """Read new tokens, and call `hear` if they complete any text."""
            piece = self.add(token_ids)
            if piece.content or piece.reasoning:
                call_function("listener to a response", lambda: hear(piece, prompt_tokens))

        return on_tokens


class Tokenizer(Protocol):
    """Interface that turns text into tokens and back. `HfTokenizer` implements it for models.

    A derived class reads a response as plain text unless it overrides `read_response`. The argument `tools` of all
    methods is the list of functions that the prompt offers to the policy.
    """

    slow = False
    """True if large observations take so long that a thread should render them."""

    def with_arguments(self, arguments: Mapping[str, Any]) -> Tokenizer:
        """Return a tokenizer with more arguments for its chat template, and leave this one unchanged.

        Environments may set such arguments for an episode. This base class has no template and returns itself. Raises
        EnvError if the chat template cannot have such an argument.
        """
        return self

    @property
    def min_message_tokens(self) -> int:
        """Lower bound on the tokens that one more message takes. It does not hold for results of tools.

        With this bound `Transcript` refuses conversations of far too many messages without rendering them.
        """
        return 1

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of the first observation, which begin a prompt. Raises EnvError if it cannot be shown."""
        ...

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a later observation, which are appended to a response.

        `end`: the token with which the model ended the response. None if the model did not end it, but a limit or a
        stop text: then the token that ends a turn is missing.

        Raises:
            EnvError: the observation cannot be shown.
        """
        ...

    def ends_turn(self, token: int) -> bool:
        """Return True if a model ends a response with this token. This base class knows no such token."""
        return False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, without special tokens."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone. Clients that ask for log-probs get these texts."""
        return [self.decode([token]) for token in token_ids]

    def check_reads_calls(self) -> None:
        """Check that this tokenizer can read calls of functions from responses, before tools are offered to the policy.

        This base class cannot, so it always raises EnvError. A derived class that can read calls overrides this method.
        """
        raise EnvError(
            f"tools cannot be offered: {type(self).__name__} does not read calls of functions from responses; expected "
            "a tokenizer that does, such as HfTokenizer with model.tool_parser"
        )

    async def grammar(self, form: ResponseForm, tools: Sequence[Tool]) -> Grammar:
        """Return the grammar of the responses that have a form, for engines. Raises EnvError if there is none.

        This base class knows no grammars.
        """
        raise EnvError(f"a response cannot have a form: {type(self).__name__} makes no grammars; expected HfTokenizer")

    def read_response(
        self, token_ids: Sequence[int], stopped: bool, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool
    ) -> Spoken:
        """Return a response as a message. This base class returns all text as content.

        Args:
            token_ids: the tokens of the response.
            stopped: True if the last token of the response is the token with which the model ended it.
            prompt: all tokens before the response.
            tools: functions that the prompt offers.
            calling: True if calls of functions are read; False if they stay part of the text.
        """
        return Spoken(Message(ASSISTANT, self.decode(token_ids)))

    def start_reading(self, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool) -> ResponseReader:
        """Return a reader that turns one response into text while the response is sampled.

        Args:
            prompt: all tokens before the response.
            tools: functions that the prompt offers.
            calling: True if the reader leaves out calls of functions; False if they stay part of the text.
        """
        return ResponseReader(self.decode)


class HfTokenizer(Tokenizer):
    """A Hugging Face tokenizer.

    Chat messages go through the model's chat template. Plain text is encoded unchanged. If the tokenizer begins texts
    with a token such as `<s>`, the first observation begins with this token.

    Args:
        config: names the model's folder or repository, its parsers, and arguments of its chat template.

    Raises:
        ConfigError: the model has no usable tokenizer.
    """

    slow = True

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._path = config.path
        self._prompts: dict[str | bytes, array[int]] = {}
        """Tokens of the last `KEPT_PROMPTS` first observations, oldest first, by the text of the observation or by the
        JSON of its messages and tools."""
        self._arguments = dict(config.chat_template_kwargs)
        """Arguments of the chat template."""
        self._variants: dict[bytes, HfTokenizer] = {}
        """Variants of this tokenizer that `with_arguments` has made, oldest first, by the JSON of their arguments."""
        self._reported: set[str] = set()
        """Warnings that were logged, so that each is logged once. All variants share this set."""
        self.inner: Any = load_tokenizer(config)

    def ready(self) -> HfTokenizer:
        """Load the parsers of responses, which takes seconds, and check the configuration of the tokenizer.

        This is called at the start of a process, so that no episode waits for the parsers or fails because of them.
        Returns this tokenizer.

        Raises:
            ConfigError: a named parser does not exist, or cannot work with this tokenizer; or the tokenizer cannot
                distinguish text from control tokens; or the chat template never reads one of its arguments.
        """
        _ = self._controls, self._parsers
        if unread := self._template.unread(self._arguments):
            known = ", ".join(sorted(self._template.read_arguments)) or "none"
            raise ConfigError(
                f"model.chat_template_kwargs: the chat template of {self._path} never reads {', '.join(unread)}; "
                f"the names that it reads are: {known}"
            )
        return self

    def with_arguments(self, arguments: Mapping[str, Any]) -> HfTokenizer:
        """Return a variant of this tokenizer with more arguments for its chat template.

        The arguments override the arguments of the run. Without arguments the tokenizer itself is returned. A variant
        is kept for the next episode with the same arguments, because it has found out, by slow trials, how the template
        renders messages. An argument that the template never reads is only logged.

        Raises:
            EnvError: an argument is set by Flash itself, or cannot be written as JSON.
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
                raise EnvError(
                    f"chat_template_kwargs must not have {', '.join(taken)}: Flash sets these itself; expected names "
                    "that the model's chat template reads"
                )
            if unread := self._template.unread(arguments):
                self._template.warn_once(
                    f"the chat template of {self._path} never reads {', '.join(unread)}: without effect"
                )
            _ = self._controls, self._grammars  # Make them before the copy, so that all variants share them.
            known = copy(self)
            for name in ("_template", "_parsers", "_turn_ends"):  # these depend on the arguments
                known.__dict__.pop(name, None)
            known._arguments, known._prompts, known._variants = self._arguments | dict(arguments), {}, {}
            self._variants[key] = known
            if len(self._variants) > KEPT_VARIANTS:
                del self._variants[next(iter(self._variants))]
        return known

    # -- observations to tokens --------------------------------------------------------------------------------------

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of the first observation.

        If the last message is from the assistant and has no calls, the policy continues that message. This method may
        run in a thread. The tokens are kept for the other samples of the group, which begin with the same observation.

        Raises:
            EnvError: the model's chat template is missing, refuses the messages, or leaves out a part of them.
        """
        key = observation if isinstance(observation, str) else self._template.cache_key(observation, tools)
        known = self._prompts.get(key)
        if known is None:
            if isinstance(observation, str):
                tokens = self._text_start + self._controls.encode(observation)
            else:  # a chat template writes the beginning of the text itself
                tokens = self._template.prompt(observation, tools)
            known = self._prompts[key] = array("i", tokens)
            for oldest in list(self._prompts)[:-KEPT_PROMPTS]:
                # A thread that renders a large prompt may have removed it already.
                self._prompts.pop(oldest, None)
        return known.tolist()

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a later observation, which are appended to a response as it was sampled.

        `end`: the token with which the model ended the response. None if a limit or a stop text ended it: then the
        result begins with the tokens that end the turn.

        Raises:
            EnvError: the chat template is missing, refuses the messages, leaves out a part of them, or does not show
                the response unchanged.
        """
        if isinstance(observation, str):
            return self._controls.encode(observation, follows=True)
        return self._template.follow(observation, end, tools)

    def prompt_and_answer(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[list[int], list[int]]:
        """Return two lists of tokens for supervised training (`flash sft`): the prompt, and the answer.

        The answer is the last message, and the prompt has all messages before it. Raises EnvError if the template
        cannot show them in a form that can be learned; `ChatTemplate.prompt_and_answer` lists the reasons.
        """
        return self._template.prompt_and_answer(messages, tools)

    @property
    def min_message_tokens(self) -> int:
        """Lower bound on the tokens of one more message that is no result of a tool, found by trials."""
        return self._template.min_message_tokens

    @cached_property
    def _text_start(self) -> list[int]:
        """Tokens that the tokenizer puts before any text; empty if there are none, or if no trial shows them.

        Models such as Gemma and Llama were pretrained with these tokens, and engines also put them before a text.
        """
        if not self.inner.encode(""):  # the tokenizer adds nothing to a text
            return []
        # Texts of the tokenizer's own tokens are tried, because a small vocabulary may not encode any other text.
        for number in range(len(self.inner)):
            text = self.inner.decode([number])
            try:
                tokens = self._controls.encode(text)
            except EnvError:
                continue
            # The tokenizer begins every text with the tokens that stand before `tokens` here.
            whole = list(self.inner.encode(text))
            for at in range(len(whole) - len(tokens) + 1) if tokens else ():
                if whole[at : at + len(tokens)] == tokens:
                    return whole[:at]
        return []

    # -- tokens to text ----------------------------------------------------------------------------------------------

    def check_reads_calls(self) -> None:
        """Raise EnvError if the run configures no parser of calls (`model.tool_parser`), so that none can be read."""
        if self._config.tool_parser is None:
            known = ", ".join(parser_names("tool_parsers"))
            raise EnvError(f"tools need model.tool_parser, the name of vLLM's parser for this model: one of {known}")

    async def grammar(self, form: ResponseForm, tools: Sequence[Tool]) -> Grammar:
        """Return the grammar of the responses that have a form. Raises EnvError if engines cannot enforce the form."""
        return await self._grammars.of(form, tools, self._arguments)

    def read_response(
        self, token_ids: Sequence[int], stopped: bool, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool
    ) -> Spoken:
        """Return a response as a message. `Tokenizer.read_response` describes the arguments.

        If the run names parsers of vLLM, the parsers separate reasoning, content and calls. `Spoken.malformed` is True
        if the response begins a call that the parsers could not read. Without parsers all text is content, without
        special tokens.
        """
        if self._parsers is None:
            return Spoken(Message(ASSISTANT, self.decode(token_ids)))
        # The text includes special tokens but not the token that ended the response, as in vLLM's own server.
        text = self._decode_all(token_ids[: len(token_ids) - stopped])
        found = self._parsers.parse(text, token_ids, prompt, tools, calling=calling)
        calls = tuple(
            # Some parsers make up a random id: an id counts only if the model wrote it. Otherwise the id is computed
            # from the place of the call, so that each reading of the response gives the same id.
            # A model may write the six characters `\ud800` in the JSON of a call. Parsers turn them into one character
            # that UTF-8 cannot encode, and `encodable` turns it into the six characters again.
            ToolCall(id if id and id in text else _call_id(len(prompt), index), encodable(name), encodable(arguments))
            for index, (id, name, arguments) in enumerate(found.calls)
        )
        return Spoken(Message(ASSISTANT, encodable(found.content), encodable(found.reasoning), calls), found.malformed)

    def start_reading(self, prompt: Sequence[int], tools: Sequence[Tool], *, calling: bool) -> ResponseReader:
        """Return a reader that turns one response into text while the response is sampled.

        The reader uses vLLM's parsers if the run names any. `Tokenizer.start_reading` describes the arguments.
        """
        if self._parsers is None:
            return ResponseReader(self.decode)
        return ResponseReader(self._decode_all, self._parsers.begin(prompt, tools, calling=calling))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, without special tokens. Environments get it as the action."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone, special tokens included."""
        return [str(self.inner.decode([token])) for token in token_ids]

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included: vLLM's parsers find reasoning and calls by them."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=False))

    # -- the ends of turns -------------------------------------------------------------------------------------------

    @property
    def end(self) -> list[int]:
        """A list with the end-of-text token; empty if the tokenizer has none."""
        return end_of_text(self.inner)

    @property
    def ends(self) -> list[int]:
        """Tokens that end a response, ascending: the end of text, and the tokens with which the template ends a turn.

        Engines stop at these tokens. Without a usable chat template, the list has only the end of text.
        """
        return sorted(self._turn_ends)

    def ends_turn(self, token: int) -> bool:
        """Return True if a model ends a response with this token, which is then one of `ends`."""
        return token in self._turn_ends

    def add_ends(self, generation: Any) -> list[int]:
        """Add the tokens of `ends` that a model's `generation_config` does not name yet. Return the added tokens.

        `generation`: transformers' `GenerationConfig`, which is changed in place. Engines end a response at the tokens
        that this configuration names. The configuration is exported with a trained model, so that other engines stop at
        the tokens, too.
        """
        named: Any = generation.eos_token_id
        named = [] if named is None else [named] if isinstance(named, int) else list(named)
        missing = [token for token in self.ends if token not in named]
        if missing:
            generation.eos_token_id = [*named, *missing]
        return missing

    def missing_ends(self) -> str:
        """Return a note for the user that names the tokens of `ends` which the model's `generation_config` lacks.

        The start of a run, the dry run and `flash sft` show this note. It is empty if no token is missing, or if the
        model's folder has no readable `config.json` yet, because the run makes the model before it starts
        (`[tiny_model]`).
        """
        from transformers import AutoConfig, GenerationConfig

        local, trusted = Path(self._path).is_dir(), self._config.trust_remote_code
        try:
            generation: Any = GenerationConfig.from_pretrained(self._path, local_files_only=local)
        except OSError:
            try:
                model: Any = AutoConfig.from_pretrained(self._path, local_files_only=local, trust_remote_code=trusted)
            except (OSError, ValueError):
                # The model will be made later. If the file is damaged, loading the model reports this.
                return ""
            generation = GenerationConfig.from_model_config(model)
        if not (missing := self.add_ends(generation)):
            return ""
        texts = " and ".join(map(repr, self.token_texts(missing)))
        return (
            f"the tokenizer of {self._path} ends turns with {texts}, which the model's generation_config does not "
            "name: engines also stop at these tokens, and the exported generation_config names them"
        )

    # -- parts that are made when they are first needed --------------------------------------------------------------

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts of the control tokens. In an observation or an answer they are encoded as ordinary letters."""
        return self._controls.texts

    @cached_property
    def _controls(self) -> ControlTokens:
        """Encoder of all text, shared by all variants. Raises ConfigError if the tokenizer cannot be used for it."""
        return ControlTokens(self.inner, self._path)

    @cached_property
    def _template(self) -> ChatTemplate:
        """Chat template with the arguments of this variant."""
        return ChatTemplate(self.inner, self._controls, self._path, self._arguments, self._reported)

    @cached_property
    def _turn_ends(self) -> frozenset[int]:
        """Set of the tokens of `ends`."""
        try:
            return self._template.turn_ends
        except EnvError:
            return frozenset(self.end)

    @cached_property
    def _grammars(self) -> Grammars:
        """Grammars of the forms that responses may have, shared by all variants."""
        return Grammars(self._config)

    @cached_property
    def _parsers(self) -> Parsers | None:
        """vLLM's parsers of responses, for the arguments of this variant. None if the run names no parser.

        Raises:
            ConfigError: a named parser does not exist, or cannot work with this tokenizer. `ready` finds this first.
        """
        config = self._config
        if config.tool_parser is None and config.reasoning_parser is None:
            return None
        try:
            return Parsers(self.inner, config.tool_parser, config.reasoning_parser, self._arguments)
        except ValueError as error:
            named = (
                f"model.tool_parser = {config.tool_parser!r} and model.reasoning_parser = {config.reasoning_parser!r}"
            )
            raise ConfigError(f"{named} cannot be used with the tokenizer of {self._path}: {error}") from error


def _call_id(position: int, index: int) -> str:
    """Return an id for call number `index`, counted from 0, of the response that begins at a token position.

    Every reading of the response gives the same id.
    """
    return blake2b(f"{position} {index}".encode()).hexdigest()[:CALL_ID_LETTERS]
