"""`flash sft` by its command: two ranks learn, an interrupt leaves what --resume goes on from, exactly."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.integration.whole_run import Run
from tests.rollout.families import family

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

COMMAND = ("-m", "flash", "sft")
ROWS, EPOCHS, STEPS = 37, 10, 47
"""Of eight rows each, but the last."""
CONFIG = """
[run]
name = "run"
output_dir = "{folder}"

[model]
path = "{model}"
dtype = "float32"
max_length = 64

[sft]
data = "{folder}/rows.jsonl"
held_out = "{folder}/held_out.jsonl"
epochs = 10

[train]
batch_size = 8
learning_rate = 5e-3
warmup_steps = 5
decay = "cosine"
max_tokens_per_microbatch = 128

[eval]
every = 15

[checkpoint]
every = 1000

[cluster]
gpus_per_node = 0
trainer_ranks = 2
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft") / "model"
    tokenizer = family("qwen", folder)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer.inner),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


def write_rows(folder: Path) -> None:
    for name, first in (("rows", 0), ("held_out", 100)):
        talks = [
            [{"role": "user", "content": f"say {n % 10}"}, {"role": "assistant", "content": f"it is {n % 10}"}]
            for n in range(first, first + ROWS)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))


def test_a_run_that_was_interrupted_and_goes_on_ends_as_one_that_was_not(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    write_rows(tmp_path)
    whole = start("run.name=whole", text=CONFIG, command=COMMAND)
    assert whole.wait() == 0, whole.text()
    whole.directory = tmp_path / "whole"
    rows, losses = whole.rows(), [row["held_out_nll"] for row in whole.rows("evals.jsonl")]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert sum(row["samples"] for row in rows) == EPOCHS * ROWS
    assert losses[-1] < 0.5 * losses[0]

    cut = start(text=CONFIG, command=COMMAND)
    while not (cut.directory / "metrics.jsonl").is_file() or len(cut.rows()) < 3:
        assert cut.process.poll() is None, cut.text()
        time.sleep(0.05)
    cut.process.send_signal(signal.SIGINT)
    assert cut.wait() == 130
    assert "go on with: " in cut.text()
    done = len(cut.rows())
    assert done < STEPS
    cut = start("--resume", text=CONFIG, command=COMMAND)
    assert cut.wait() == 0, cut.text()
    assert [row["step"] for row in cut.rows()] == list(range(STEPS))
    assert [row["nll"] for row in cut.rows()] == [row["nll"] for row in rows]
    mine, other = (load_file(folder / "model" / "model.safetensors") for folder in (cut.directory, whole.directory))
    assert all(torch.equal(mine[name], other[name]) for name in mine | other)
    assert cut.summary()["ledger"]["trained"] == EPOCHS * ROWS
