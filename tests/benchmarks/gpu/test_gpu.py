"""The parts of `make gpu-check`, as far as two CPU cores go."""

from __future__ import annotations

import json

import pytest

from benchmarks.episodes import GROUP_SIZE, random_shard
from benchmarks.gpu.__main__ import PARTS, check
from benchmarks.gpu.steps import MIXTURE, TINY, Sizes, Skipped, random_model
from flash.config.machine import count_gpus


def test_the_batch_keeps_the_counts_and_the_ages_that_it_states() -> None:
    shard = random_shard(3, 4, (16, 48), 20)
    assert len(shard.samples) == len(shard.batch) == 4 * GROUP_SIZE
    assert sum(sample.trajectory.trained_tokens(shard.min_version) for sample in shard.samples) == shard.total_tokens
    assert {entry.oldest_version for entry in shard.batch} == {2}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "there is no part nothing; there are mfu, exact"),
        (["job-model"], "it needs --model FOLDER"),
        (["--model", "/nowhere"], "has no config.json"),
        pytest.param(["mfu"], "no NVIDIA GPU", marks=pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU")),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=says):
        check(words)


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path, capsys):
    def fails(sizes: Sizes):
        raise ValueError("no card answers")

    file = tmp_path / "report.json"
    offered = {"one": fails, "two": lambda sizes: []}
    assert check(["--quick", "--json", str(file)], offered) == 1
    report = json.loads(file.read_text())
    assert [row["case"] for row in report["rows"]] == ["two"]
    assert "triton" in report["machine"]["software"]
    said = capsys.readouterr()
    assert "ValueError: no card answers" in said.err
    assert said.out.splitlines()[-1] == "without rows: one"


def test_a_part_that_is_asked_for_and_skipped_is_a_problem(tmp_path, capsys):
    def skips(sizes: Sizes):
        raise Skipped("it needs a GPU")

    words = ["--quick", "--json", str(tmp_path / "report.json")]
    assert check(words, {"one": skips}) == 0
    assert check([*words, "one"], {"one": skips}) == 1
    assert "one skipped: it needs a GPU" in capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_arithmetic_of_the_trainer_is_measured(tmp_path):
    file = tmp_path / "report.json"
    assert check(["mfu", "exact", "--quick", "--json", str(file)]) == 0
    found = {row["metric"]: row["ours"] for row in json.loads(file.read_text())["rows"]}
    assert found["step_s"] > 0
    assert found["same_again"] == 1
    kinds = {"lora", "speculation", "filters", "moved", "weights-moved", "deltas", "fp8", "routing"}
    assert set(PARTS) == {"mfu", "exact", "memory", "job-tiny", "engine"} | kinds


@pytest.mark.integration
def test_a_model_with_random_weights_never_ends_its_answers(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    from flash.config.tree import TinyModelConfig
    from flash.trainer.model.tiny_model import make_tiny_model

    tiny = TinyModelConfig(layers=1, width=32, warm_start_steps=0)
    make_tiny_model(tmp_path / "tiny", tiny, "envs.arithmetic:Arithmetic", {}, lambda *_: None)
    folder = random_model(tmp_path / "random", TINY, tmp_path / "tiny", endless=True)
    assert AutoConfig.from_pretrained(folder).eos_token_id is None
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is None


@pytest.mark.integration
@pytest.mark.parametrize("shape", [TINY, MIXTURE])
def test_a_model_whose_tokenizer_could_not_be_written_is_made_again(tmp_path, shape):
    from transformers import AutoTokenizer

    from flash.config.tree import TinyModelConfig
    from flash.trainer.model.tiny_model import make_tiny_model

    with pytest.raises(OSError, match="missing"):
        random_model(tmp_path / "model", shape, tmp_path / "missing", endless=False)
    tiny = TinyModelConfig(layers=1, width=32, warm_start_steps=0)
    make_tiny_model(tmp_path / "tiny", tiny, "envs.arithmetic:Arithmetic", {}, lambda *_: None)
    folder = random_model(tmp_path / "model", shape, tmp_path / "tiny", endless=False)
    assert AutoTokenizer.from_pretrained(folder).get_vocab()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tiny"]
