"""A pretrained model, as `flash fetch` makes it: it answers, is trained with the defaults, and is handed on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from flash.cli.main import main
from flash.config.load import dump, load
from flash.config.machine import computes_bfloat16
from flash.config.tree import Config, ModelConfig
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.vllm.engine import VLLMEngine
from flash.sampling import Sampling
from flash.trainer.model.canary import MIN_TOLERANCE
from flash.trainer.model.model import load_model
from flash.types import Completion, Message
from tests.forked_command import run_forked
from tests.integration.whole_run import REPOSITORY, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


QUESTIONS = ("What is the capital of France?", "Name a colour.", "What is 20 + 22? Reply with only the number.")
ANSWER = 12
"""Tokens of an answer to one of `QUESTIONS`: enough for the name of the capital."""
DTYPE = "bfloat16" if computes_bfloat16() else "float32"
"""The default precision; float32 on a CPU that emulates bfloat16, where a step would take minutes."""
TEXT = f"""
[run]
name = "run"
steps = 2
output_dir = "{{folder}}"

[model]
path = "MODEL"
max_length = 96
dtype = "{DTYPE}"

[env]
path = "envs.agent:Agent"
folders = ["EXAMPLES"]

[env.options]
function = "agent_openai:solve"
tasks = {{{{ path = "envs.instructions:Instructions", options = {{{{ kinds = ["begin", "without"] }}}} }}}}

[rollout]
group_size = 4
max_new_tokens = 16

[engine]
max_sequences = 16
enforce_eager = true
kv_cache_gib = 0.25

[train]
batch_size = 8
max_tokens_per_microbatch = 1024

[eval]
every = 0
problems = 4

[cluster]
gpus_per_node = 0
"""
"""All settings of weights and objective are defaults."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute in one thread: beside other tests, threads that wait for each other only take their time."""
    torch.set_num_threads(1)


def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    config = ModelConfig(path=str(smollm2))
    tokenizer, model = HfTokenizer(config), load_model(config)
    prompt = torch.tensor([tokenizer.render([Message("user", "What is the capital of France?")])])
    with torch.inference_mode():
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    said = tokens[0, prompt.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(said)
    assert tokenizer.token_texts(said)[-1] == "<|im_end|>"


def test_an_agent_is_trained_on_it_with_the_defaults_and_what_is_exported_says_the_same_in_vllm_and_transformers(
    smollm2: Path, start: Callable[..., Run], tmp_path: Path
) -> None:
    """An agent of the official client."""
    run = start(text=TEXT.replace("MODEL", str(smollm2)).replace("EXAMPLES", str(REPOSITORY / "examples")))
    assert run.wait(400) == 0, run.text()
    summary = run.summary()
    assert (summary["samples"], summary["failures"]) == (16, 0)
    assert 0 < summary["canary_error"] < MIN_TOLERANCE[DTYPE]
    (fresh,) = (row["mismatch_k3_age_0"] for row in run.rows() if row["age_max"] == 0)
    assert 0 < fresh < 0.01, "the trainer has the very tokens that the engine was asked with"
    exported = tmp_path / "exported"
    assert main(["export", str(run.directory), str(exported)]) == 0

    config = load([run.directory / "config.toml"], [f"model.path={exported}", "model.dtype=float32"])
    tokenizer, model = HfTokenizer(config.model), load_model(config.model)
    prompts = [tokenizer.render([Message("user", question)]) for question in QUESTIONS]
    expected: list[list[int]] = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        with torch.inference_mode():
            said = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=ANSWER, do_sample=False)
        expected.append(said[0, len(prompt) :].tolist())
    assert "Paris" in tokenizer.decode(expected[0])
    output = tmp_path / "said.json"
    (tmp_path / "config.toml").write_text(dump(config))
    words = ("-c", GREEDY, str(tmp_path / "config.toml"), json.dumps(prompts), str(output))
    code, told = run_forked(words, tmp_path / "greedy.txt")
    assert code == 0, told
    assert json.loads(output.read_text()) == expected


GREEDY = f"""
import anyio, json, sys
from pathlib import Path
from flash.config.load import load
from {__name__} import greedy

_, config, prompts, output = sys.argv
said = anyio.run(greedy, load([Path(config)], []), json.loads(prompts))
Path(output).write_text(json.dumps(said))
"""
"""Program that writes the responses of an engine at temperature 0 into a file."""


async def greedy(config: Config, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the responses of a new vLLM engine at temperature 0."""
    engine = VLLMEngine(config, 0, [])
    said: list[list[int]] = []
    await engine.start()
    try:
        for prompt in prompts:
            pieces = [
                piece async for piece in engine.generate(ResponseRequest(prompt, ANSWER, key=0, sampling=Sampling(0.0)))
            ]
            said += [list(piece.token_ids) for piece in pieces if isinstance(piece, Completion)]
    finally:
        await engine.close()
    return said
