"""`flash check-env`: the environment that is named, the output, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flash.cli.check_env import named_environment
from flash.cli.main import main
from flash.errors import ConfigError
from flash.run.checks.env.checks import CHECKS
from tests.forked_command import run_forked

MODULE = """
import os
import sys
import time

class Wrong:
    def __init__(self, length: int = 1):
        pass
    async def reset(self, seed):
        print("from the environment")
        return "1+1=", {}
    async def step(self, action):
        return "", "no number", True, False, {}
    async def close(self):
        pass

class Prints(Wrong):
    async def step(self, action):
        os.write(1, b"from a library\\n")
        os.system("echo from a process")
        sys.__stdout__.write("from a kept stream\\n")
        return await super().step(action)

class Stuck(Wrong):
    async def reset(self, seed):
        time.sleep(1000)

class Ends(Wrong):
    async def step(self, action):
        os._exit(0)

class EndsInAThread(Wrong):
    def step(self, action):
        os._exit(0)

class ForkedEnds(Wrong):
    async def reset(self, seed):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return "1+1=", {}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: None) -> Path:
    """Return the current directory, which has a module with faulty environments and a configuration that names one."""
    (tmp_path / "checked_env.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text('env = { path = "checked_env:Wrong", options = { length = 3 } }')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_an_environment_without_a_fault_gives_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check-env", "envs.arithmetic:Arithmetic", "--option", "digits=3", "--no-training", "--minutes", "0.5"]
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    checked = [line[12:].partition("  ")[0] for line in lines if not line.startswith(" ")]
    assert checked == [name for name in CHECKS if name != "training"]
    assert last.startswith("0 failures, ")


@pytest.mark.parametrize("words", [["run.toml"], ["checked_env:Wrong", "env.options.length=2"]])
def test_a_failure_gives_exit_code_1_and_the_same_as_json(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-env", *words, "--json", "--minutes", "0.1", "--no-training"]) == 1
    said = capsys.readouterr()
    finding, *_ = json.loads(said.out)
    assert (finding["check"], finding["state"]) == ("interface", "failure")
    assert "the reward must be a finite number, but is 'no number'" in finding["text"]
    assert "from the environment" in said.err


def test_nothing_that_the_environment_prints_is_in_the_json(folder: Path) -> None:
    command = [sys.executable, "-m", "flash", "check-env", "checked_env:Prints", "--json", "--minutes", "0.05"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    finding, *_ = json.loads(ran.stdout)
    assert (ran.returncode, finding["check"]) == (1, "interface")
    for printed in ("the environment", "a library", "a process", "a kept stream"):
        assert f"from {printed}\n" in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checked_env:Right"], "`checked_env` has no `Right`"),
        (["checked_env:Wrong", "--option", "width=3"], "Wrong has no such option"),
        (["checked_env:Wrong", "--option", "width"], "--option: expected KEY=VALUE, got width"),
        (["checked_env:Wrong", "--minutes", "0"], "--minutes: expected a positive number of at most 1440, got 0"),
        (["checked_env:Wrong", "checked_env:Stuck"], "expected one environment, as module:Class or as env.path"),
        (["rollout.max_turns=3"], "expected one environment, as module:Class or as env.path in a configuration"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_wrong_arguments_give_exit_code_2(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-env", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err


def test_options_and_settings_are_those_of_the_configuration_and_of_the_command(folder: Path) -> None:
    assert named_environment(["run.toml"], []).env.options == {"length": 3}
    config = named_environment(["run.toml", "checked_env:Stuck", "rollout.max_turns=3"], ["length=4"])
    assert (config.env.path, config.env.options, config.rollout.max_turns) == ("checked_env:Stuck", {"length": 4}, 3)
    with pytest.raises(ConfigError, match="length"):
        named_environment(["run.toml"], ["length=many"])


def test_code_that_never_ends_is_named_and_ends_the_command(folder: Path) -> None:
    words = ("-m", "flash", "check-env", "checked_env:Stuck", "--minutes", "0.05", "--json")
    code, said = run_forked(words, folder / "output.txt", folder=folder, seconds=60)
    assert code == 1
    assert "did not end; " in said
    assert "checked_env.py:26 blocked the event loop" in said


@pytest.mark.parametrize(("name", "line"), [("Ends", 30), ("EndsInAThread", 34)])
def test_an_environment_that_ends_the_process_fails(folder: Path, name: str, line: int) -> None:
    code, said = run_forked(
        ("-m", "flash", "check-env", f"checked_env:{name}", "--json"), folder / "output.txt", folder=folder, seconds=60
    )
    assert code == 1
    assert f"the process was ended by os._exit(0) in {folder}/checked_env.py:{line}" in said


def test_processes_of_an_environment_may_end_as_they_like(folder: Path) -> None:
    words = ("-m", "flash", "check-env", "checked_env:ForkedEnds", "--minutes", "0.1", "--no-training")
    code, said = run_forked(words, folder / "output.txt", folder=folder, seconds=60)
    assert code == 1  # its answers are no numbers
    assert "os._exit" not in said
    assert "no number" in said
