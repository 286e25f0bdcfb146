"""Grammars: the forms that responses must have, checked and replayed with vLLM's own functions.

A *structural tag* describes all texts that a response may have, as JSON for the package xgrammar. `text_tag` and
`flash.foreign.vllm_parsers.Parsers.tag` make it, and vLLM's engine core (the process that schedules steps) forbids each
token that does not lead to such a text. xgrammar ignores some keywords of JSON schemas, so `schema_fault` finds them.

The trainer must know which tokens were not forbidden. The engine does not report them, so `GrammarReplay` computes them
once more in the node loop, with the same code of vLLM, from the sampled tokens. The result depends on nothing else.

A response that moves to another engine continues there after its own tokens. vLLM's grammar would begin anew, so
`continue_grammars` lets a core advance it first. vLLM is imported inside the functions.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from fractions import Fraction
from functools import cache, partial
from math import ceil, floor, isfinite
from typing import Any

import anyio
import anyio.to_thread

TOUCHED = (
    "vllm.v1.structured_output:StructuredOutputManager.grammar_init",
    "vllm.v1.structured_output:StructuredOutputManager.accept_tokens",
    "vllm.v1.structured_output:StructuredOutputManager._create_grammar",
    "vllm.v1.structured_output:StructuredOutputManager._get_constraint_bounds",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.__post_init__",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.allocate_token_bitmask",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar.fill_bitmask",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar.is_terminated",
    "vllm.v1.structured_output.request:StructuredOutputRequest._grammar",
    "vllm.v1.structured_output.request:StructuredOutputRequest.params",
    "vllm.v1.structured_output.request:StructuredOutputRequest.reasoner",
    "vllm.v1.structured_output.request:StructuredOutputRequest.reasoning_ended",
    "vllm.v1.request:Request.structured_output_request",
    "vllm.v1.request:Request.append_output_token_ids",
    "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
    "vllm.sampling_params:SamplingParams._validate_structured_outputs",
    "vllm.sampling_params:StructuredOutputsParams._backend",
)
"""Attributes of vLLM that this module uses, as `module:Class.attribute`. A test looks for each of them."""

GENERATED = "flash_generated"
"""Name of a request's extra argument: the number of tokens at the end of its prompt that belong to its response."""

# -- schemas ---------------------------------------------------------------------------------------------------------

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
"""Types of JSON schemas."""
JSON_NAMES = {dict: "an object", list: "an array", str: "a string"}
"""Names of the types of JSON values, for error messages."""
NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values have a schema for each name."""
LISTED_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose values are lists of schemas."""
PARTS = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
"""Keywords whose values are schemas."""
UNENFORCED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf"),
        *("dependentRequired", "dependentSchemas", "dependencies", "additionalItems", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords of JSON schemas that xgrammar ignores."""
WHOLE_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that describe a value completely: xgrammar uses the first of them, and ignores other keywords beside it."""
TYPED = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
"""Keywords that describe the values of one type."""
FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
        *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
"""Formats of strings that xgrammar enforces. It ignores all others."""
LOOKS_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
"""Beginnings of the parts of a regular expression that xgrammar ignores."""
CHARACTERS = re.compile(
    r"\[(?P<set>(?:\\.|[^\]\\])*)\]"
    r"|\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\u\{(?P<long>[0-9a-fA-F]+)\}|\\?.",
    re.DOTALL,
)
"""Part of a regular expression: a set of characters in brackets, or one character, which may be escaped."""
UNSAFE = ('"', '\\"', "\\\\", "\\n", "\\t", "\\r", "\\f", "\\v", "\\0", "\\c")
"""Beginnings of the parts of regular expressions that stand for a quotation mark, a backslash or a control character.
Strings in JSON escape them, but xgrammar writes them as they are."""
MOST_LETTERS = 1 << 15
"""Largest number of letters in the names of properties and in the values of `enum` and `const` of a schema. xgrammar
takes minutes for some 60,000 of them, and all other forms of the engine wait meanwhile."""
COMPILED = 1000
"""Number of different grammars after which a compiler is replaced. Its cache is bounded, but xgrammar also keeps some
40 kB of each grammar in the compiler for ever."""
SLOW_S = 0.01
"""Seconds of a call of `GrammarReplay.masks` after which later calls run in a thread. Most take a millisecond."""
CACHE_BYTES = 64 << 20
"""Size of the cache of a `TagChecker`, which makes the parts that grammars have in common only once."""
DIGITS = 6
"""Number of digits after the point of the numbers that xgrammar writes between two limits."""


def schema_fault(schema: dict[str, Any]) -> str | None:
    """Return why engines cannot enforce a JSON schema, as a sentence without a final dot; None if they can.

    The sentence names the part of the schema by a path such as `$.properties.name`. The check of a `ResponseForm` calls
    this, because engines would sample texts that break the schema.
    """
    parts: list[tuple[object, str]] = [(schema, "$")]  # schemas to examine, each with its path
    letters = 0
    while parts:
        part, place = parts.pop()
        if isinstance(part, bool):  # true permits all values, and false none
            continue
        if not isinstance(part, dict):
            return f"{place} is not a JSON schema: expected an object"
        if (fault := next(_faults(part, schema), None)) is not None:
            return f"{place} {fault}"
        if _is_circular(part, schema):
            return f"{place} has references that lead in a circle, so no value can follow it"
        fixed = [*part.get("properties", ()), *part.get("enum", ()), part.get("const", "")]
        letters += sum(len(value if isinstance(value, str) else repr(value)) for value in fixed)
        if letters > MOST_LETTERS:
            return f"{place} is too large: names and fixed values of a schema may have {MOST_LETTERS:,} letters in all"
        for keyword in NAMED_PARTS:
            parts += [(each, f"{place}.{keyword}.{name}") for name, each in part.get(keyword, {}).items()]
        for keyword in LISTED_PARTS:
            parts += [(each, f"{place}.{keyword}[{number}]") for number, each in enumerate(part.get(keyword, ()))]
        parts += [(part[keyword], f"{place}.{keyword}") for keyword in PARTS if keyword in part]
    return None


def _faults(schema: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of one object of the schema `whole`, without those of its parts. Each begins with a verb.

    The caller takes only the first fault, so later checks may assume the forms that earlier ones have found right.
    """
    keys = set(schema)
    # Keywords by the type of JSON value that they must have.
    kinds = {dict: NAMED_PARTS, list: (*LISTED_PARTS, "enum", "required"), str: ("$ref", "pattern", "format")}
    for kind, keywords in kinds.items():
        for keyword in keywords:
            if not isinstance(schema.get(keyword, kind()), kind):
                yield f"has `{keyword}` with a value that is not {JSON_NAMES[kind]}"
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(each in TYPES for each in types):
        yield f"has a `type` that is none of {', '.join(TYPES)}"
    for keyword in sorted(UNENFORCED & keys):
        if schema[keyword] is not False:  # `"uniqueItems": false` asks for nothing
            yield f"has the keyword `{keyword}`, which engines cannot enforce"
    for keyword in ("type", "enum", "anyOf", "oneOf", "allOf"):
        if schema.get(keyword) == []:
            yield f"has an empty `{keyword}`: expected at least one entry"
    typed = [keyword for keywords in TYPED.values() for keyword in keywords if keyword in keys]
    for keyword in WHOLE_FORMS:
        if keyword in keys and (beside := [*typed, *(other for other in WHOLE_FORMS if other in keys - {keyword})]):
            yield f"has `{keyword}` together with `{beside[0]}`: engines enforce only one of the two"
    # Beside these keywords xgrammar ignores the type, so the type must say nothing new.
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in keys else [])]
    if types and not all(any(_has_type(value, kind) for kind in types) for value in values):
        yield "has a value that is not of its `type`: engines enforce only the list of values"
    for keyword in ("$ref", "anyOf", "oneOf", "allOf"):
        parts = [schema] if keyword == "$ref" else schema.get(keyword, [])
        if types and keyword in keys and not all(_allows_only(types, each, whole) for each in parts):
            yield f"has `{keyword}` together with `type`: engines enforce only `{keyword}`"
    for kind, keywords in TYPED.items():
        named = kind in types or (kind == "number" and "integer" in types)
        if not named and (untyped := [keyword for keyword in keywords if keyword in keys]):
            yield f'has `{untyped[0]}` without "type": "{kind}": engines enforce it only for this type'
    if not schema.get("$ref", "#").startswith("#"):
        yield f"refers to another document, {schema['$ref']!r}: expected a reference that begins with #"
    if len(schema.get("allOf", ())) > 1:
        yield "has `allOf` with several schemas: engines enforce only one"
    if "format" in keys and schema["format"] not in FORMATS:
        yield f"has the format {schema['format']!r}: engines enforce {', '.join(sorted(FORMATS))}"
    lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in keys]
    for keyword in ("pattern", "format"):
        if keyword in keys and lengths:
            yield f"has `{keyword}` together with `{lengths[0]}`: engines enforce only one of the two"
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", {})):
        if any(beginning in pattern for beginning in LOOKS_AROUND):
            yield "has a `pattern` that looks ahead or behind, which engines cannot enforce"
        if _is_unsafe(pattern):
            yield "has a `pattern` with a quotation mark, backslash or control character, which engines do not escape"
    if _is_narrow(schema):
        yield f"allows only numbers with more than {DIGITS} digits after the point, which engines do not write"
    required = schema.get("required", ())
    if missing := [name for name in required if not isinstance(name, str) or name not in schema.get("properties", {})]:
        yield f"requires {missing[0]!r}, which is not in its `properties`: engines enforce only names that are there"
    # xgrammar counts a property twice if the text has its name twice.
    if schema.get("minProperties", 0) not in (0, 1) and any(
        schema.get(keyword, False) is not False
        for keyword in ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
    ):
        yield "has `minProperties` beside properties of any name, which a text may repeat"
    patterns = schema.get("patternProperties", {})
    if len(patterns) > 1 or (patterns and "properties" in keys):
        yield "has `patternProperties` beside other properties: engines enforce only one of them"
    if "propertyNames" in keys and keys & {"properties", "patternProperties"}:
        yield "has `propertyNames` beside other properties: engines enforce only one of them"


def _has_type(value: Any, kind: str) -> bool:
    """Return True if a JSON value has a type of `TYPES`."""
    if kind in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or value == value // 1)
    classes = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, classes[kind])


def _target(reference: str, whole: dict[str, Any]) -> Any:
    """Return the part of the schema `whole` that a reference such as `#/$defs/name` names; None if there is none."""
    part: Any = whole
    for name in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        part = part.get(name) if isinstance(part, dict) else None
    return part


def _allows_only(types: list[str], part: Any, whole: dict[str, Any]) -> bool:
    """Return True if a part of the schema `whole` certainly allows only values of some types."""
    if isinstance(part, dict) and isinstance(part.get("$ref"), str):
        part = _target(part["$ref"], whole)
    if not isinstance(part, dict):
        return False
    values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    if values:
        return all(any(_has_type(value, kind) for kind in types) for value in values)
    own = part.get("type", [])
    own = [own] if isinstance(own, str) else own
    return bool(own) and all(each in types or (each == "integer" and "number" in types) for each in own)


def _is_circular(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Return True if a part of the schema `whole` is only a reference, and its references lead in a circle.

    A reference that names no part is no circle: xgrammar refuses it with an error message of its own.
    """
    seen = list[dict[str, Any]]()
    each: Any = part
    while isinstance(each, dict):
        if any(each is other for other in seen):
            return True
        seen.append(each)
        if isinstance(each.get("$ref"), str):
            each = _target(each["$ref"], whole)
        else:
            only = [each[keyword] for keyword in LISTED_PARTS[:3] if isinstance(each.get(keyword), list)]
            each = only[0][0] if only and len(only[0]) == 1 else None
    return False


def _is_unsafe(pattern: str) -> bool:
    """Return True if a regular expression names a character that strings in JSON escape.

    xgrammar removes such characters from a set of several characters, so these are safe.
    """
    for part in CHARACTERS.finditer(pattern):
        if part["set"] is not None:
            one = CHARACTERS.fullmatch(part["set"])
            if one is None:
                continue
            part = one
        code = part["x"] or part["u"] or part["long"]
        letter = part[0] if code is None else chr(min(int(code, 16), 127))
        if letter.startswith(UNSAFE) or letter < " ":
            return True
    return False


def _is_narrow(schema: dict[str, Any]) -> bool:
    """Return True if the limits of a number leave no number with `DIGITS` digits after the point."""
    keywords = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    limits = {keyword: schema[keyword] for keyword in keywords if keyword in schema}
    if not all(_has_type(limit, "number") and isfinite(limit) for limit in limits.values()):
        return False  # xgrammar refuses these limits itself
    scaled = {keyword: Fraction(repr(limit)) * 10**DIGITS for keyword, limit in limits.items()}
    least = [ceil(scaled["minimum"])] if "minimum" in scaled else []
    least += [floor(scaled["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in scaled else []
    most = [floor(scaled["maximum"])] if "maximum" in scaled else []
    most += [ceil(scaled["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in scaled else []
    return bool(least and most) and max(least) > min(most)


# -- structural tags -------------------------------------------------------------------------------------------------


def text_tag(schema: dict[str, Any]) -> str:
    """Return the structural tag of the JSON texts that follow a schema, for a response without calls of functions."""
    return json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})


class TagChecker:
    """Checks structural tags by doing all that engines do with them before they sample.

    Args:
        tokenizer: the model's Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self._compiler: Any = None
        self._compiled = COMPILED
        """Number of tags that `_compiler` has compiled."""
        try:
            self._vocabulary: Any = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        except ValueError:
            # vLLM has adapters of its own for some kinds of tokenizers that xgrammar does not know.
            self._vocabulary = None

    def check(self, tag: str) -> None:
        """Check a structural tag. This may take any time and memory.

        Raises:
            ValueError: no engine can sample under the tag, for example because a reference is missing.
            Exception: any error of xgrammar while it compiles the tag.
        """
        import xgrammar
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

        try:
            validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag)))
        except (ValueError, VLLMClientError) as error:
            # xgrammar's own message, if it has one, names the fault.
            raise ValueError(str(error.__cause__ or error)) from error
        if self._vocabulary is None:
            return
        if self._compiled == COMPILED:
            self._compiler = xgrammar.GrammarCompiler(self._vocabulary, cache_limit_bytes=CACHE_BYTES)
            self._compiled = 0
        self._compiled += 1
        self._compiler.compile_structural_tag(tag)


@cache
def parameters_of_checked_grammars() -> Any:
    """Return a class of vLLM's sampling parameters whose grammar is not checked again. `flash.foreign.vllm` uses it.

    vLLM would check the grammar for each request, on the event loop, which may take seconds. A `TagChecker` in another
    process has checked it already.
    """
    from vllm.sampling_params import SamplingParams

    class Checked(SamplingParams):
        """Sampling parameters that vLLM accepts with any grammar."""

        def _validate_structured_outputs(
            self, model_config: Any, structured_outputs_config: Any, tokenizer: Any
        ) -> None:
            """Name the package that enforces the grammar. Replaces the method of vLLM that also checks the grammar."""
            grammar: Any = self.structured_outputs
            grammar._backend = "xgrammar"

    return Checked


def bound_memory(manager: Any, request: Any) -> None:
    """Give a manager of grammars a new compiler after `COMPILED` different grammars. Called before one is made.

    `manager`: vLLM's manager; `request`: vLLM's request, whose grammar is made next.
    """
    tags = manager.__dict__.setdefault("flash_tags", set[int]())
    tags.add(hash(request.structured_output_request.params.structural_tag))
    if len(tags) > COMPILED and manager.backend is not None:
        tags.clear()
        # The method of vLLM makes the compiler. Threads that compile now keep the old one until they end.
        manager.backend.__post_init__()


# -- replays ---------------------------------------------------------------------------------------------------------


class GrammarReplays:
    """Makes the replays of one engine's responses, in threads, because loading the tokenizer takes seconds."""

    def __init__(self) -> None:
        self._manager: Any = None
        """vLLM's manager of grammars, with the settings of the engine; None before the first replay."""
        self._making = anyio.Lock()
        """Lock held while a replay is made. The first one makes the manager and its compiler."""

    async def begin(
        self, llm: Any, parameters: Any, prompt: Sequence[int], generated: int, reasoning: dict[str, Any]
    ) -> GrammarReplay:
        """Return the replay of a response that the engine `llm`, an AsyncLLM, has just been asked for.

        `GrammarReplay` describes the other arguments and the errors.
        """
        from vllm.v1.structured_output import StructuredOutputManager

        # The calls have their own limiter, because an environment's calls may occupy all threads of the default one.
        own = anyio.CapacityLimiter(1)
        async with self._making:
            if self._manager is None:
                self._manager = await anyio.to_thread.run_sync(
                    partial(StructuredOutputManager, llm.vllm_config), limiter=own
                )
            return await anyio.to_thread.run_sync(
                partial(GrammarReplay, self._manager, parameters, prompt, generated, reasoning), limiter=own
            )


class GrammarReplay:
    """Replay of one response that is sampled under a grammar. It finds the tokens that could have been drawn.

    Making it compiles the grammar, which may take a second the first time.

    Args:
        manager: vLLM's manager of grammars, with the settings of the engine.
        parameters: vLLM's parameters of the request, after the request was added to the engine.
        prompt: tokens before the response, with the `generated` tokens.
        generated: number of tokens at the end of `prompt` that other engines have sampled for the response.
        reasoning: vLLM's arguments about the reasoning, from `reasoning_arguments`.

    Raises:
        RuntimeError: the grammar cannot be compiled.
    """

    def __init__(
        self, manager: Any, parameters: Any, prompt: Sequence[int], generated: int, reasoning: dict[str, Any]
    ) -> None:
        begin = list(prompt[: len(prompt) - generated])  # the prompt as it was before the first token of the response
        self._manager = manager
        self._request = _new_request(parameters, begin, reasoning)
        bound_memory(manager, self._request)
        manager.grammar_init(self._request)
        state = self._request.structured_output_request
        if isinstance(state._grammar, Future):  # vLLM compiles the grammar in a thread of its own
            wait([state._grammar])
        if isinstance(state.grammar, Exception):
            raise state.grammar
        self._grammar = state.grammar
        self._bits = manager.backend.allocate_token_bitmask(1)
        self._known: dict[bytes, bytes] = {}
        """Masks so far. Equal masks are one object, because a mask of a large vocabulary has many kilobytes."""
        self._slow = False
        """True if a call of `masks` took long."""
        _advance(manager, self._request, prompt[len(begin) :])

    async def masks(self, token_ids: Sequence[int]) -> list[bytes | None]:
        """Return the mask of each of the next sampled tokens: bit i is 1 if token i could have been drawn.

        None stands for the whole vocabulary, for example before the grammar begins. After a call that took long, the
        masks are computed in a thread, because a few grammars take milliseconds for each token.

        Raises:
            RuntimeError: a token is forbidden. This happens if a model begins a call in its reasoning, which ends the
                reasoning, while only a text is allowed. The engine then ends the response with an error, too.
        """
        if self._slow:
            own = anyio.CapacityLimiter(1)
            return await anyio.to_thread.run_sync(self._compute, token_ids, limiter=own)
        begun = time.perf_counter()
        masks = self._compute(token_ids)
        self._slow = time.perf_counter() - begun > SLOW_S
        return masks

    def _compute(self, token_ids: Sequence[int]) -> list[bytes | None]:
        """Compute the results of `masks`. Raises the errors of `masks`."""
        masks: list[bytes | None] = []
        for token in token_ids:
            # vLLM asks in the same way which of the next tokens are constrained. Here there is one next token, number
            # 0. It is not constrained before the reasoning has ended.
            bounds = self._manager._get_constraint_bounds(self._request, ())
            mask = None
            if bounds.constraint_start == 0 and not self._grammar.is_terminated():
                self._grammar.fill_bitmask(self._bits, 0)
                mask = self._bits.numpy().tobytes()
                mask = self._known.setdefault(mask, mask)
            masks.append(mask)
            _advance(self._manager, self._request, [token])
        return masks


def reasoning_arguments(template: dict[str, Any] | None) -> dict[str, Any]:
    """Return vLLM's arguments that say if a request waits for the end of the reasoning before its grammar begins.

    `template`: arguments of the chat template, from which the parser of reasoning finds out if the model reasons. None:
    the grammar holds from the first token.
    """
    if template is None:
        return {"reasoning_ended": True}
    return {"reasoning_parser_kwargs": {"chat_template_kwargs": template}}


def continue_grammars() -> None:
    """Let this engine core (process) continue the grammar of a request after the tokens that other engines have sampled
    for it, and bound the memory of its compiler.

    Called once, when a core begins. The request's extra argument `GENERATED` says how many tokens at the end of the
    prompt these are. Replaces a method of vLLM for the rest of the process.
    """
    from vllm.v1.structured_output import StructuredOutputManager

    manager_class: Any = StructuredOutputManager
    create = manager_class._create_grammar

    def create_and_advance(manager: Any, request: Any) -> Any:
        """Create the grammar of a request as vLLM does, and advance it. vLLM calls this in a thread."""
        bound_memory(manager, request)
        grammar = create(manager, request)
        generated = (request.sampling_params.extra_args or {}).get(GENERATED, 0)
        if generated:
            state, tokens = request.structured_output_request, request.prompt_token_ids
            reasoning = {
                "reasoning_ended": state.reasoning_ended,
                "reasoning_parser_kwargs": state.reasoning_parser_kwargs,
            }
            # The end of the reasoning is searched for in the prompt and then in the response, as on the first engine.
            begun = _new_request(request.sampling_params, tokens[:-generated], reasoning)
            begun.structured_output_request.grammar = grammar
            _advance(manager, begun, tokens[-generated:])
            state.reasoner = begun.structured_output_request.reasoner
            state.reasoning_ended = begun.structured_output_request.reasoning_ended
        return grammar

    manager_class._create_grammar = create_and_advance


def _new_request(parameters: Any, prompt: list[int], reasoning: dict[str, Any]) -> Any:
    """Return vLLM's object of a request that has sampled no token yet, for the functions of a manager.

    `parameters`: vLLM's sampling parameters; `prompt`: tokens of the prompt; `reasoning`: arguments from
    `reasoning_arguments`.
    """
    from vllm.v1.request import Request

    return Request("replay", prompt, parameters, None, **reasoning)


def _advance(manager: Any, request: Any, token_ids: Sequence[int]) -> None:
    """Append sampled tokens to a request, as vLLM's scheduler does. Raises RuntimeError if one is forbidden."""
    for token in token_ids:
        # With the first call vLLM finds out if the prompt ends the reasoning, before a token is appended.
        manager._get_constraint_bounds(request, ())
        request.append_output_token_ids(token)
        if not manager.accept_tokens(request, [token]):
            raise RuntimeError(f"token {token} is forbidden by the grammar under which it was sampled")
