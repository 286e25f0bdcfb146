"""`flash train` before its processes run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFIG = """
run = { name = "a-run", output_dir = "FOLDER" }
model = { path = "FOLDER/models/tiny", max_length = 32 }
rollout = { max_new_tokens = 8 }
tiny_model = { layers = 1, width = 32, batch_size = 2, warm_start_steps = 1000000 }
env = { path = "envs.arithmetic:Arithmetic" }
cluster = { gpus_per_node = 0 }
"""


def test_a_sigterm_while_the_model_is_made_leaves_it_as_it_is_by_then_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    command = [sys.executable, "-m", "flash", "train", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    assert "supervised step 50/" in process.stdout.readline()
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "tiny model: interrupted after " in output
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"tiny", ".tiny.lock"}
