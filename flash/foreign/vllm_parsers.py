"""vLLM's parsers of responses: they separate the reasoning, the text, and the calls of functions (tools).

A *reasoning parser* cuts out the text that the model writes before its answer, and a *tool parser* reads calls. Each
has a name, as in `vllm serve --tool-call-parser` and `--reasoning-parser`. `model.tool_parser` and
`model.reasoning_parser` name them.

`flash.rollout.episode.tokenizer.HfTokenizer` has one `Parsers` for its model. Making it imports vLLM, which takes
seconds. `parser_names` lists the parsers without an import, for the check of a configuration.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flash.foreign.grammars import text_tag

TOUCHED = (
    "vllm.tokenizers.hf:get_cached_tokenizer",
    "vllm.parser:ParserManager.get_parser",
    "vllm.parser.abstract_parser:Parser.set_prompt_token_ids",
    "vllm.parser.abstract_parser:Parser.tool_parser",
    "vllm.parser.abstract_parser:Parser.adjust_request",
    "vllm.parser.abstract_parser:Parser.parse",
    "vllm.parser.abstract_parser:Parser.parse_delta",
    "vllm.entrypoints.generate.base.protocol:DeltaMessage.reasoning",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.extract_structured_outputs",
    "vllm.parser.engine.adapters:ParserEngineToolAdapter._parser_engine",
    "vllm.parser.engine.parser_engine:ParserEngine.parser_engine_config",
    "vllm.parser.engine.parser_engine_config:ParserEngineConfig.terminals",
    "vllm.tool_parsers.hermes_tool_parser:Hermes2ProToolParser.tool_call_start_token",
    "vllm.tool_parsers.deepseekv3_tool_parser:DeepSeekV3ToolParser.tool_calls_start_token",
    "vllm.tool_parsers.llama_tool_parser:Llama3JsonToolParser.bot_token",
    "vllm.tool_parsers:_TOOL_PARSERS_TO_REGISTER",
    "vllm.reasoning:_REASONING_PARSERS_TO_REGISTER",
)
"""Attributes of vLLM that this module uses, as `module:Class.attribute`. A test looks for each of them."""

HARMONY = ("openai", "openai_gptoss")
"""Names of the parsers of Harmony, the format of GPT-OSS. If either parser has such a name, vLLM reads the whole
response in this format, from its tokens and not from its text."""

BEGINNINGS = ("tool_call_start_token", "tool_calls_start_token", "bot_token")
"""Names of attributes in which tool parsers have the text with which a call begins."""
TERMINALS = ("TOOL_START", "TOOL_CALLS", "TOOL_SECTION_START")
"""Names of terminals with the same meaning, in tool parsers that are defined by a grammar."""

Package = Literal["tool_parsers", "reasoning"]
"""vLLM's package of tool parsers, or of reasoning parsers."""

_LISTS = {"tool_parsers": "_TOOL_PARSERS_TO_REGISTER", "reasoning": "_REASONING_PARSERS_TO_REGISTER"}
"""Name of the variable in each package that lists its parsers."""


class Called(NamedTuple):
    """A call of a function that a parser has read from a response."""

    id: str
    """Id of the call, which the parser has read or made; empty if there is none."""
    name: str
    """Name of the function."""
    arguments: str
    """Arguments as JSON text, which may be invalid, because the model wrote it."""


class Parsed(NamedTuple):
    """The parts of a response."""

    reasoning: str
    """Text that the model wrote before its answer; empty if there is none."""
    content: str
    """Text of the answer."""
    calls: list[Called]
    """Calls of functions, in their order."""
    malformed: bool
    """True if a call begins in the response but no call could be read, or if the parser has failed. The text of the
    call, or the whole response, is then in the content."""


def parser_names(package: Package) -> list[str]:
    """Return the names of all parsers of a package, sorted; empty if vLLM is not installed. Does not import vLLM.

    Raises:
        LookupError: the installed vLLM lists its parsers in another place or form.
    """
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return []
    file = Path(found.submodule_search_locations[0], package, "__init__.py")
    source = file.read_text(encoding="utf-8") if file.is_file() else ""  # other versions of vLLM have other packages
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == _LISTS[package]:
                return sorted(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
            case _:
                pass
    raise LookupError(
        f"the installed vLLM lists its parsers (`{package}`) in another place: adapt flash/foreign/vllm_parsers.py"
    )


class Parsers:
    """The parsers of one model. They keep no state between responses, so all episodes use one object.

    At least one of `tool` and `reasoning` is given: a model without parsers needs no object of this class.

    Args:
        tokenizer: the model's Hugging Face tokenizer.
        tool: name of the tool parser; None if calls are not read.
        reasoning: name of the reasoning parser; None if the reasoning is not cut out.
        arguments: arguments of the chat template. Some parsers read from them if the model reasons.

    Raises:
        ValueError: a parser does not exist, or cannot work with the tokenizer.
    """

    def __init__(
        self, tokenizer: Any, tool: str | None, reasoning: str | None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        assert tool is not None or reasoning is not None
        # Parsers log a traceback for each malformed call, and a model in training writes many of them. These levels
        # hold for the whole process.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
        # This copy caches values that parsers read for each response, such as the whole vocabulary.
        self._tokenizer: Any = get_cached_tokenizer(tokenizer)
        self._request_class: Any = ChatCompletionRequest
        self._arguments = dict(arguments or {})
        self._tool = tool
        try:
            parser_class: Any = ParserManager.get_parser(
                tool,
                reasoning,
                enable_auto_tools=tool is not None,
                is_harmony=tool in HARMONY or reasoning in HARMONY,
                tokenizer=self._tokenizer,
            )
        except Exception as error:  # parsers are written by many authors, and raise errors of any type
            raise ValueError(str(error)) from error
        self._parser_class = parser_class

    def parse(
        self,
        text: str,
        token_ids: Sequence[int],
        prompt: Sequence[int],
        tools: Sequence[dict[str, Any]],
        *,
        calling: bool,
    ) -> Parsed:
        """Return the parts of a complete response. The episode calls this once for each response to chat messages.

        Args:
            text: text of the response with special tokens, but without the token that ended it.
            token_ids: tokens of the response.
            prompt: all tokens before the response.
            tools: functions that may be called, as JSON schemas.
            calling: True if calls are read; False if they stay part of the content.
        """
        parser, request = self._parser(prompt, tools, calling=calling)
        try:
            reasoning, content, calls = parser.parse(
                text, request, enable_auto_tools=bool(tools), model_output_token_ids=list(token_ids)
            )
        except Exception:  # a model may write anything, and some parsers then raise errors of any type
            return Parsed("", text, [], malformed=True)
        called = [Called(call.id or "", call.name, call.arguments) for call in calls or () if tools and calling]
        # Parsers do not say that they could not read a call, so the text is searched for the beginning of one.
        malformed = bool(tools) and calling and not called and any(mark in text for mark in _beginnings(parser))
        return Parsed(reasoning or "", content or "", called, malformed)

    def tag(
        self, schema: dict[str, Any] | None, tools: Sequence[dict[str, Any]], *, call: str | None, single: bool
    ) -> str:
        """Return the structural tag of the texts that these parsers read as answers of a form (`ResponseForm`).

        Args:
            schema: JSON schema of the content; None: free text, or no text.
            tools: functions that may be called.
            call: name of the function that must be called, or "required" for any of them, "auto" if the answer may
                also be text, None if calls are not read.
            single: True if at most one function may be called.

        Raises:
            ValueError: a call cannot be forced in the format that the tool parser reads; or the form is invalid.
        """
        choice: Any = call or "none"
        if choice not in ("auto", "none", "required"):
            choice = {"type": "function", "function": {"name": call}}
        fields: dict[str, Any] = {"messages": [], "chat_template_kwargs": self._arguments}
        if schema is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        if tools:
            # vLLM enforces the schema of a function's arguments only if the function is strict.
            strict = [{**tool, "function": _with_parameters(tool["function"])} for tool in tools]
            fields |= {"tools": strict, "tool_choice": choice, "parallel_tool_calls": not single}
        try:
            request = self._request_class(**fields)
            parser = self._parser_class(self._tokenizer, request.tools, chat_template_kwargs=self._arguments)
            wanted = parser.adjust_request(request).extract_structured_outputs()
        except Exception as error:  # parsers are written by many authors, and raise errors of any type
            raise ValueError(str(error)) from error
        if wanted is not None and wanted.structural_tag is not None:
            return wanted.structural_tag
        if (tools and call is not None) or schema is None:
            # vLLM would forbid calls, or force JSON that the tool parser does not read as a call.
            raise ValueError(
                f"vLLM cannot write calls under a grammar in the format of model.tool_parser = {self._tool!r}"
            )
        return text_tag(schema)

    def begin(self, prompt: Sequence[int], tools: Sequence[dict[str, Any]], *, calling: bool) -> StreamParser:
        """Return a parser for a response whose pieces a user hears while it is sampled. Called when the response
        begins.

        `prompt`, `tools` and `calling` are described at `parse`.
        """
        return StreamParser(*self._parser(prompt, tools, calling=calling), prompt)

    def _parser(self, prompt: Sequence[int], tools: Sequence[dict[str, Any]], *, calling: bool) -> tuple[Any, Any]:
        """Return a new parser of vLLM for one response, and the chat request that its methods expect as an argument.

        The request only says which functions may be called, and if calls are read.
        """
        fields: dict[str, Any] = {"messages": [], "chat_template_kwargs": self._arguments}
        if tools:
            fields |= {"tools": list(tools), "tool_choice": "auto" if calling else "none"}
        request = self._request_class(**fields)
        parser = self._parser_class(self._tokenizer, request.tools, chat_template_kwargs=self._arguments)
        parser.set_prompt_token_ids(list(prompt))
        return parser, request


def _with_parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a function whose arguments must follow their schema: an object, if it has none."""
    return {**function, "parameters": function.get("parameters") or {"type": "object"}, "strict": True}


class StreamParser:
    """Parser of one response while it is sampled, so that a user can read the text at once.

    Text that may become a call is held back. `Parsers.parse` reads the calls when the response is complete.
    `Parsers.begin` makes the object.

    Args:
        parser: vLLM's parser of this response.
        request: the chat request that the parser's methods expect as an argument.
        prompt: all tokens before the response.
    """

    def __init__(self, parser: Any, request: Any, prompt: Sequence[int]) -> None:
        self._parser: Any = parser
        """vLLM's parser; None after it has raised an error."""
        self._request: Any = request
        self._prompt: list[int] | None = list(prompt)
        """Tokens before the response; None after the first piece, because vLLM's parser takes them only there."""

    def add(self, text: str, token_ids: Sequence[int]) -> tuple[str, str]:
        """Return the reasoning and the content in the next piece of the response. Called for each piece, in order.

        `text`: text of the piece, with special tokens; `token_ids`: its tokens. After an error of vLLM's parser, the
        rest of the response gives empty texts.
        """
        if self._parser is None:
            return "", ""
        prompt, self._prompt = self._prompt, None
        try:
            delta = self._parser.parse_delta(text, list(token_ids), self._request, prompt, finished=False)
        except Exception:  # a model may write anything, and some parsers then raise errors of any type
            self._parser = None
            return "", ""
        return ("", "") if delta is None else (delta.reasoning or "", delta.content or "")


def _beginnings(parser: Any) -> list[str]:
    """Return the texts with which a call may begin.

    Empty if the tool parser has them in no attribute that is known here. `parser` is vLLM's parser of a response.
    """
    tool = parser.tool_parser
    marks = [getattr(tool, name, None) for name in BEGINNINGS]
    engine = getattr(tool, "_parser_engine", None)
    if engine is not None:
        terminals = engine.parser_engine_config.terminals
        marks += [terminals.get(name) for name in TERMINALS]
    return [mark for mark in marks if isinstance(mark, str) and mark]
