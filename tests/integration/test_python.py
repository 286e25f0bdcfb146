"""A script that trains with a function of its own: from its start over Ctrl-C and --resume to the evaluation."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked_command import run_forked
from tests.integration.whole_run import NO_TINY_MODEL, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SCRIPT = """
import sys
from pathlib import Path
import flash

BONUS = 0.5
data = Path(__file__).with_name("rows.jsonl")

def is_number(text):
    return text.strip().isdecimal()

def reward(answer, row):
    return BONUS * is_number(answer) + BONUS * (answer.strip() == str(row["sum"]))

settings = {"env.options.template": "plain", "rollout": {"group_size": 4}}
try:
    flash.train(sys.argv[1], data=data, reward=reward, steps=1000, settings=settings)
except KeyboardInterrupt:
    print("torch" in sys.modules, "interrupted")
"""


def test_a_script_trains_with_its_own_function_until_ctrl_c_and_its_run_goes_on_without_it(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    script, rows = tmp_path / "script.py", tmp_path / "rows.jsonl"
    script.write_text(SCRIPT)
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n % 10}+{n // 10}=", "sum": n % 10 + n // 10}) + "\n" for n in range(100))
    )
    run = start(text=NO_TINY_MODEL, command=(str(script),), real=True)
    run.until(lambda: len(run.rows()) >= 1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(100) == 0, run.text()
    run.nothing_left()
    assert run.text().endswith("False interrupted\n")
    made, recorded = len(run.rows()), run.directory / "config.toml"
    assert 0 < made < 1000
    assert f"go on with the argument resume=True, or with: flash train {recorded} --resume" in run.text()
    (sent,) = run.directory.glob("flash_code_*.py")
    assert f'reward = "{sent.stem}:reward"' in recorded.read_text()
    assert [path.name for path in tmp_path.glob(".*")] == [".run.lock"]
    assert ".call-" not in recorded.read_text()

    script.unlink()
    command = ("-m", "flash", "train", str(recorded), "--resume", f"run.steps={made + 1}")
    code, told = run_forked(command, tmp_path / "resumed.txt")
    assert code == 0, told
    assert len(run.rows()) == made + 1
    assert all(0 < row["reward_mean"] <= 1 for row in run.rows())

    run.directory.rename(tmp_path / "moved")
    code, told = run_forked(("-m", "flash", "eval", str(tmp_path / "moved"), "eval.problems=4"), tmp_path / "eval.txt")
    assert code == 0, told
    assert re.search(r"(accuracy|mean reward) [01]\.\d+, .*4 problems", told)
