"""`flash doctor`: the findings as text and as JSON, and the exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flash.cli.main import main
from flash.cli.prepare import containers, finding_lines
from flash.config.load import load
from flash.run.checks.doctor import CHECKS, Finding

CONFIG = """
run = { name = "a-run" }
model = { path = "model" }
env = { path = "envs.arithmetic:Arithmetic" }
cluster = { gpus_per_node = 0 }
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of a valid configuration file, on a machine where no container engine answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    monkeypatch.setenv("FLASH_SANDBOX_TOKEN", "secret")
    (tmp_path / "model").mkdir()
    for name, text in {
        "model/config.json": "{}",
        "model/tokenizer.json": "{}",
        "model/model.safetensors": "\2" + 7 * "\0" + "{}",
        "run.toml": CONFIG,
    }.items():
        (tmp_path / name).write_text(text)
    return str(tmp_path / "run.toml")


@pytest.mark.slow
def test_it_reports_every_check_and_the_exit_code_is_1_if_anything_is_missing(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", config, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in found] == ["config", *CHECKS, "containers"]
    assert code == int(any(one["state"] == "missing" for one in found))
    assert found[0]["state"] == "ok"


@pytest.mark.slow
def test_a_wrong_configuration_counts_as_missing_and_the_machine_is_checked_anyway(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", config, "run.stepz=3"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("missing     config ")
    assert "run.stepz" in said
    assert "\nok          machine " in said
    assert main(["doctor", config, "model.path=a--b"]) == 1
    assert "`model.path` (setting): there is no folder a--b here" in capsys.readouterr().out


@pytest.mark.slow
def test_a_configuration_of_flash_sft_is_checked_for_flash_sft(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path(config).with_name("rows.jsonl")
    rows.write_text('{"prompt": "a", "completion": "b"}')
    Path(config).write_text(re.sub("(?m)^env = .*", f'sft = {{ data = "{rows}" }}', CONFIG))
    main(["doctor", config])
    assert capsys.readouterr().out.startswith("ok          config ")
    assert main(["doctor", config, "sft.data=nothing.jsonl"]) == 1
    assert "`sft.data` (setting): there is no data set at nothing.jsonl" in capsys.readouterr().out


def test_containers_are_missing_only_where_the_environment_runs_programs_in_them(config: str) -> None:
    assert containers(None).state == "not needed"
    assert containers(load(config)).state == "not needed"
    found = containers(load(config, ["env.path=envs.code:CodeEnv"]))
    assert found.state == "missing"
    assert "DOCKER_HOST" in found.advice
    remote = load(config, ["env.path=envs.code:CodeEnv", 'env.options.sandboxes.at="unix:/there"'])
    assert containers(remote).text == "the sandboxes come from the service at unix:/there"


def test_advice_is_printed_below_the_finding() -> None:
    told = list(
        finding_lines([Finding("missing", "two\nlines", "do this", "port"), Finding("ok", "well", "", "machine")])
    )
    assert told == [
        "missing     port     two",
        "                     lines",
        "                     → do this",
        "ok          machine  well",
    ]
