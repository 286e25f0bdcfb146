"""A template's own text is marked, and keeps its marks in each part that a template cuts out."""

from __future__ import annotations

import pytest

from flash.foreign.chat_templates import compile_marked


@pytest.mark.parametrize("arguments", ["'xa'", "sep='xa'", "'xa', 1", "sep='xa', maxsplit=1"])
@pytest.mark.parametrize("method", ["split", "rsplit"])
def test_a_part_after_a_separator_keeps_its_own_marks(method: str, arguments: str) -> None:
    """Marks are capital letters here. The last letter, which the template writes, also ends the separator."""
    template = compile_marked(f"{{{{ (message ~ 'a').{method}({arguments})[1] }}}}", str.upper, str.lower)
    assert template.render(message="1xa") == "A"
