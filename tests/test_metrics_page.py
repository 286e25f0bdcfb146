"""The page of the metrics. That rows have no other names is tested where rows are made, with `tests.metrics_page`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.metrics_page import PLACEHOLDERS, listed, unlisted

SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].glob("flash/**/*.py"))


@pytest.mark.parametrize("name", sorted({*listed("metrics.jsonl"), *listed("evals.jsonl")}))
def test_what_the_page_lists_is_made_somewhere(name: str) -> None:
    if not any(placeholder in name for placeholder in PLACEHOLDERS):
        assert f'"{name}"' in SOURCES


def test_a_name_is_listed_once() -> None:
    for file in ("metrics.jsonl", "evals.jsonl"):
        assert len(set(listed(file))) == len(listed(file))


def test_placeholders_stand_for_names_and_nothing_else() -> None:
    assert unlisted(["env/a b", "age_12", "ratio_p99_age_3", "weight_max", "age_mean"]) == []
    assert unlisted(["new", "age_x", "loss_2", "other_mean"]) == ["age_x", "loss_2", "new", "other_mean"]
