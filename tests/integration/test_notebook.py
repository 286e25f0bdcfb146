"""The notebook of the examples, run from its first cell to its last by the kernel of a notebook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.whole_run import REPOSITORY, Run, make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NOTEBOOK = REPOSITORY / "examples" / "notebook.ipynb"
SMALLER = """
MODEL, STEPS = {model!r}, 2
SETTINGS |= {{"model.dtype": "float32", "run.output_dir": {folder!r}, "eval": {{"every": 0, "problems": 8}}}}
SETTINGS |= {{"rollout": {{"group_size": 4, "max_new_tokens": 6}}, "engine.kv_cache_gib": 0.25}}
SETTINGS |= {{"train": {{"batch_size": 16, "max_tokens_per_microbatch": 256}}}}
del SETTINGS["engine"]["kv_cache_gib"]
"""
"""Lines after the settings of the notebook, with which the tiny model trains in seconds."""
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

file, folder, more = sys.argv[1:]
notebook = nbformat.read(file, 4)
next(cell for cell in notebook.cells if "SETTINGS = " in cell.source).source += more
NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, f"{folder}/executed.ipynb")
"""


def outputs(notebook: dict[str, Any], cell: str) -> list[dict[str, Any]]:
    """Return the outputs of the cell whose source contains a text."""
    return next(one["outputs"] for one in notebook["cells"] if cell in "".join(one["source"]) and "outputs" in one)


def test_the_notebook_runs_and_shows_the_run_its_curve_its_samples_and_an_answer(
    start: Callable[..., Run], model: Path, tmp_path: Path
) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    make_model(model, tmp_path / "first")
    more = SMALLER.format(model=str(model), folder=str(tmp_path / "outputs"))
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(tmp_path), more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    notebook = json.loads((tmp_path / "executed.ipynb").read_text())
    (block,) = outputs(notebook, "result = flash.train(")
    assert block["output_type"] == "display_data"
    text = "".join(block["data"]["text/plain"])
    assert text.count("\n") < 40
    assert "evaluation at step 2: " in text
    (curve,) = next(one["outputs"] for one in notebook["cells"] if "".join(one["source"]) == "result")
    assert "<svg" in "".join(curve["data"]["text/html"])
    assert "at step 2" in "".join(curve["data"]["text/plain"])
    printed = [one for one in outputs(notebook, "flash.evaluate(") if one["output_type"] == "stream"]
    assert "".join(printed[-1]["text"]).count("reward ") == 6
    *_, answered = outputs(notebook, "ask(")
    assert re.fullmatch(r"'3\+4=.+'", "".join(answered["data"]["text/plain"]), flags=re.DOTALL)
