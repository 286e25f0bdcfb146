"""The JSON Schema of the configuration, as editors use it."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flash.cli.main import main
from flash.cli.prepare import encoded_schema
from flash.config.load import dump, key_paths, load
from flash.config.schema import field_docs, schema, structs
from flash.config.section import Section

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "configuration.schema.json"
CONFIGURATIONS = sorted([*(ROOT / "examples").rglob("*.toml"), *(ROOT / "benchmarks").rglob("*.toml")])


@cache
def validator() -> Any:
    """Return the validator of the configuration's schema."""
    return jsonschema.Draft7Validator(schema())


def faults(settings: Any) -> list[str]:
    """Return the dotted place of each fault that the schema finds; empty for a fault of the whole."""
    return [".".join(map(str, error.absolute_path)) for error in validator().iter_errors(settings)]


@pytest.mark.slow
def test_the_file_is_current_and_a_schema() -> None:
    assert FILE.read_text(encoding="utf-8") == encoded_schema() + "\n", "run `make docs`"
    jsonschema.Draft7Validator.check_schema(schema())


@pytest.mark.slow
def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(encoded_schema())


def test_the_configurations_of_the_repository_are_valid() -> None:
    for file in CONFIGURATIONS:
        assert faults(tomllib.loads(file.read_text(encoding="utf-8"))) == [], file


def test_every_example_names_the_schema_in_its_first_line() -> None:
    for file in (ROOT / "examples").rglob("*.toml"):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        assert first.startswith("#:schema "), file
        assert (file.parent / first.removeprefix("#:schema ")).resolve() == FILE


def test_a_recorded_configuration_is_valid() -> None:
    config = load(
        ROOT / "examples" / "tiny.toml", ["track.to=[]", "alarms.reactions.lag=off", "algorithm.lag=none", "lora={}"]
    )
    assert faults(tomllib.loads(dump(config))) == []


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"trian": {}}, ""),
        ({"train": {"batchsize": 8}}, "train"),
        ({"train": {"batch_size": 0}}, "train.batch_size"),
        ({"train": {"batch_size": 8.5}}, "train.batch_size"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas.1"),
        ({"train": {"betas": [0.9, 0.9, 0.9]}}, "train.betas"),
        ({"train": {"batch_size": "none"}}, "train.batch_size"),
        ({"run": {"name": "a/b"}}, "run.name"),
        ({"algorithm": {"staleness": {"kind": "linear", "decay": 0.5}}}, "algorithm.staleness"),
        ({"algorithm": {"kl": {"coefficient": -1}}}, "algorithm.kl"),
        ({"simulate": {"turns": "uniform(1, 4)"}}, "simulate"),
    ],
)
def test_a_mistake_is_found_at_its_key(settings: dict[str, Any], place: str) -> None:
    assert faults(settings) == [place]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train": {"async_ratio": 2, "max_token_age": "none"}},
        {"critic": "none", "algorithm": {"kl": "none", "lag": "none"}},
        {"rollout": {"max_concurrent": "auto", "logit_bias": [[3, -1.5]]}, "run": {"name": "a.1"}},
        {"simulate": {"turns": [1, 2], "env_s": {"kind": "normal", "mean": 1, "deviation": 2, "high": "none"}}},
    ],
)
def test_a_part_of_a_configuration_is_valid(settings: dict[str, Any]) -> None:
    assert faults(settings) == []


@pytest.mark.slow
def test_each_key_has_its_meaning_and_no_link_that_an_editor_cannot_open() -> None:
    sections = {struct.__name__: struct for struct in structs() if issubclass(struct, Section)}
    described = {
        (name, key): value.get("description")
        for name, table in schema()["definitions"].items()
        for key, value in table["properties"].items()
        if key != "kind"
    }
    assert None not in described.values()
    assert not [text for text in described.values() if "](" in text]
    keys = sum(len(field_docs(section)) for name, section in sections.items() if name != "Config")
    assert keys == len(list(key_paths()))


def test_no_two_tables_have_one_name() -> None:
    names: dict[str, type] = {}
    assert all(names.setdefault(struct.__name__, struct) is struct for struct in structs())
