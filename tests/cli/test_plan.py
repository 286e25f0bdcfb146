"""`flash plan`: the memory that it prints, and the changes that it proposes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config

from flash.cli.prepare import run_plan
from flash.errors import ConfigError
from tests.forked_command import ROOT, run_forked

EXAMPLE = ROOT / "examples" / "one_node_8gpu.toml"
SHAPE = Qwen3Config(
    hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=1000,
)  # fmt: skip


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_a_plan_that_does_not_fit_is_printed_with_changes_that_fit(tmp_path: Path) -> None:
    SHAPE.save_pretrained(tmp_path)
    settings = [f"model.path={tmp_path}", "env.path=envs.arithmetic:Arithmetic", "env.options={}"]
    code, said = planned(tmp_path, EXAMPLE, *settings)
    assert code == 1, said
    assert "each of 4 trainer ranks" in said
    assert "DOES NOT FIT in 0.7 GiB" in said
    *tried, last = [line for line in said.splitlines() if "GiB: " in line]
    assert [line.split()[0] for line in tried] == ["nor"] * len(tried)
    changes = last.partition("GiB: ")[2].split()
    assert changes[0] == "train.activation_checkpointing=true"
    code, said = planned(tmp_path, EXAMPLE, *settings, *changes)
    assert code == 0, said
    assert "fits in 0.7 GiB" in said
    few = ["rollout.group_size=4", "train.batch_size=4", "train.activation_checkpointing=true"]
    few += ['train.offload=["activations"]']
    code, said = planned(tmp_path, EXAMPLE, *settings, *few, card="0.001")
    assert code == 1, said
    tried, found, refused = said.partition("nothing further: ")
    assert "nor with" in tried
    assert 'train.offload=["activations","moments","weights"]' in tried
    assert found
    assert "cluster.trainer_nodes=" in refused, "more ranks than samples are refused"


@pytest.mark.parametrize("card", ["-3", "0", "nan", "inf"])
def test_a_card_without_a_finite_memory_above_zero_is_refused(card: str) -> None:
    with pytest.raises(ConfigError, match=f"--card-gib: expected a finite number above 0, got {card}"):
        run_plan(argparse.Namespace(config=[str(EXAMPLE)], card_gib=float(card)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["outputs/models/none", "not-made-yet"])
def test_a_tiny_model_that_is_not_made_yet_is_planned_from_its_table(model: str, tmp_path: Path) -> None:
    """The name `not-made-yet` has the form of a hub id."""
    config = tmp_path / "tiny.toml"
    config.write_text(
        f'[run]\nname = "plan"\n[model]\npath = "{model}"\ndtype = "float32"\n'
        "[tiny_model]\nlayers = 2\nwidth = 64\n"
        '[env]\npath = "envs.arithmetic:Arithmetic"\n[cluster]\ngpus_per_node = 0\n'
    )
    # Without GPUs there is none to share, so a rank has all of the memory.
    code, said = planned(tmp_path, config, "engine.share_gpus=true", card="80")
    assert code == 0, said
    # A layer of width 64 has 4 * 64² weights of attention, 3 * 64 * 256 of the feed-forward network, and 192 of norms.
    few = 2 * (4 * 64**2 + 3 * 64 * 256 + 192) + 64
    assert few < 1e6 * float(said.partition("M parameters")[0]) < few + 64 * 64  # at most 64 tokens
    assert "fits in 80 GiB\n" in said
    assert not (Path.cwd() / model).exists()


def test_a_model_that_is_fetched_is_planned_once_it_is_there() -> None:
    named = ["model.fetch=smollm2-135m", "model.path=outputs/models/none", "model.max_length=512"]
    with pytest.raises(ConfigError, match="first with `flash fetch smollm2-135m --to outputs/models/none`"):
        run_plan(argparse.Namespace(config=[str(EXAMPLE), *named], card_gib=80.0))


def test_each_hub_id_is_looked_up_without_retries(tmp_path: Path) -> None:
    SHAPE.save_pretrained(tmp_path)
    settings = [
        f"model.path={tmp_path}",
        "algorithm.kl={coefficient=0.1, reference='owner/none'}",
        "env.path=envs.arithmetic:Arithmetic",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "flash", "plan", str(EXAMPLE), *settings, "env.options={}"],
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "`algorithm.kl.reference` (setting): there is no folder owner/none here, no such model" in done.stderr


def planned(folder: Path, config: Path, *settings: str, card: str = "0.7") -> tuple[int, str]:
    """Return the exit code and the output of `flash plan`, in a process of its own, because it makes a process group.

    `folder` gets the output.
    """
    words = ("-m", "flash", "plan", str(config), *settings, "--card-gib", card)
    return run_forked(words, folder / "said.txt")
