"""Grammars: the forms of responses that environments and agents ask for, as engines understand them.

A `ResponseForm` asks for a JSON schema of the text (`schema`), or for a call of an offered function (`call`). A grammar
has the same form as a *structural tag*: JSON that describes the possible texts of a response. The package xgrammar, in
the engines, forbids all tokens that do not lead to such a text.

`HfTokenizer` has one `Grammars`, because the format of a call depends on the model's parsers. The transcript of an
episode asks it for the grammar of a `ResponseForm` before the response is requested, so that an invalid form is refused
before anything is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flash.errors import EnvError
from flash.foreign.grammars import check_tag, schema_fault, text_tag
from flash.foreign.vllm_parsers import Parsers
from flash.sampling import Grammar
from flash.types import ANY_CALL, ResponseForm, Tool

KEPT_GRAMMARS = 64
"""Number of grammars that are kept. An agent asks for the same few forms in each episode."""


class Grammars:
    """The grammars of forms, for one model. The newest grammars are kept, because making one takes time.

    Args:
        parsers: the model's parsers of responses; None if it has none.
        reasoning: arguments of the chat template, if the model has a parser of reasoning: from them the parser finds
            out if the model reasons before its answer, where no grammar holds. None if the model has no such parser.
    """

    def __init__(self, parsers: Parsers | None, reasoning: dict[str, Any] | None) -> None:
        self._parsers = parsers
        self._reasoning = reasoning
        self._known: dict[bytes, Grammar] = {}
        """Grammars of the last `KEPT_GRAMMARS` forms, oldest first, by the JSON of the form and the tools."""

    def of(self, form: ResponseForm, tools: Sequence[Tool]) -> Grammar:
        """Return the grammar of the responses that have a form, if the prompt offers these tools.

        Calls have the format that the model's tool parser reads. The reasoning before the response is free.

        Raises:
            EnvError: the form is invalid, or engines cannot enforce it. The message names the fault.
        """
        try:
            key = msgspec.json.encode((form, tools), order="deterministic")
        except (TypeError, UnicodeEncodeError, RecursionError) as error:
            raise EnvError(f"a response cannot have this form: it cannot be written as JSON: {error}") from error
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._make(form, tools)
            if len(self._known) > KEPT_GRAMMARS:
                del self._known[next(iter(self._known))]
        return known

    def _make(self, form: ResponseForm, tools: Sequence[Tool]) -> Grammar:
        """Make the grammar of the responses that have a form. Raises the errors of `of`.

        `form.call` is empty if no call is required, `ANY_CALL` if any function may be called, else a function's name.
        With `form.calling` a response may also call a function if none is required.
        """
        offered = {tool["function"]["name"]: tool for tool in tools}
        if form.call and not offered:
            raise EnvError("a call is required, but no function is offered")
        if form.call not in ("", ANY_CALL, *offered):
            raise EnvError(f"the function {form.call!r} must be called, but is not offered")
        schemas: dict[str, dict[str, Any]] = {}
        if form.schema is not None and not form.call:
            schemas["the JSON schema"] = form.schema
        for name, tool in offered.items() if form.calling else ():
            schemas[f"the schema of the function {name}"] = tool["function"].get("parameters") or {}
        # The choice of a call as the parsers take it: a name, "required", "auto" (a call or text), or None (no call).
        call = {"": "auto", ANY_CALL: "required"}.get(form.call, form.call) if form.calling else None
        try:
            for of, schema in schemas.items():
                if (fault := schema_fault(schema)) is not None:
                    raise EnvError(f"a response cannot have this form: in {of}, {fault}")
            if self._parsers is not None:
                tag = self._parsers.tag(None if form.call else form.schema, tools, call=call, single=form.single)
            else:
                assert form.schema is not None, "functions are offered only with a parser"
                tag = text_tag(form.schema)
            check_tag(tag)
        except (ValueError, RecursionError) as error:  # JSON may be too deep here that was not too deep above
            raise EnvError(f"a response cannot have this form: {error}") from error
        return Grammar(tag, self._reasoning)
