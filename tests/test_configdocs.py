"""The configuration's reference page."""

from pathlib import Path

import msgspec

from flash.config import Config
from flash.configdocs import field_docs, markdown
from flash.configfile import key_paths, section_in

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_every_field_of_the_configuration_has_a_docstring():
    for field in msgspec.structs.fields(Config):
        section = section_in(field.type)
        assert section is not None
        assert field_docs(section).keys() == {inner.name for inner in msgspec.structs.fields(section)}


def test_the_page_has_a_row_for_every_key():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(list(key_paths()))
