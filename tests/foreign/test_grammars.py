"""Forms of responses: schemas that are refused, and grammars whose texts vLLM's parsers read as they should."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from flash.config.tree import ModelConfig
from flash.errors import EnvError
from flash.foreign.grammars import COMPILED, bound_memory, schema_fault
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.sampling import Grammar
from flash.types import ANY_CALL, ResponseForm, Tool
from tests.envs.forms import FORMS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["km", "m"]}, "far": {"type": "boolean"}, "at": {"$ref": "#/$defs/at"}},
    "required": ["unit", "far", "at"],
    "additionalProperties": False,
    "$defs": {"at": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2}},
}
GO: Tool = {"type": "function", "function": {"name": "go", "description": "Goes.", "parameters": SCHEMA}}
NOW = {"type": "object", "properties": {"now": {"type": "boolean"}}, "additionalProperties": False}
STOP: Tool = {"type": "function", "function": {"name": "stop", "parameters": NOW}}


def nested(levels: int, format: str = "date") -> dict[str, Any]:
    """Return the schema of lists in each other, with a string of a format inside."""
    schema: dict[str, Any] = {"type": "string", "format": format}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}, "$.properties.n has the"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "$ has the keyword `uniqueItems`"),
        ({"not": {"type": "string"}}, "$ has the keyword `not`"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "format": "colour"}]}, "$.anyOf[1] has the format 'colour'"),
        ({"type": "string", "pattern": "^(?!a)"}, "$ has a `pattern` that looks ahead"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "$ has `pattern` together with `minLength`"),
        ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "$ has `allOf` with several schemas"),
        ({"$ref": "other.json#/a"}, "$ refers to another document"),
        ({"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]}, "$ has `anyOf` together with"),
        ({"minimum": 3}, '$ has `minimum` without "type": "number"'),
        ({"type": "no"}, "$ has a `type` that is none of"),
        ({"type": [[]]}, "$ has a `type` that is none of"),
        ({"type": "object", "properties": [5]}, "$ has `properties` with a value that is not an object"),
        ({"anyOf": [5]}, "$.anyOf[0] is not a JSON schema"),
        ({"anyOf": []}, "$ has an empty `anyOf`"),
        ({"type": []}, "$ has an empty `type`"),
        ({"type": "object", "properties": {"a": {"enum": []}}}, "$.properties.a has an empty `enum`"),
        ({"type": "object", "required": ["a"]}, "$ requires 'a', which is not in its `properties`"),
        ({"type": "object", "properties": {}, "required": [[]]}, "$ requires [], which is not in"),
        ({"type": "object", "minProperties": 2, "additionalProperties": {}}, "$ has `minProperties` beside"),
        ({"type": "string", "enum": ["a", None]}, "$ has a value that is not of its `type`"),
        ({"type": "string", "const": 1}, "$ has a value that is not of its `type`"),
        ({"type": "object", "anyOf": [{"type": "string"}]}, "$ has `anyOf` together with `type`"),
        ({"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, "$ has `$ref` together with `type`"),
        ({"type": "string", "pattern": '^"'}, "$ has a `pattern` with a quotation mark"),
        ({"type": "string", "pattern": r"a\\b"}, "$ has a `pattern` with a quotation mark"),
        ({"type": "string", "pattern": r"[\n]"}, "$ has a `pattern` with a quotation mark"),
        ({"type": "object", "patternProperties": {r"\x22": {}}}, "$ has a `pattern` with a quotation mark"),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "$ allows only numbers with more than 6 digits"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "$ allows only numbers with more than 6 digits"),
        ({"$ref": "#"}, "$ has references that lead in a circle"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "$.$defs.a has references that lead in a circle"),
        ({"anyOf": [{"const": "a" * 20_000}, {"enum": ["b" * 20_000]}]}, "$.anyOf[0] is too large"),
        ({"type": "object", "properties": {"a" * 40_000: {}}}, "$ is too large"),
        (SCHEMA, None),
        ({"enum": ["a" * 30_000], "description": "b" * 99_000}, None),
        ({"type": ["string", "null"], "enum": ["a", None]}, None),
        ({"type": "object", "oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object"}}}, None),
        ({"type": "string", "pattern": r"^[^\"\\\n][\s\S]\/\d+\.$"}, None),
        ({"type": "number", "minimum": 1e-8, "exclusiveMaximum": 1}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}, None),
        ({"type": "object", "properties": {"not": {"type": ["integer", "null"], "minimum": 3}}}, None),
        ({"type": "array", "items": True, "uniqueItems": False, "title": "x", "default": []}, None),
    ],
)
def test_a_schema_that_engines_would_ignore_in_part_is_refused_with_the_place(
    schema: dict[str, Any], fault: str | None
) -> None:
    found = schema_fault(schema)
    assert found == fault if fault is None else (found or "").startswith(fault)


def test_a_deep_schema_is_searched_to_the_bottom() -> None:
    assert "format 'colour'" in (schema_fault(nested(3000, "colour")) or "")


def tokenizer_of(name: str, folder: Path, *, reasoning: bool = False) -> HfTokenizer:
    """Return a tokenizer with the chat template and tool parser of a family of models, which is saved in `folder`.

    `name`: key of `FORMS`; `reasoning`: True to use the family's parser of reasoning, too.
    """
    form = FORMS[name]
    parser = form.reasoning_parser if reasoning else None
    return HfTokenizer(ModelConfig(path=form.save(folder), tool_parser=form.tool_parser, reasoning_parser=parser))


def grammar_of(tokenizer: HfTokenizer, form: ResponseForm, tools: list[Tool]) -> Grammar:
    """Return the grammar of a form."""
    return anyio.run(tokenizer.grammar, form, tools)


def random_text(tokenizer: HfTokenizer, tag: str, rng: random.Random) -> list[int]:
    """Return the tokens of a random response under a grammar, with the token that ends it."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.inner, vocab_size=len(tokenizer.inner))
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=tokenizer.ends)
    bits, tokens = xgrammar.allocate_token_bitmask(1, info.vocab_size), list[int]()
    blank = {token for token in range(info.vocab_size) if not tokenizer.inner.decode([token]).strip()}
    blank |= set(tokenizer.inner.get_added_vocab().values())
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(bits)
        words = [int(word) & 0xFFFFFFFF for word in bits[0]]
        allowed = [token for token in range(info.vocab_size) if words[token // 32] >> token % 32 & 1]
        # White space is allowed nearly everywhere, without an end. Inside a string, special tokens are only text to the
        # grammar, but the parser may take them for the end of a call.
        choices = [token for token in allowed if token not in blank] or allowed
        end = tokenizer.ends[0] if tokenizer.ends[0] in allowed else None
        token = rng.choice(choices) if end is None or rng.random() < 0.5 else end
        assert matcher.accept_token(token)
        tokens.append(token)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_a_response_that_is_sampled_in_a_form_is_parsed_in_that_form(name: str, tmp_path: Path) -> None:
    tokenizer, rng = tokenizer_of(name, tmp_path), random.Random(0)
    forms = {
        "text": ResponseForm(SCHEMA, calling=False),
        "any": ResponseForm(call=ANY_CALL),
        "one": ResponseForm(call="go", single=True),
        "either": ResponseForm(SCHEMA, single=True),
    }
    seen = set[str]()
    for name, form in forms.items():
        for _ in range(10):
            tokens = random_text(tokenizer, grammar_of(tokenizer, form, [GO, STOP]).tag, rng)
            spoken = tokenizer.read_response(tokens, True, [1], [GO, STOP], calling=form.calling)
            calls, content = spoken.message.tool_calls, spoken.message.content
            assert not spoken.malformed
            assert bool(calls) != bool(content)
            assert not calls or name != "text"
            assert calls or name in ("text", "either")
            assert len(calls) <= 1 or not form.single
            for called, text in [(call.name, call.arguments) for call in calls] + [("", content)][len(calls) :]:
                assert form.call in ("", ANY_CALL, called)
                value = json.loads(text)
                assert isinstance(value, dict)
                assert called == "stop" or (set(value) == {"unit", "far", "at"} and value["unit"] in ("km", "m"))
                seen.add(f"{form.call} {called}")
    assert seen == {" ", " go", " stop", "* go", "* stop", "go go"}


@pytest.mark.parametrize(
    ("form", "tools", "fault"),
    [
        (ResponseForm(call=ANY_CALL), [], "no function is offered"),
        (ResponseForm(call="fly"), [GO], "the function 'fly' must be called, but is not offered"),
        (ResponseForm({"type": "object", "not": {}}), [], r"in the JSON schema, \$ has the keyword `not`"),
        (
            ResponseForm(call=ANY_CALL),
            [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "a"}}}],
            r"in the schema of the function f, \$ refers to another document",
        ),
        (ResponseForm({"$ref": "#/$defs/a"}), [], "cannot have this form"),
        (ResponseForm({"enum": [{1, 2}, object()]}), [], "it cannot be written as JSON"),
        (ResponseForm({"enum": ["\ud800"]}), [], "it cannot be written as JSON"),
        (ResponseForm(nested(400)), [], "cannot have this form"),
        (ResponseForm(nested(3000)), [], "it cannot be written as JSON"),
    ],
)
def test_a_form_that_engines_cannot_enforce_is_refused(
    form: ResponseForm, tools: list[Tool], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvError, match=fault):
        grammar_of(tokenizer_of("qwen", tmp_path), form, tools)


def test_a_call_cannot_be_forced_if_vllm_knows_no_grammar_of_the_parser(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("mistral", tmp_path)
    for form in (ResponseForm(call=ANY_CALL), ResponseForm(call="go"), ResponseForm(SCHEMA)):
        with pytest.raises(EnvError, match=r"in the format of model\.tool_parser = 'mistral'"):
            grammar_of(tokenizer, form, [GO])
    assert grammar_of(tokenizer, ResponseForm(SCHEMA, calling=False), [GO]).reasoning is None


def test_a_grammar_waits_for_the_end_of_the_reasoning_that_the_template_begins(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen", tmp_path, reasoning=True)
    form = ResponseForm(SCHEMA, calling=False)
    assert grammar_of(tokenizer, form, []).reasoning == {}
    free = tokenizer.with_arguments({"enable_thinking": False})
    assert grammar_of(free, form, []).reasoning == {"enable_thinking": False}


class Backend:
    """Stands for vLLM's backend, and counts how often its compiler was made."""

    made = 1

    def __post_init__(self) -> None:
        self.made += 1


def test_a_compiler_is_replaced_after_many_different_grammars() -> None:
    """xgrammar keeps a part of each grammar in the compiler for ever."""
    backend = Backend()
    manager = SimpleNamespace(backend=None)

    def make(tag: str) -> None:
        params = SimpleNamespace(structural_tag=tag)
        bound_memory(manager, SimpleNamespace(structured_output_request=SimpleNamespace(params=params)))

    for number in range(COMPILED):
        make(f"a {number}")
        make("b")
        manager.backend = backend  # vLLM makes it for the first grammar
    assert backend.made == 2
    for number in range(COMPILED):
        make(f"c {number % (COMPILED // 2)}")
    assert backend.made == 2
