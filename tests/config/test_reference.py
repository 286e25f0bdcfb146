"""The configuration's reference page."""

from pathlib import Path
from typing import get_args, get_origin

import msgspec

from flash.config.decode import section_in, tables_in
from flash.config.load import key_paths, keys
from flash.config.schema import field_docs
from flash.config.tree import Config
from scripts.reference_docs import configuration_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), "run `make docs`"


def test_every_field_of_the_configuration_has_a_docstring():
    for field in msgspec.structs.fields(Config):
        section = section_in(field.type)
        assert section is not None
        assert field_docs(section).keys() == {inner.name for inner in msgspec.structs.fields(section)}


MOST_KEYS = 220
"""Largest number of keys. A new key needs a user who knows a better value than the code."""


def count() -> int:
    """Return the number of keys that a user can write: those of the sections, and the options of each kind of table.

    Options of a kind that several keys share count once, as they have one row on the page.
    """
    return len(list(key_paths())) + sum(len(msgspec.structs.fields(struct)) for struct in tables())


def test_there_are_not_too_many_keys():
    assert count() <= MOST_KEYS


def test_the_page_has_a_row_for_every_key():
    rows = [line for line in configuration_page().splitlines() if line.startswith("| `")]
    assert len(rows) == count()


def test_the_page_names_every_kind_of_a_table_with_its_options():
    page = configuration_page()
    assert len(tables()) == 16
    for struct in tables():
        tag = struct.__struct_config__.tag
        assert tag is None or f'**`kind = "{tag}"`**' in page
        assert field_docs(struct).keys() == {field.name for field in msgspec.structs.fields(struct)}


def tables() -> list[type[msgspec.Struct]]:
    """Return the structs that keys with tables or lists of tables may hold."""
    annotations = [get_args(found)[0] if get_origin(found) is list else found for _, found in keys()]
    found = [struct for annotation in annotations for struct in tables_in(annotation).values()]
    return list(dict.fromkeys(found))  # several keys of [simulate] hold the same kinds
