"""The table of columns, and the page of it. That rows have no other names is tested where rows are made."""

from __future__ import annotations

from pathlib import Path

from flash.observe.columns.table import CHARTS, GROUPS, column_of, columns
from flash.rollout.engine import Pressure
from scripts.reference_docs import TABLES, metrics_page
from tests.metrics_page import unlisted

ROOT = Path(__file__).parents[1]
SHOWING = ("observe", "view")
"""Rooms that show rows, and make none."""
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in ROOT.glob("flash/**/*.py")
    if path.relative_to(ROOT / "flash").parts[0] not in SHOWING
)
WRITTEN_BY_THE_RECORDER = {"wall_s", "sink_lost"}


def test_the_page_is_current() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert metrics_page(text) == text, "run `make docs`"
    assert all(f"<!-- made: {name} -->" in text for name in TABLES)


def test_what_the_table_lists_is_made_somewhere() -> None:
    names = {column.name for kind in GROUPS for column in columns(kind) if not column.has_placeholder}
    made = {*WRITTEN_BY_THE_RECORDER, *Pressure.__struct_fields__}
    assert [name for name in names - made if not name.endswith("_mean") and f'"{name}"' not in SOURCES] == []


def test_a_name_is_listed_once_and_leads_to_its_column() -> None:
    for kind in GROUPS:
        names = [column.name for column in columns(kind)]
        assert len(set(names)) == len(names)
        assert all(column_of(column.name, kind) is column for column in columns(kind))


def test_every_chart_draws_something_and_every_column_is_in_a_chart_that_there_is() -> None:
    assert len({chart.id for chart in CHARTS}) == len(CHARTS)
    assert all(chart.columns for chart in CHARTS)
    named = {column.chart for kind in GROUPS for column in columns(kind)}
    assert named - {""} == {chart.id for chart in CHARTS}


def test_placeholders_stand_for_names_and_nothing_else() -> None:
    assert unlisted(["env/a b", "age_12", "ratio_p99_age_3", "weight_max", "age_mean"]) == []
    assert unlisted(["new", "age_x", "loss_2", "other_mean"]) == ["age_x", "loss_2", "new", "other_mean"]
