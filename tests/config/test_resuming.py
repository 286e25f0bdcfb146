"""The change of a key on `--resume` takes effect, is refused, or is reported as a warning: the tables decide."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash.config.load import key_paths
from flash.config.resuming import CONDITIONS, PARTIAL, REFUSED, partial_effects, refused
from flash.observe.alarms import ALARMS

WHERE = Path("outputs/run")
FLASH = Path(__file__).parents[2] / "flash"


def expanded(entry: str) -> Iterator[str]:
    """Yield the keys that an entry of a table stands for: the key itself, or all keys of `table.*`."""
    return (key for key in key_paths() if key == entry or entry == key.partition(".")[0] + ".*")


def taking_effect() -> list[str]:
    """Return the keys whose change takes effect: those that have no entry in `REFUSED` and `PARTIAL`."""
    others = {key for entry in (*REFUSED, *PARTIAL) for key in expanded(entry)}
    return [key for key in key_paths() if key not in others]


def settings(key: str, value: Any) -> dict[str, Any]:
    """Return settings in which only this dotted key is set."""
    table, name = key.split(".")
    return {table: {name: value}}


def test_each_entry_of_a_table_is_a_key() -> None:
    assert all(any(expanded(entry)) for entry in (*REFUSED, *PARTIAL))
    assert {key for keys in CONDITIONS for key in keys.split(", ")} <= set(taking_effect())


def test_a_changed_key_is_refused_or_reported_as_its_table_says() -> None:
    for key in key_paths():
        had, now = settings(key, 1), settings(key, 2)
        refusals, notes = list(refused(had, now, WHERE)), partial_effects(had, now)
        assert [problem.key for problem in (*refusals, *notes)] == ([] if key in taking_effect() else [key])
        for problem in refusals:
            assert re.match(
                r"the run in outputs/run was made with 1, got 2\. [A-Z].*\. Continue with 1, or", problem.message
            )
        assert not list(refused(had, had, WHERE))
        assert not partial_effects(had, had)


@pytest.mark.slow
def test_each_key_that_takes_effect_is_read_somewhere() -> None:
    """A key is read as an attribute somewhere in Flash; the keys of alarms are read by the names of the alarms."""
    nodes = (node for file in FLASH.rglob("*.py") for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        alarm.name for _, alarm in ALARMS.values()
    }
    assert {key for key in taking_effect() if key.partition(".")[2] not in read} == set()


def test_a_removed_key_that_the_run_was_recorded_with_is_reported_unless_it_had_its_default() -> None:
    had = {"rollout": {"selection": "pass_rate", "selection_floor": 0.1}, "algorithm": {"branches": "same"}}
    (problem,) = partial_effects(had, {"rollout": {}, "algorithm": {}})
    assert problem.key == "rollout.selection"
    assert problem.message.startswith(
        'The run was recorded with "pass_rate", and continues without this key, which was'
    )


def test_a_removed_table_that_the_run_was_recorded_with_is_reported_once_unless_it_was_empty() -> None:
    (problem,) = partial_effects({"observe": {"sink": "my_module:make_sink"}}, {})
    assert (problem.key, "track.to takes" in problem.message) == ("observe", True)
    assert not partial_effects({"observe": {}}, {})


def test_a_key_or_table_that_this_version_does_not_know_is_reported_once_with_its_name() -> None:
    had = {"train": {"bogus": 1, "batch_size": 8}, "bogus": {"a": 1, "b": 2}, "rollout": {"selection_floor": 0.1}}
    known = {"train": {"batch_size": 8}, "rollout": {"selection_floor": 0.1}}
    added = [problem for problem in partial_effects(had, {}) if problem not in partial_effects(known, {})]
    told = "The run was recorded with it. This version of Flash does not have it, and continues without it."
    assert added == [("bogus", told), ("train.bogus", told)]


def test_a_recorded_table_that_is_no_table_hides_no_other_change() -> None:
    """`read_recorded` returns the settings of a damaged config.toml as they are."""
    had, now = {"train": 5, "run": {"name": "x"}}, {"train": {"batch_size": 8}, "run": {"name": "y"}}
    assert not list(refused(had, now, WHERE))
    assert not partial_effects(had, now)
