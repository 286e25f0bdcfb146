"""Examples of the page about Python: each call is one that Flash accepts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flash
from flash.run.training import Call, written

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
"""Page about the functions for Python programs."""
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
"""Programs of that page."""


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_each_example_is_a_call_that_is_accepted(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('model.path = "tiny"\nenv.path = "envs.arithmetic:Arithmetic"\n')
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "quickstart.toml").write_bytes((PAGE.parents[1] / "examples/quickstart.toml").read_bytes())
    calls: list[Call] = []

    def called(config: Any = None, *, epochs: float = 1, samples: int = 1, **arguments: Any) -> SimpleNamespace:
        """Keep the configuration of the call, in place of a function of `flash`."""
        if config == "outputs/run":
            config = "run.toml"
        calls.append(written(config, **arguments))
        turn = SimpleNamespace(observation="", action="")
        return SimpleNamespace(mean=0.5, best_of={samples: 0.5}, episodes=[SimpleNamespace(turns=[turn], reward=1.0)])

    stand_in = SimpleNamespace(train=called, evaluate=called, sft=called, is_held_out=flash.is_held_out)
    monkeypatch.setitem(sys.modules, "flash", stand_in)
    exec(compile(example, "example.py", "exec"), {"__name__": "__main__"})
    assert calls
