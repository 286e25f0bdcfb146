"""The configuration's reference page, made from the docstrings under the fields of the tree and of what it holds."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec

from flash.config import resuming
from flash.config.decode import describe, section_in, show, tables_in
from flash.config.tree import Config

INTRODUCTION = """\
# Configuration

<!-- Made by scripts/reference_docs.py from flash/config/tree.py: change it there and run `make docs`. -->

A run is TOML files and overrides: `flash train base.toml mine.toml train.async_ratio=0`. Files merge left to right,
tables deep. An override's value is TOML or else text; `{}` clears a table, `none` unsets a key or takes an optional
table away. Where tables have kinds, `kind` chooses: `algorithm.corrections=[{kind="token_tis", cap=3}]`.

`--dry-run` tries all but engines and training.
"""


def markdown() -> str:
    """The whole reference, one table per section."""
    return "\n".join([INTRODUCTION, *_sections(), *resuming.markdown()])


def _sections() -> Iterator[str]:
    summaries = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for name, annotation in summaries.items():
        section = section_in(annotation)
        assert section is not None, "the tree is two levels deep"
        yield f"## `[{name}]`\n"
        yield f"{inspect.getdoc(section)}\n"
        if section is not annotation:
            yield "Optional.\n"
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        yield from _rows(section)
        yield ""
        for field in msgspec.structs.fields(section):
            yield from _kinds(f"{name}.{field.name}", field.type)


def _kinds(key: str, annotation: Any) -> Iterator[str]:
    """What may stand in a key that holds a table or a list of tables."""
    in_list = get_origin(annotation) is list
    kinds = tables_in(get_args(annotation)[0] if in_list else annotation)
    if not kinds:
        return
    yield f"### `{key}`\n"
    if "" not in kinds:
        yield f"{'Tables' if in_list else 'A table'} of these kinds.\n"
    for kind, struct in kinds.items():
        yield f"**`kind = {show(kind)}`**: {inspect.getdoc(struct)}\n" if kind else f"{inspect.getdoc(struct)}\n"
        if msgspec.structs.fields(struct):
            yield "| option | value | default | meaning |\n|---|---|---|---|"
            yield from _rows(struct)
            yield ""


def _rows(section: type[msgspec.Struct]) -> Iterator[str]:
    meanings = field_docs(section)
    for field in msgspec.structs.fields(section):
        if field.required:
            default = "required"
        elif field.default is None:
            default = "none"
        elif field.default is msgspec.NODEFAULT:
            default = "empty"
        else:
            default = f"`{show(field.default)}`"
        cells = (f"`{field.name}`", _value(field.type), default, meanings[field.name])
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _value(annotation: Any) -> str:
    """A type in few words, with a pattern set apart: its brackets would be read as a link."""
    words = re.sub(r"(?<=text matching )\S+", r"`\g<0>`", describe(annotation))
    for long, short in SHORT.items():
        words = re.sub(long, short, words)
    return words


SHORT = {
    r"\ban? (?=integer|number|list|table)": "",
    r"\babove (?=\d)": "> ",
    r"\bat least (?=\d)": "≥ ",
    r"\bbelow (?=\d)": "< ",
    r"\bat most (?=\d)": "≤ ",
    r"\bfrom (?=-?\d)": "",
    r"list, each item": "list of",
    r"true or false": "boolean",
    r'"age", .* or "trainer_waits"': "alarms",
    r"number 0\.1 to 1e\+08": "seconds",
}
"""How the page shortens what errors say in whole words."""


def field_docs(section: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring under each field of a section, on one line."""
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
            case _:
                pass
    return docs
