"""JSON Schema of the configuration, with which an editor completes keys, shows what they mean, and marks mistakes.

`flash schema` prints it. `make docs` writes it to docs/configuration.schema.json, which the first line of each example
names (`#:schema …`): taplo, and so VS Code's extension Even Better TOML, read that line. The schema has the form of
draft 7, the newest that taplo reads in full.

The schema describes one file. Flash merges several files and overrides, so it requires no key of a section. It knows
types and bounds of single values; `flash.config.check` knows which values fit together. Descriptions are the docstrings
of the fields, which `field_docs` also gives to the page of the configuration.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any, cast, get_args, get_origin

import msgspec

from flash.config.decode import NONE, names_in, tables_in
from flash.config.section import Section
from flash.config.tree import Config

DRAFT = "http://json-schema.org/draft-07/schema#"
MARKDOWN_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
"""Link in a docstring. Its target is a page of the documents, which an editor cannot open."""

Json = dict[str, Any]


def schema() -> Json:
    """Return the JSON Schema of a configuration file, for `flash schema` and docs/configuration.schema.json."""
    # msgspec returns a reference to the schema of Config, and the schema of each struct by the name of its class.
    (root,), found = msgspec.json.schema_components([Config], ref_template="#/definitions/{name}")
    definitions = {name: cast("Json", _draft_7(part)) for name, part in found.items()}
    for struct in structs():
        table = definitions[struct.__name__]
        table["additionalProperties"] = False  # `load` refuses unknown keys
        if issubclass(struct, Section):  # another file may have the key
            table.pop("required", None)
        for name, meaning in field_docs(struct).items():
            table["properties"][name]["description"] = MARKDOWN_LINK.sub(r"\1", meaning)
        # msgspec's schema does not say which names the keys of a table such as alarms.reactions may have.
        for field in msgspec.structs.fields(struct):
            if names := names_in(field.type):
                table["properties"][field.encode_name]["propertyNames"] = {"enum": list(names)}
        table["description"] = MARKDOWN_LINK.sub(r"\1", " ".join((inspect.getdoc(struct) or "").split()))
    top = definitions.pop(root["$ref"].rpartition("/")[2])
    return {"$schema": DRAFT, "title": "Configuration of Flash", **top, "definitions": definitions}


def structs(annotation: Any = Config) -> Iterator[type[msgspec.Struct]]:
    """Yield the struct of each table that a value of this type may be or contain: by default each table of the
    configuration, and each kind of table that a key may hold. A struct in several places is yielded for each place."""
    in_list = get_origin(annotation) is list
    for struct in tables_in(get_args(annotation)[0] if in_list else annotation).values():
        yield struct
        for field in msgspec.structs.fields(struct):
            yield from structs(field.type)


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring of each field of a struct and its base classes, on one line.

    Class variables, which are no options, are left out.
    """
    docs: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if not issubclass(cls, msgspec.Struct) or cls is msgspec.Struct:
            continue
        # Python keeps no docstrings of fields, so they are read from the source: the text after each field.
        (tree,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, tree.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
                case _:
                    pass
    fields = {field.name for field in msgspec.structs.fields(struct)}
    return {name: text for name, text in docs.items() if name in fields}


def _draft_7(part: Any) -> Any:
    """Return a part of msgspec's schema in the form of draft 7, and with `none` for null, which TOML does not have.

    A default of None is left out. A new object is returned; `part` stays as it is.
    """
    if isinstance(part, list):
        return [_draft_7(one) for one in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    table = cast("Json", part)
    if table.get("type") == "null":
        return {"const": NONE}
    # Titles are names of classes of Flash. `discriminator` is a keyword of OpenAPI, which draft 7 does not have.
    made = {key: _draft_7(value) for key, value in table.items() if key not in ("title", "discriminator")}
    if made.get("default", ...) is None:  # an editor would offer `null`, which is no TOML
        del made["default"]
    if "prefixItems" in made:
        made["items"] = made.pop("prefixItems")  # msgspec also gives the number of items
    if "pattern" in made:
        made["pattern"] = made["pattern"].replace(r"\Z", "$")  # only Python writes the end of a text as \Z
    return made
